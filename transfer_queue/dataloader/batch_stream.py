# SPDX-License-Identifier: Apache-2.0
"""A stream of batches with a bounded number of them fetched ahead by a thread."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from transfer_queue.errors import ClosedError, EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.transport.modes import cancel_on
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

_LOOK_EVERY_S = 0.25
_JOIN_S = 10.0
Item = tuple[int, Any, BatchMeta]
Pause = Callable[[float], bool]


class Fetched(Protocol):
    """A batch whose values may have to be copied yet."""

    def open(self) -> tuple[Any, BatchMeta]:
        """Its values and metadata; at most once, and not after ``close``."""
        ...

    def close(self) -> None:
        """Nobody wants the values (any more)."""
        ...


Fetch = Callable[[int, Callable[[], None]], Fetched | None]
"""fetch(batch_index, meanwhile): ``meanwhile`` may be called while the batch is awaited, and doesn't raise."""


def nothing() -> None:
    """To do while a batch is awaited."""


class _Behind:
    """The batch that came last: opened while the next one is awaited, so that copying and fetching overlap."""

    def __init__(self, hand_over: Callable[[int, Fetched], None]) -> None:
        self._hand_over = hand_over
        self._held: tuple[int, Fetched] | None = None
        self.error: BaseException | None = None

    def hold(self, batch_index: int, batch: Fetched) -> None:
        self._held = batch_index, batch

    def try_to_hand_over(self) -> None:
        """What goes wrong is raised by ``hand_over``."""
        held, self._held = self._held, None
        if held is not None:
            try:
                self._hand_over(*held)
            except BaseException as error:
                self.error = error
            finally:
                held[1].close()

    def hand_over(self) -> None:
        """Give the batch to the consumer, if that has not been done."""
        self.try_to_hand_over()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[1].close()


class BatchStream:
    """Yields (batch_index, data, metadata) for ``first``, ``first + stride``, …; ends with the partition.

    Args:
        make_fetcher: Called with ``pause(seconds) -> stop?``; returns the ``Fetch``.
        ahead: Batches fetched before they are asked for; 0: no thread.
        is_given_up: Looked at while waiting; True ends the stream.
    """

    def __init__(
        self,
        make_fetcher: Callable[[Pause], Fetch],
        first: int,
        stride: int,
        ahead: int,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._stop = threading.Event()
        self._is_given_up = is_given_up
        self._indexes = range(first, 1 << 62, stride)
        self._fetch = make_fetcher(self._pause)
        self._fetched: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(ahead)  # taken before a fetch, given back when its batch is taken
        self._ready: deque[tuple[Any, BatchMeta]] = deque()
        self._thread: threading.Thread | None = None
        self._ahead = ahead

    def __iter__(self) -> Generator[Item, None, None]:
        if not self._ahead:
            yield from self._batches()
            return
        wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(wake_read,), name="transfer-queue-prefetch", daemon=True
        )
        self._thread.start()
        try:
            while (item := self._next()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self._ready.popleft()
                self._slots.release()
                yield item
                item = None  # else it would be held while the next one is awaited
        finally:
            self.close()

    def _next(self) -> Item | BaseException | None:
        while True:
            try:
                return self._fetched.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if self._is_given_up():
                    return None

    def ahead(self) -> list[tuple[Any, BatchMeta]]:
        """What is fetched and not taken yet."""
        return list(self._ready)

    def close(self) -> None:
        """Stop fetching and wait for the thread. Idempotent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        os.close(self._wake_write)  # the other end becomes readable, which ends a call that waits
        self._slots.release()
        thread.join(_JOIN_S)
        if thread.is_alive():
            logger.warning("a fetch did not return within %.0f s of closing its stream; its thread is left.", _JOIN_S)

    def _pause(self, seconds: float) -> bool:
        return self._stop.wait(seconds) if seconds else self._stop.is_set() or self._is_given_up()

    def _batches(self) -> Iterator[Item]:
        for batch_index in self._indexes:
            batch = self._fetch_one(batch_index, nothing)
            if batch is None:
                return
            try:
                opened = batch.open()
            finally:
                batch.close()
            yield batch_index, *opened
            del opened

    def _fetch_one(self, batch_index: int, meanwhile: Callable[[], None]) -> Fetched | None:
        try:
            return self._fetch(batch_index, meanwhile)
        except EndOfPartitionError as end:
            logger.info("%s", end)
            return None

    def _run(self, wake_read: int) -> None:
        try:
            with cancel_on(wake_read):
                self._fetch_ahead()
        except ClosedError as error:
            if not self._stop.is_set():
                self._fetched.put(error)
        except BaseException as error:  # the consumer's thread raises it
            self._fetched.put(error)
        finally:
            os.close(wake_read)

    def _fetch_ahead(self) -> None:
        behind = _Behind(self._hand_over)
        try:
            for batch_index in self._indexes:
                if not self._slots.acquire(blocking=False):
                    behind.hand_over()
                    self._slots.acquire()  # ``close`` gives one back, too
                if self._stop.is_set():
                    return
                batch = self._fetch_after(batch_index, behind)
                if batch is None:
                    self._fetched.put(None)
                    return
                behind.hold(batch_index, batch)
        finally:
            behind.close()

    def _fetch_after(self, batch_index: int, behind: _Behind) -> Fetched | None:
        batch = None
        try:
            batch = self._fetch_one(batch_index, behind.try_to_hand_over)
            behind.hand_over()
        except BaseException as error:
            if batch is not None:
                batch.close()
            if self._stop.is_set():
                behind.close()
            behind.try_to_hand_over()
            if behind.error is not None and behind.error is not error:  # of the batch that comes first
                raise behind.error from error
            raise
        return batch

    def _hand_over(self, batch_index: int, batch: Fetched) -> None:
        data, meta = batch.open()
        self._ready.append((data, meta))
        self._fetched.put((batch_index, data, meta))
