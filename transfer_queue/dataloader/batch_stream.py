# SPDX-License-Identifier: Apache-2.0
"""A stream of batches, some of them prefetched: by a thread, or by the reader if that is faster."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from transfer_queue.dataloader.pipeline import Fetch, Fetched, Pipeline
from transfer_queue.dataloader.turns import Turns
from transfer_queue.errors import ClosedError
from transfer_queue.metadata import BatchMeta
from transfer_queue.transport.modes import cancel_on
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

_LOOK_EVERY_S = 0.25
_JOIN_S = 10.0
Item = tuple[int, Any, BatchMeta]
Pause = Callable[[float], bool]


class _YourTurn:
    """From the thread to the reader: the pipeline is yours, and the next batch is already requested."""


class BatchStream:
    """Yields (batch_index, data, metadata) for ``first``, ``first + stride``, …; ends with the partition.

    A thread prefetches while the reader is busy. During the reader's turns the reader owns the pipeline, as long as
    each batch arrives before the reader needs it.

    Args:
        make_fetcher: Called with ``pause(seconds) -> stop?``; returns the ``Fetch``.
        ahead: Number of batches to prefetch; 0: no thread.
        is_given_up: Polled while waiting; True ends the stream.
        turns: Decides between thread and reader; affects only speed.
    """

    def __init__(
        self,
        make_fetcher: Callable[[Pause], Fetch],
        first: int,
        stride: int,
        ahead: int,
        is_given_up: Callable[[], bool],
        turns: Turns | None = None,
    ) -> None:
        self._stop = threading.Event()
        self._is_given_up = is_given_up
        self._pipeline = Pipeline(iter(range(first, 1 << 62, stride)), make_fetcher(self._pause))
        self._fetched: queue.SimpleQueue[Item | _YourTurn | BaseException | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(ahead)  # permits, one per requested batch until it is taken
        self._ready: deque[tuple[Any, BatchMeta]] = deque()
        self._thread: threading.Thread | None = None
        self._ahead = ahead
        self._turns = turns or Turns()
        self._is_mine = False  # the reader owns the pipeline; then its one requested batch has a permit
        self._returned: queue.SimpleQueue[bool] = queue.SimpleQueue()  # returns the pipeline to the thread; False: stop

    def __iter__(self) -> Generator[Item, None, None]:
        try:
            if self._ahead:
                wake_read, self._wake_write = os.pipe()
                thread = threading.Thread(
                    target=self._run, args=(wake_read,), name="transfer-queue-prefetch", daemon=True
                )
                thread.start()
                self._thread = thread
            while (item := self._next() if self._ahead else self._fetch_one()) is not None:
                yield item
                item = None  # otherwise the batch would stay alive while waiting for the next one
        finally:
            self.close()

    def ahead(self) -> list[tuple[Any, BatchMeta]]:
        """Batches that are fetched and not taken yet."""
        return list(self._ready)

    def close(self) -> None:
        """Stop fetching and wait for the thread. Idempotent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            os.close(self._wake_write)  # makes the other end readable, which ends a waiting call
            self._slots.release()
            self._returned.put(False)
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.warning(
                    "a fetch did not return within %.0f s of closing its stream; its thread is left.", _JOIN_S
                )
                return
        self._pipeline.close()

    def _pause(self, seconds: float) -> bool:
        return self._stop.wait(seconds) if seconds else self._stop.is_set() or self._is_given_up()

    # ---- the reader ----

    def _next(self) -> Item | None:
        self._turns.asked(time.monotonic())
        item: Item | _YourTurn | None = _YourTurn()
        while isinstance(item, _YourTurn):
            if self._is_mine and not (self._turns.is_readers and self._pipeline.is_near()):
                self._is_mine = False
                self._returned.put(True)
            item = self._fetch_one() if self._is_mine else self._from_thread()
            self._is_mine = self._is_mine or isinstance(item, _YourTurn)
        self._turns.taken(time.monotonic())
        return item

    def _from_thread(self) -> Item | _YourTurn | None:
        while True:
            try:
                item = self._fetched.get(timeout=_LOOK_EVERY_S)
                break
            except queue.Empty:
                if self._is_given_up():
                    return None
        if isinstance(item, BaseException):
            raise item
        if item is not None and not isinstance(item, _YourTurn):
            self._ready.popleft()
            self._slots.release()
        return item

    def _fetch_one(self) -> Item | None:
        """Fetch the next batch; with a thread, also request the one after it."""
        received = self._pipeline.receive()
        if received is None:
            return None
        batch_index, batch = received
        try:
            if self._is_mine:
                self._pipeline.ask()
            return batch_index, *batch.open()
        finally:
            batch.close()

    # ---- the thread ----

    def _run(self, wake_read: int) -> None:
        try:
            with cancel_on(wake_read):
                while self._fetch_ahead():
                    self._fetched.put(_YourTurn())
                    if not self._returned.get():
                        return
            self._fetched.put(None)
        except ClosedError as error:
            if not self._stop.is_set():
                self._fetched.put(error)
        except BaseException as error:  # raised in the reader
            self._fetched.put(error)
        finally:
            os.close(wake_read)

    def _fetch_ahead(self) -> bool:
        """Prefetch at least one batch. True: it is the reader's turn; all batches were handed over and the next one
        requested.
        """
        held: tuple[int, Fetched] | None = None  # the last batch, opened while the next one is on its way
        some_came = False
        try:
            while True:
                if not self._pipeline.is_asked:
                    if not self._slots.acquire(blocking=False):
                        self._hand_over(held)
                        held = None
                        self._slots.acquire()  # ``close`` also releases a permit
                    if self._stop.is_set():
                        return False
                    self._pipeline.ask()
                self._hand_over(held)
                held = None
                if some_came and self._turns.is_readers:
                    return True
                held = self._pipeline.receive()
                if held is None:
                    return False
                some_came = True
        finally:
            if held is not None:
                held[1].close()

    def _hand_over(self, held: tuple[int, Fetched] | None) -> None:
        if held is None:
            return
        batch_index, batch = held
        try:
            data, meta = batch.open()
        finally:
            batch.close()
        self._ready.append((data, meta))
        self._fetched.put((batch_index, data, meta))
