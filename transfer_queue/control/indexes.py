# SPDX-License-Identifier: Apache-2.0
"""Hands out global indexes: contiguous per call, ascending, never reused."""

from __future__ import annotations

import numpy as np

from transfer_queue.protocol import Indexes


class IndexAllocator:
    """The one counter of the queue."""

    def __init__(self, first: int = 0) -> None:
        self.next_index = first

    def allocate(self, count: int) -> Indexes:
        """``count`` new contiguous indexes."""
        start, self.next_index = self.next_index, self.next_index + count
        return np.arange(start, start + count, dtype=np.int64)
