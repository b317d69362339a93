# SPDX-License-Identifier: Apache-2.0
"""Values read where they lie: rows of one batch, from the arenas of several units, mapped as one piece of memory.

The mapping is private: whoever writes into a view changes a page of his own, and what is stored stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transfer_queue.storage.pieces import ByteArray, Piece, Positions
from transfer_queue.storage.simple.arena import PAGE_NBYTES
from transfer_queue.storage.spans import runs

_LEAST_NBYTES = 64 * 1024
"""Runs of fewer bytes are cheaper to copy than to map."""
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment(NamedTuple):
    """So many bytes of what this descriptor stands for."""

    descriptor: int
    offset: int
    nbytes: int


Find = Callable[[ByteArray], Segment | None]
"""The segment that this memory is; None: it is no part of an arena."""


class Use:
    """Calls ``ended`` once, when the last one who uses something has let go of it."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended: Callable[[], None] | None = ended
        # Let go where garbage is collected, which may be in the middle of another ``more`` of this thread.
        self._lock = threading.RLock()
        self._users = 1

    def more(self) -> bool:
        """One user more. Returns False where the last one has let go already."""
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            return True

    def less(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            ended, self._ended = self._ended, None  # whose it is may point at this: no cycle is left
        if ended is not None:
            ended()


class _Mapped:
    """The base of every array made of it, which keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def lay(parts: Sequence[tuple[Positions, Piece]], find: Find, use: Use) -> ByteArray | None:
    """The rows of these parts back to back without a copy, as long as anything points at them; None where they can't.

    ``use`` has one user more until then.
    """
    if any(piece.picks is not None for _, piece in parts):
        return None
    pieces = [piece for _, piece in sorted(_runs(parts), key=lambda run: run[0])]
    found = [find(piece.data) for piece in pieces]
    segments = [segment for segment in found if segment is not None]
    nbytes = sum(segment.nbytes for segment in segments)
    if len(segments) < len(found) or nbytes < _LEAST_NBYTES * len(segments) or not _fit(segments):
        return None
    address = _map(segments)
    if address is None:
        return None
    lead = segments[0].offset % PAGE_NBYTES
    mapped = _Mapped(address + lead, nbytes)
    use.more()
    weakref.finalize(mapped, _end, address, lead + nbytes, use).atexit = False
    return np.asarray(mapped)


def _runs(parts: Sequence[tuple[Positions, Piece]]) -> Iterator[tuple[int, Piece]]:
    """(the first row of the batch that it fills, rows that follow each other there and in the block)."""
    for at, piece in parts:
        begin = 0
        for start, stop in zip(*(edges.tolist() for edges in runs(at)), strict=True):
            yield start, piece.slice(begin, begin + stop - start)
            begin += stop - start


def _fit(segments: Sequence[Segment]) -> bool:
    """Pages can be mapped side by side when only the first begins, and the last ends, inside one."""
    return all(segment.offset % PAGE_NBYTES == 0 for segment in segments[1:]) and all(
        (segment.offset + segment.nbytes) % PAGE_NBYTES == 0 for segment in segments[:-1]
    )


def _map(segments: Sequence[Segment]) -> int | None:
    lead = segments[0].offset % PAGE_NBYTES
    length = lead + sum(segment.nbytes for segment in segments)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    address = _libc.mmap(None, length, mmap.PROT_READ, flags | mmap.MAP_ANONYMOUS, -1, 0)
    if address in (None, _MAP_FAILED):
        return None
    at = address
    for descriptor, offset, nbytes in segments:
        within = offset % PAGE_NBYTES  # only the first may have any
        size = within + nbytes
        if _libc.mmap(at, size, protection, flags | _MAP_FIXED, descriptor, offset - within) != at:
            _libc.munmap(address, length)
            return None
        at += size
    return int(address)


def _end(address: int, length: int, use: Use) -> None:
    _libc.munmap(address, length)
    use.less()
