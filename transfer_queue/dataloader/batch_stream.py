# SPDX-License-Identifier: Apache-2.0
"""A stream of batches; each is requested before the one ahead of it is copied, so the reader rarely waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Protocol

from transfer_queue.errors import EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

Item = tuple[int, Any, BatchMeta]


class Requested(Protocol):
    """A requested batch."""

    def receive(self) -> bool:
        """Wait for the batch, once; its values may not have been copied yet. False: stop.

        Raises:
            EndOfPartitionError: the stream has ended before this batch.
            BatchTimeoutError: it did not come within the stream's ``timeout_s``.
        """

    def open(self) -> tuple[Any, BatchMeta]:
        """Return the values and metadata of the received batch; at most once, and not after ``close``."""

    def close(self) -> None:
        """Cancel the request if it is still pending, and release the batch; its values are no longer needed."""


Fetch = Callable[[int], Requested | None]
"""fetch(batch_index) requests a batch; None: stop."""


def batch_stream(fetch: Fetch, first: int, stride: int, prefetch: bool) -> Generator[Item, None, None]:
    """Yield (batch_index, data, metadata) for ``first``, ``first + stride``, …; ends with the partition.

    Everything runs in the reader's thread. The next batch is chosen and pinned by the queue while the reader is busy
    with the current one. Its values are copied when the reader takes it. Batches are requested one by one, because
    the queue may answer two requests of one client in either order.

    Args:
        prefetch: Request a batch before the reader asks for it.
    """
    ahead: Requested | None = None
    requested: Requested | None = None
    try:
        for batch_index in itertools.count(first, stride):
            requested, ahead = ahead or fetch(batch_index), None
            if requested is None or not _has_come(requested):
                return
            if prefetch:
                with suppress(Exception):  # it fails again in its turn, when the batch before it was delivered
                    ahead = fetch(batch_index + stride)
            item = batch_index, *requested.open()
            requested.close()
            requested = None
            yield item
            del item  # otherwise the batch would stay alive while waiting for the next one
    finally:
        for left in (requested, ahead):
            if left is not None:
                left.close()


def _has_come(requested: Requested) -> bool:
    """Wait for the batch. False: the stream has ended, or stops."""
    try:
        return requested.receive()
    except EndOfPartitionError as end:
        logger.info("%s", end)
        return False
