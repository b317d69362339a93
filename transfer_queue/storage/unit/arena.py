# SPDX-License-Identifier: Apache-2.0
"""The arena of a unit, in the server: anonymous shared memory that this host's processes map, gone with the last."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from transfer_queue.storage.changes import Changes
from transfer_queue.storage.messages import whole_pages
from transfer_queue.storage.recycling import Watch, watched
from transfer_queue.storage.wire import ByteArray


class FreeList:
    """Free ranges of an address space. The smallest that fits is taken; neighbours grow together, so no two touch."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), ascending
        self._sizes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self.total = 0

    def take(self, size: int) -> int | None:
        """Return the start of a range of this size, which is no longer free; None if none is large enough."""
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def free(self, start: int, size: int) -> None:
        """Make a range free; it must not overlap a free one."""
        end = start + size
        before = self._starts.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._sizes:
            end += self._remove(end)
        self._insert(start, end - start)

    def take_largest(self, total: int) -> list[tuple[int, int]]:
        """Take this much free space in total from as few ranges as possible: (start, size), the largest first."""
        taken = []
        while total:
            size = min(self._by_size[-1][0], total)
            start = self.take(size)
            assert start is not None
            taken.append((start, size))
            total -= size
        return taken

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._sizes[start], self._starts[start + size] = size, start
        self.total += size

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.total -= size
        return size


IDLE_S = 30.0
"""Pages that were free for this long are returned to the kernel. Until then they are recycled as they are, because
first touching a page costs several times as much as copying into it.
"""

_TRIMMED_NBYTES = 32 * 1024 * 1024
"""The most bytes to return in one go, which takes some ten milliseconds."""
_SPARSE_FACTOR = 4  # addresses are free and pages come with use: enough that fragmentation never matters


class Arena:
    """Allocates and recycles whole pages.

    An extent is freed when nothing refers to its memory any more: no block, no reader's pin, no answer being sent.
    Only the unit's thread uses it, but extents may end in any thread.
    """

    def __init__(self, nbytes: int | None = None, descriptor: int | None = None) -> None:
        """
        Args:
            nbytes: Size of the address range; None: several times this machine's memory.
            descriptor: Descriptor of a file in place of anonymous memory. It is closed by ``close``, or if this fails.
        Raises:
            OSError: this system refuses such memory, or a mapping of this size.
        """
        self.nbytes = whole_pages(nbytes or _SPARSE_FACTOR * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self.descriptor = os.memfd_create("transfer-queue-arena", os.MFD_CLOEXEC) if descriptor is None else descriptor
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            self._map = mmap.mmap(self.descriptor, self.nbytes)
        except (OSError, ValueError, OverflowError):
            os.close(self.descriptor)
            raise
        self.changes: Changes | None = None
        """Where clients that share it see which values have changed; set where it is lent to some."""
        self._first: int = np.frombuffer(self._map, np.uint8, 1).__array_interface__["data"][0]
        self._cold, self._warm = FreeList(), FreeList()
        self._cold.free(0, self.nbytes)
        self._watches: dict[int, Watch] = {}
        self._ended: deque[Watch] = deque()
        self._now = 0.0
        self._watched = 0.0
        self._idle_nbytes = 0
        """The smallest amount that was free since the time ``_watched``."""

    def close(self) -> None:
        """Close the descriptor; the memory ends with the last mapping."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # ---- allocation ----

    def allocate(self, nbytes: int) -> ByteArray | None:
        """Return memory of this size with undefined contents; None if no address range is left."""
        size = whole_pages(max(nbytes, 1))
        self._collect()
        start = self._warm.take(size)
        if start is None:
            start = self._cold.take(size)
        else:
            self._idle_nbytes = min(self._idle_nbytes, self._warm.total)
        if start is None:
            return None
        extent: ByteArray = self._extent(start, size)[:nbytes]
        return extent

    def carve(self, extent: ByteArray, ranges: Sequence[tuple[int, int]]) -> list[ByteArray]:
        """Split an extent, which must have no other references, into separate ones that are freed one by one.

        Args:
            ranges: (offset in the arena, nbytes), ascending, each beginning on a page of its own.
        Returns:
            One extent per range; pages outside all ranges are free again.
        """
        start = self.offset_of(extent)
        watch = self._watches.pop(start)
        at, made = start, []
        for begin, nbytes in ranges:
            end = begin + whole_pages(nbytes)
            self._free(at, begin - at)
            made.append(self._extent(begin, end - begin)[:nbytes])
            at = end
        self._free(at, start + watch.nbytes - at)
        return made

    def offset_of(self, memory: ByteArray) -> int:
        """The offset of this memory in the arena; -1 if it lies elsewhere."""
        offset: int = memory.__array_interface__["data"][0] - self._first
        return offset if 0 <= offset < self.nbytes else -1

    def _extent(self, start: int, size: int) -> ByteArray:
        self._watches[start], extent = watched(self._map, size, Watch, self._ended.append, start)
        return extent

    def _free(self, start: int, size: int) -> None:
        if size:
            if not self._warm.total:
                self._watched, self._idle_nbytes = self._now, size
            self._warm.free(start, size)

    def _collect(self) -> None:
        while self._ended:
            watch = self._ended.popleft()
            if self._watches.get(watch.start) is watch:  # otherwise it was carved
                del self._watches[watch.start]
                self._free(watch.start, watch.nbytes)

    # ---- usage ----

    @property
    def used_nbytes(self) -> int:
        """Bytes in extents."""
        self._collect()
        return self.nbytes - self._cold.total - self._warm.total

    @property
    def recyclable_nbytes(self) -> int:
        """Bytes of free pages that the kernel still keeps for the arena."""
        self._collect()
        return self._warm.total

    def tick(self, now: float) -> None:
        """Set the time for ``trim``."""
        self._now = now
        self._collect()

    def trim(self, now: float) -> None:
        """Return as much memory to the kernel as was free for ``IDLE_S`` seconds.

        It does not track which pages were idle: steady traffic goes through all of them, even if it needs few at a
        time.
        """
        self.tick(now)
        if now < self._watched + IDLE_S:
            return
        some = min(self._idle_nbytes, _TRIMMED_NBYTES)
        for start, size in self._warm.take_largest(some):
            self._return(start, size)
            self._cold.free(start, size)
        self._idle_nbytes -= some
        if not self._idle_nbytes:  # otherwise the rest is due at once, after the waiting requests
            self._watched, self._idle_nbytes = now, self._warm.total

    def _return(self, start: int, size: int) -> None:
        self._map.madvise(mmap.MADV_REMOVE, start, size)

    def next_trim(self) -> float | None:
        """The time of the next ``trim``; None if there is nothing to return."""
        return self._watched + IDLE_S if self._warm.total else None
