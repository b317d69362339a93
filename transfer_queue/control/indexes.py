# SPDX-License-Identifier: Apache-2.0
"""Hands out global indexes, contiguous per call, ascending, never reused; and counts those that hold a place."""

from __future__ import annotations

import numpy as np

from transfer_queue.protocol import Indexes

MAX_INDEX = 2**62
"""Never reached by counting; what a checkpoint brings must stay below."""


class IndexAllocator:
    """The one counter of the queue.

    ``num_used``: samples and reservations of all partitions, what a capacity counts; partitions keep it up to date.
    """

    def __init__(self, first: int = 0) -> None:
        self.next_index = first
        self.num_used = 0

    def allocate(self, count: int) -> Indexes:
        """``count`` new contiguous indexes."""
        start, self.next_index = self.next_index, self.next_index + count
        return np.arange(start, start + count, dtype=np.int64)
