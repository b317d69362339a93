# SPDX-License-Identifier: Apache-2.0
"""Memory of batches that their reader dropped, kept for the next: touching fresh pages costs more than the copy."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from transfer_queue.storage.pieces import ByteArray

POOLED_NBYTES = 1024 * 1024
"""Smaller buffers are the allocator's business: it recycles them itself."""
KEPT_NBYTES = 256 * 1024 * 1024
"""Most that a process keeps without using it."""
_LOOSE = 1.25  # a buffer is given for a request that is at most this much smaller


class _Buffer(np.ndarray[Any, Any]):
    """Its base is the mapping, not another array, so that every view made of it keeps it alive."""


class _Watch(weakref.ref[_Buffer]):
    __slots__ = ("memory",)

    memory: mmap.mmap


class Recycler:
    """Buffers come back by themselves when no tensor or array points at them any more."""

    def __init__(self, kept_nbytes: int = KEPT_NBYTES) -> None:
        self._limit = kept_nbytes
        self._lock = threading.Lock()
        self._watches: dict[int, _Watch] = {}
        self._dropped: deque[_Watch] = deque()  # filled where garbage is collected: no lock there
        self._kept: list[mmap.mmap] = []  # oldest first

    @property
    def kept_nbytes(self) -> int:
        """Bytes that wait for a new use."""
        with self._lock:
            self._collect()
            return sum(map(len, self._kept))

    def empty(self, nbytes: int) -> ByteArray:
        """Memory of this size, contents undefined, the caller's own."""
        if nbytes < POOLED_NBYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            memory = self._take(nbytes)
        if memory is None:
            memory = _mapping(nbytes)
        buffer = np.ndarray.__new__(_Buffer, (nbytes,), np.uint8, buffer=memory)
        watch = _Watch(buffer, self._dropped.append)
        watch.memory = memory
        self._watches[id(watch)] = watch
        plain: ByteArray = buffer.view(np.ndarray)
        return plain

    def _take(self, nbytes: int) -> mmap.mmap | None:
        fitting = [memory for memory in self._kept if nbytes <= len(memory) <= _LOOSE * nbytes + mmap.PAGESIZE]
        if not fitting:
            return None
        best = min(fitting, key=len)
        self._kept = [memory for memory in self._kept if memory is not best]
        return best

    def _collect(self) -> None:
        while self._dropped:
            watch = self._dropped.popleft()
            del self._watches[id(watch)]
            self._kept.append(watch.memory)
        held = sum(map(len, self._kept))
        while held > self._limit:
            held -= len(self._kept.pop(0))

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()


def _mapping(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_recycler = Recycler()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_recycler.after_fork)
empty = _recycler.empty
