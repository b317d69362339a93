# SPDX-License-Identifier: Apache-2.0
"""Batches one after the other, each asked for before it is waited for. Used by one thread at a time, any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from transfer_queue.errors import EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)


class Fetched(Protocol):
    """A batch whose values may have to be copied yet."""

    def open(self) -> tuple[Any, BatchMeta]:
        """Its values and metadata; at most once, and not after ``close``."""
        ...

    def close(self) -> None:
        """Nobody wants the values (any more)."""
        ...


class Asked(Protocol):
    """A batch that was asked for."""

    def is_near(self) -> bool:
        """Will ``receive`` return at once, or within a moment? False also where that can't be told."""
        ...

    def receive(self) -> Fetched | None:
        """Wait for it, once; None when told to stop.

        Raises:
            EndOfPartitionError: the stream has ended before this batch.
            BatchTimeoutError: it did not come within the stream's ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """Nobody waits for it (any more)."""
        ...


Fetch = Callable[[int], Asked | None]
"""fetch(batch_index) asks for a batch; None: told to stop."""


class _Failed:
    """What could not be asked for: known when the batch before it may not have been opened yet."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_near(self) -> bool:
        return True

    def receive(self) -> Fetched | None:
        raise self._error

    def close(self) -> None:
        """There is nothing to let go of."""


class Pipeline:
    """The batches of these indexes."""

    def __init__(self, indexes: Iterator[int], fetch: Fetch) -> None:
        self._indexes = indexes
        self._fetch = fetch
        self._asked: tuple[int, Asked | None] | None = None

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    def ask(self) -> None:
        """Ask for the next batch, unless it was. What goes wrong is raised by ``receive``."""
        if self._asked is not None:
            return
        index = next(self._indexes)
        try:
            self._asked = index, self._fetch(index)
        except Exception as error:  # whatever it is, the batches before this one come first
            self._asked = index, _Failed(error)

    def is_near(self) -> bool:
        """Will ``receive`` return at once, or within a moment?"""
        return self._asked is not None and (self._asked[1] is None or self._asked[1].is_near())

    def receive(self) -> tuple[int, Fetched] | None:
        """The next batch and its index; None: there is none any more. Raises BatchTimeoutError."""
        self.ask()
        assert self._asked is not None
        index, asked = self._asked
        self._asked = None
        try:
            batch = None if asked is None else asked.receive()
        except EndOfPartitionError as end:
            logger.info("%s", end)
            return None
        finally:
            if asked is not None:
                asked.close()
        return None if batch is None else (index, batch)

    def close(self) -> None:
        """Nobody waits for what was asked for. Idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None and asked[1] is not None:
            asked[1].close()
