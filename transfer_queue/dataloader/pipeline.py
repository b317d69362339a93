# SPDX-License-Identifier: Apache-2.0
"""Batches in sequence, each requested before it is received. Any thread may use it, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from transfer_queue.errors import EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)


class Fetched(Protocol):
    """A batch; its values may not have been copied yet."""

    def open(self) -> tuple[Any, BatchMeta]:
        """Return its values and metadata; at most once, and not after ``close``."""
        ...

    def close(self) -> None:
        """Release the batch; its values are no longer needed."""
        ...


class Asked(Protocol):
    """A requested batch."""

    def is_near(self) -> bool:
        """Return whether ``receive`` will return at once or nearly so; False if unknown."""
        ...

    def receive(self) -> Fetched | None:
        """Wait for the batch, once; None: stop.

        Raises:
            EndOfPartitionError: the stream has ended before this batch.
            BatchTimeoutError: it did not come within the stream's ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """Cancel the request if it is still pending."""
        ...


Fetch = Callable[[int], Asked | None]
"""fetch(batch_index) requests a batch; None: stop."""


class _Failed:
    """A request that failed. The error is raised later, because the previous batch may not have been opened yet."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_near(self) -> bool:
        return True

    def receive(self) -> Fetched | None:
        raise self._error

    def close(self) -> None:
        """There is nothing to release."""


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
        """Request the next batch, unless it is already requested. Errors are raised by ``receive``."""
        if self._asked is not None:
            return
        index = next(self._indexes)
        try:
            self._asked = index, self._fetch(index)
        except Exception as error:  # any error must wait until the batches before this one are delivered
            self._asked = index, _Failed(error)

    def is_near(self) -> bool:
        """Return whether ``receive`` will return at once or nearly so."""
        return self._asked is not None and (self._asked[1] is None or self._asked[1].is_near())

    def receive(self) -> tuple[int, Fetched] | None:
        """Return the next batch and its index; None: the stream has ended. Raises BatchTimeoutError."""
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
        """Cancel the requested batch. Idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None and asked[1] is not None:
            asked[1].close()
