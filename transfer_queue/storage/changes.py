# SPDX-License-Identifier: Apache-2.0
"""Changes: a page that a unit shares with its host, so that a client sees whether values are still those it was given.

The server writes it and clients read it, without a message.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from transfer_queue.storage.wire import IntArray

_LAST = mmap.PAGESIZE // 8 - 1
"""Of the counters, whose number is a power of two."""
_NEIGHBOURS = 6
"""As a power of two: how many samples in a row have one counter."""


class Changes:
    """Counters of replaced and deleted values. Those of several samples may be one, so some count for others, too."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the page of a descriptor, to read it, or make one. Raises OSError or ValueError."""
        self.descriptor = -1
        """That of a page that was made here; it is gone with the last process that maps it."""
        prot = mmap.PROT_READ
        if descriptor is None:
            descriptor = self.descriptor = os.memfd_create("transfer-queue-changes", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, mmap.PAGESIZE)
            prot |= mmap.PROT_WRITE
        self._counts = np.frombuffer(mmap.mmap(descriptor, mmap.PAGESIZE, prot=prot), np.int64)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def count(self, indexes: IntArray) -> None:
        """Values of these samples are replaced or deleted, in the turn that this is part of."""
        self._counts[indexes >> _NEIGHBOURS & _LAST] += 1

    def count_all(self) -> None:
        """From now on, nobody may rely on what was given before."""
        self._counts += 1

    def stamp(self, indexes: IntArray) -> int:
        """Where it is the same again, all values of these samples are what they were."""
        return int(self._counts[indexes >> _NEIGHBOURS & _LAST].sum())
