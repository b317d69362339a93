# SPDX-License-Identifier: Apache-2.0
"""A stream of batches; each is requested before the one ahead of it is copied, so the reader rarely waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from transfer_queue.errors import EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

Item = tuple[int, Any, BatchMeta]


class Fetched(Protocol):
    """A batch; its values may not have been copied yet."""

    def open(self) -> tuple[Any, BatchMeta]:
        """Return its values and metadata; at most once, and not after ``close``."""
        ...

    def close(self) -> None:
        """Release the batch; its values are no longer needed."""
        ...


class Requested(Protocol):
    """A requested batch."""

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


Fetch = Callable[[int], Requested | None]
"""fetch(batch_index) requests a batch; None: stop."""


class _Failed:
    """A request that failed. The error is raised later, because batches before it may not have been taken yet."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def receive(self) -> Fetched | None:
        raise self._error

    def close(self) -> None:
        """There is nothing to release."""


def batch_stream(fetch: Fetch, first: int, stride: int, prefetch: bool) -> Generator[Item, None, None]:
    """Yield (batch_index, data, metadata) for ``first``, ``first + stride``, …; ends with the partition.

    Everything runs in the reader's thread. The next batch is chosen and pinned by the queue while the reader is busy
    with the current one. Its values are copied when the reader takes it. Batches are requested one by one, because
    the queue may answer two requests of one client in either order.

    Args:
        prefetch: Request a batch before the reader asks for it.
    """
    indexes = iter(range(first, 1 << 62, stride))
    ahead: tuple[int, Requested | None] | None = None
    try:
        while True:
            batch_index, requested = ahead or request(fetch, next(indexes))
            ahead = None
            if requested is None or (batch := _received(requested)) is None:
                return
            try:
                if prefetch:
                    ahead = request(fetch, next(indexes))
                item = batch_index, *batch.open()
            finally:
                batch.close()
            yield item
            del item, batch, requested  # otherwise the batch would stay alive while waiting for the next one
    finally:
        if ahead is not None and ahead[1] is not None:
            ahead[1].close()


def request(fetch: Fetch, batch_index: int) -> tuple[int, Requested | None]:
    try:
        return batch_index, fetch(batch_index)
    except Exception as error:  # any error must wait until the batch before this one is delivered
        return batch_index, _Failed(error)


def _received(requested: Requested) -> Fetched | None:
    """Wait for the batch; None: the stream has ended, or stops."""
    try:
        return requested.receive()
    except EndOfPartitionError as end:
        logger.info("%s", end)
        return None
    finally:
        requested.close()
