# SPDX-License-Identifier: Apache-2.0
"""Allocates global indexes, contiguous per call, ascending, never reused; and counts those in use."""

from __future__ import annotations

import numpy as np

from transfer_queue.protocol import Indexes

MAX_INDEX = 2**62
"""Never reached by counting; indexes from a checkpoint must stay below."""


class IndexAllocator:
    """The only index counter of the queue.

    ``num_used``: samples and reservations of all partitions, which count towards the capacity. Partitions update it.
    """

    def __init__(self, first: int = 0) -> None:
        self.next_index = first
        self.num_used = 0

    def allocate(self, count: int) -> Indexes:
        """Allocate ``count`` new contiguous indexes."""
        start, self.next_index = self.next_index, self.next_index + count
        return np.arange(start, start + count, dtype=np.int64)
