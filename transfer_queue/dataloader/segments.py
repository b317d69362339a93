# SPDX-License-Identifier: Apache-2.0
"""Memory that a worker writes batches into and the loader's process reads them from, without a copy in between.

Each segment is mapped once by either side and used again when the loader's process has dropped all that lay in it. What
was handed over has a place in the segment's last page, where the receiver's side sets a byte when it is gone.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from transfer_queue.storage import recycling
from transfer_queue.storage.pieces import ByteArray
from transfer_queue.storage.recycling import KEPT_NBYTES, Recycler, Watch, watched
from transfer_queue.storage.tensors import dtype_name, dtype_of, from_bytes

LEAST_NBYTES = 64 * 1024
"""Smaller columns are copied into the message instead."""
_PLACES = mmap.PAGESIZE
_MOST_SEGMENTS = 64
"""Each takes file descriptors in both processes; what needs more memory than that travels as torch sends it."""


class Lent(NamedTuple):
    """A tensor in a segment, as the other process needs to know it. ``descriptor``: for its first use there."""

    owner: int
    segment: int
    place: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    size: int
    descriptor: Any


class _Segment(mmap.mmap):
    """Created by the worker that owns it."""

    number: int
    descriptor: int
    lent: int
    is_known: bool

    @property
    def room(self) -> int:
        return len(self) - _PLACES

    @property
    def is_back(self) -> bool:
        """Is nothing of what was lent in use any more?"""
        return self.lent == 0 or self[self.room : self.room + self.lent] == b"\1" * self.lent


class Segments(Recycler):
    """A worker's side. Of several threads only the one that pickles calls ``lend``."""

    def __init__(self, kept_nbytes: int = KEPT_NBYTES) -> None:
        super().__init__(kept_nbytes, LEAST_NBYTES)
        self._numbers = itertools.count()
        self._forgotten: list[int] = []

    def lend(self, tensor: torch.Tensor) -> Lent | None:
        """How the other process finds the tensor; None for one that does not lie in a segment in one piece."""
        if not tensor.is_contiguous():
            return None
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._lock:
            found = (each for each in self._watches.values() if each.first <= begin and end <= each.first + each.nbytes)
            watch = next(found, None)
        if watch is None:
            return None
        segment: Any = watch.memory
        if segment.lent == _PLACES:
            return None
        place, segment.lent = segment.lent, segment.lent + 1
        known, segment.is_known = segment.is_known, True
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        descriptor = None if known else DupFd(segment.descriptor)
        return Lent(os.getpid(), segment.number, place, begin - watch.first, dtype, shape, len(segment), descriptor)

    def forgotten(self) -> list[int]:
        """Segments that will not be used again, each told once."""
        told, self._forgotten = self._forgotten, []
        return told

    def _make(self, nbytes: int) -> mmap.mmap | None:
        if len(self._watches) + len(self._kept) >= _MOST_SEGMENTS:
            idle = next(filter(self._is_back, self._kept), None)
            if idle is None:
                return None
            self._drop(idle)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + _PLACES
        descriptor = os.memfd_create("transfer-queue-batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            segment = _Segment(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        segment.number, segment.descriptor = next(self._numbers), descriptor
        segment.lent, segment.is_known = 0, False
        weakref.finalize(segment, os.close, descriptor)
        return segment

    def _take(self, nbytes: int) -> mmap.mmap | None:
        segment: Any = super()._take(nbytes)
        if segment is not None:
            segment[segment.room : segment.room + segment.lent] = bytes(segment.lent)
            segment.lent = 0
        return segment  # type: ignore[no-any-return]

    def _size(self, memory: Any) -> int:
        return int(memory.room)

    def _is_back(self, memory: Any) -> bool:
        return bool(memory.is_back)

    def _drop(self, memory: Any) -> None:
        super()._drop(memory)
        if memory.is_known:
            self._forgotten.append(memory.number)


class _Receipt(Watch):
    __slots__ = ("at", "process")

    at: int
    process: int


_own: Segments | None = None


def take_all_from_segments() -> None:
    """In a worker: whatever is read from the storage from now on can be lent. Idempotent."""
    global _own
    if _own is None and hasattr(os, "memfd_create"):
        _own = Segments()
        recycling.use(_own)


def lend(tensor: torch.Tensor) -> Lent | None:
    """See ``Segments.lend``; None in a process without segments, too."""
    return None if _own is None else _own.lend(tensor)


def forgotten() -> list[int]:
    """See ``Segments.forgotten``."""
    return [] if _own is None else _own.forgotten()


_mapped: dict[tuple[int, int], mmap.mmap] = {}
_receipts: dict[int, _Receipt] = {}


def receive(lent: Lent) -> torch.Tensor:
    """The tensor where it lies, this process' own until it drops it."""
    if lent.descriptor is not None:
        descriptor = lent.descriptor.detach()
        try:
            _mapped[lent.owner, lent.segment] = mmap.mmap(descriptor, lent.size)
        finally:
            os.close(descriptor)
    memory = _mapped[lent.owner, lent.segment]
    dtype = dtype_of(lent.dtype)
    nbytes = torch.Size(lent.shape).numel() * dtype.itemsize
    return from_bytes(_received(memory, lent.offset, nbytes, lent.place), dtype, lent.shape)


def _received(memory: mmap.mmap, offset: int, nbytes: int, place: int) -> ByteArray:
    receipt, whole = watched(memory, offset + nbytes, _Receipt, _give_back)
    receipt.at, receipt.process = len(memory) - _PLACES + place, os.getpid()
    _receipts[id(receipt)] = receipt
    return whole[offset:]


def _give_back(receipt: _Receipt) -> None:
    # In a fork, or where a fork may still be reading, the memory must not be used again.
    if _receipts.pop(id(receipt), None) is not None and receipt.process == os.getpid():
        receipt.memory[receipt.at] = 1


def forget(owner: int, segments: Iterable[int]) -> None:
    """These will not be lent any more; what is in use stays."""
    for segment in segments:
        _mapped.pop((owner, segment), None)


def forget_owners(owners: Sequence[int]) -> None:
    """These workers have ended, or will before long."""
    for key in [key for key in _mapped if key[0] in owners]:
        del _mapped[key]


def _keep_from_reuse() -> None:
    _receipts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_from_reuse, after_in_child=_mapped.clear)
