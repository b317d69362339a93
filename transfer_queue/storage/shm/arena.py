# SPDX-License-Identifier: Apache-2.0
"""The arena of a storage unit: anonymous shared memory that processes of this host map. Gone with its last process."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.storage.pieces import ByteArray
from transfer_queue.storage.shm.free_list import FreeList

PAGE_NBYTES = mmap.PAGESIZE
IDLE_S = 30.0
"""As many pages as were free all this time go back to the kernel; until then they are recycled as they are, because
the first touch of a page costs several times what a copy into it does."""

_TRIMMED_NBYTES = 32 * 1024 * 1024
"""At most so many bytes in one go, which takes some ten milliseconds."""
_SPARSE_FACTOR = 4  # addresses are free, pages come with use: room enough that fragmentation never matters


def whole_pages(nbytes: int) -> int:
    """What an allocation of so many bytes takes."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class _Extent(np.ndarray[Any, Any]):
    """Its base is the mapping, not another array, so that every view made of it keeps it alive."""


class _Watch(weakref.ref[_Extent]):
    __slots__ = ("nbytes", "start")

    start: int
    nbytes: int


class Arena:
    """Whole pages, taken and recycled. An extent comes back by itself when nothing points at its memory any more:
    no block, no pin of a reader, no answer on its way out.

    Used by the unit's thread; extents may end in any thread.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        """``nbytes``: size of the address range; None: several times this machine's memory.

        Raises:
            OSError: this system has no memfd_create, or refuses a mapping of this size.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd_create")
        self.nbytes = whole_pages(nbytes or _SPARSE_FACTOR * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self.descriptor = os.memfd_create("transfer-queue-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            self._map = mmap.mmap(self.descriptor, self.nbytes)
        except (OSError, ValueError, OverflowError):
            os.close(self.descriptor)
            raise
        self._first: int = np.frombuffer(self._map, np.uint8, 1).__array_interface__["data"][0]
        self._cold, self._warm = FreeList(), FreeList()
        self._cold.give(0, self.nbytes)
        self._watches: dict[int, _Watch] = {}
        self._ended: deque[_Watch] = deque()
        self._now = 0.0
        self._watched = 0.0
        self._idle_nbytes = 0
        """The least that was free since the time ``_watched``."""

    def close(self) -> None:
        """Let go of the descriptor; the memory goes with the last mapping."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # ---- allocation ----

    def allocate(self, nbytes: int) -> ByteArray | None:
        """Memory of this size with undefined contents; None when no range of addresses is left."""
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
        """Turn an extent that nobody else refers to into separate ones, each freed on its own.

        Args:
            ranges: (offset in the arena, nbytes), ascending, each beginning on a page of its own.
        Returns:
            One extent per range; what none of them covers is free again.
        """
        start = self.offset_of(extent)
        watch = self._watches.pop(start)
        at, made = start, []
        for begin, nbytes in ranges:
            end = begin + whole_pages(nbytes)
            self._give(at, begin - at)
            made.append(self._extent(begin, end - begin)[:nbytes])
            at = end
        self._give(at, start + watch.nbytes - at)
        return made

    def offset_of(self, memory: ByteArray) -> int:
        """Where it begins in the arena; -1: elsewhere."""
        offset: int = memory.__array_interface__["data"][0] - self._first
        return offset if 0 <= offset < self.nbytes else -1

    def _extent(self, start: int, size: int) -> ByteArray:
        extent: _Extent = np.ndarray.__new__(_Extent, (size,), np.uint8, buffer=self._map, offset=start)
        watch = self._watches[start] = _Watch(extent, self._ended.append)
        watch.start, watch.nbytes = start, size
        plain: ByteArray = extent.view(np.ndarray)
        return plain

    def _give(self, start: int, size: int) -> None:
        if size:
            if not len(self._warm):
                self._watched, self._idle_nbytes = self._now, size
            self._warm.give(start, size)

    def _collect(self) -> None:
        while self._ended:
            watch = self._ended.popleft()
            if self._watches.get(watch.start) is watch:  # else it was carved
                del self._watches[watch.start]
                self._give(watch.start, watch.nbytes)

    # ---- what it takes ----

    @property
    def used_nbytes(self) -> int:
        """Bytes in extents."""
        self._collect()
        return self.nbytes - self._cold.total - self._warm.total

    @property
    def recyclable_nbytes(self) -> int:
        """Bytes of free pages that the kernel still keeps for us."""
        self._collect()
        return self._warm.total

    def tick(self, now: float) -> None:
        """The time, for ``trim``."""
        self._now = now
        self._collect()

    def trim(self, now: float) -> None:
        """Give the kernel back as much as was free for ``IDLE_S`` seconds.

        Not the very pages that lay idle: steady traffic goes through all of them, however little of them it needs.
        """
        self.tick(now)
        if now < self._watched + IDLE_S:
            return
        some = min(self._idle_nbytes, _TRIMMED_NBYTES)
        for start, size in self._warm.take_largest(some):
            self._map.madvise(mmap.MADV_REMOVE, start, size)
            self._cold.give(start, size)
        self._idle_nbytes -= some
        if not self._idle_nbytes:  # else the rest is due at once, after whoever waits for an answer
            self._watched, self._idle_nbytes = now, self._warm.total

    def next_trim(self) -> float | None:
        """When to ``trim``; None while there is nothing to give back."""
        return self._watched + IDLE_S if len(self._warm) else None
