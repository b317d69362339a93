# SPDX-License-Identifier: Apache-2.0
"""Memory that is recycled when nothing refers to it, in client and server; and the client's pool for batches."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from transfer_queue.storage.wire import ByteArray

POOLED_NBYTES = 128 * 1024
"""Smaller buffers are left to the allocator, which recycles them itself but may return larger ones to the system."""
KEPT_NBYTES = 256 * 1024 * 1024
"""The most unused memory that a process keeps."""
_LARGE_NBYTES, _MOST_DROPPED = 4 * 1024 * 1024, 16
"""Dropped buffers below the first size are collected in groups of at most the second number."""
_LOOSE = 1.25  # a buffer may be at most this factor larger than requested


class _Buffer(np.ndarray[Any, Any]):
    """Its base is the mapping and not another array, so that every view keeps it alive."""


class Watch(weakref.ref[_Buffer]):
    """A weak reference to a buffer, which is ``nbytes`` of ``memory`` from ``start`` on."""

    __slots__ = ("memory", "nbytes", "start")

    memory: mmap.mmap
    nbytes: int
    start: int


W = TypeVar("W", bound=Watch)


class Recycler:
    """Buffers return to the pool when no tensor or array refers to them any more. Touching fresh pages costs more than
    the copy into them.
    """

    def __init__(self, kept_nbytes: int = KEPT_NBYTES, least_nbytes: int = POOLED_NBYTES) -> None:
        self._limit = kept_nbytes
        self._least = least_nbytes
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._dropped: deque[Watch] = deque()  # appended to by the garbage collector
        self._kept: list[mmap.mmap] = []  # the one that was dropped first comes first
        self._held = 0

    @property
    def kept_nbytes(self) -> int:
        """Bytes that are free for reuse."""
        with self._lock:
            self._collect()
            return self._idle_nbytes()

    def empty(self, nbytes: int) -> ByteArray:
        """Return memory of this size with undefined contents, owned by the caller."""
        if nbytes < self._least:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            memory = self._take(nbytes)
            if memory is None:
                memory = self._make(nbytes)
            if memory is None:
                return np.empty(nbytes, np.uint8)
            watch, plain = watched(memory, nbytes, Watch, self._gone)
            self._watches[id(watch)] = watch
            return plain

    def _gone(self, watch: Watch) -> None:
        self._dropped.append(watch)
        if watch.nbytes < _LARGE_NBYTES and len(self._dropped) < _MOST_DROPPED:
            return  # the next request for memory collects it
        # The garbage collector must not wait for the lock. If it is taken, its holder or the next request collects.
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    # ---- overridden for other kinds of memory ----

    def _make(self, nbytes: int) -> mmap.mmap | None:
        """Return None if it can't be had, or if enough memory is pooled; then the allocator is used."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # too many mappings
            return None
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _size(self, memory: mmap.mmap) -> int:
        """The capacity of this memory."""
        return len(memory)

    def _is_back(self, memory: mmap.mmap) -> bool:
        """Return whether no other process uses it."""
        return True

    def _drop(self, memory: mmap.mmap) -> None:
        """Never use it again."""
        self._remove(memory)

    # ---- common to all kinds ----

    def _idle_nbytes(self) -> int:
        """Bytes of all pooled memory that is free."""
        return sum(map(self._size, filter(self._is_back, self._kept)))

    def _remove(self, memory: mmap.mmap) -> None:
        self._kept.remove(memory)
        self._held -= self._size(memory)

    def _take(self, nbytes: int) -> mmap.mmap | None:
        """The last dropped one that fits: its bytes may still be in the caches."""
        most = _LOOSE * nbytes + mmap.PAGESIZE
        for memory in reversed(self._kept):
            if nbytes <= self._size(memory) <= most and self._is_back(memory):
                self._remove(memory)
                return memory
        return None

    def _collect(self) -> None:
        while self._dropped:
            watch = self._dropped.popleft()
            del self._watches[id(watch)]
            self._kept.append(watch.memory)
            self._held += self._size(watch.memory)
        if self._held > self._limit:
            self._shrink()

    def _shrink(self) -> None:
        over = self._idle_nbytes() - self._limit
        for memory in list(self._kept):
            if over <= 0:
                return
            if self._is_back(memory):
                over -= self._size(memory)
                self._drop(memory)

    def after_fork(self) -> None:
        """In the child, replace the lock: another thread of the parent may have held it."""
        self._lock = threading.Lock()


def watched(
    memory: mmap.mmap, nbytes: int, kind: type[W], gone: Callable[[Any], None], start: int = 0
) -> tuple[W, ByteArray]:
    """Return these bytes of the memory, and a watch that calls ``gone`` when no view of them is left."""
    buffer = np.ndarray.__new__(_Buffer, (nbytes,), np.uint8, buffer=memory, offset=start)
    watch = kind(buffer, gone)
    watch.memory, watch.nbytes, watch.start = memory, nbytes, start
    plain: ByteArray = buffer.view(np.ndarray)
    return watch, plain


_recycler = Recycler()


def empty(nbytes: int) -> ByteArray:
    """Return memory of this size for a batch, contents undefined, owned by the caller."""
    return _recycler.empty(nbytes)


def use(recycler: Recycler) -> None:
    """Allocate all batches of this process with this recycler."""
    global _recycler
    _recycler = recycler


os.register_at_fork(after_in_child=lambda: _recycler.after_fork())
