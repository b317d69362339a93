# SPDX-License-Identifier: Apache-2.0
"""Memory that a worker writes batches into and the loader's process reads them from, without a copy in between.

Each process maps a segment once. The worker reuses it when the loader's process has released everything in it.
Every tensor that was sent has a byte in the segment's last page, which the receiver sets on release.
"""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch

from transfer_queue.storage import recycling
from transfer_queue.storage.pack import dtype_name, dtype_of, from_bytes
from transfer_queue.storage.recycling import KEPT_NBYTES, Recycler, Watch, watched

LEAST_NBYTES = 64 * 1024
"""Smaller columns are copied into the message instead."""
_SLOTS = mmap.PAGESIZE
_MOST_SEGMENTS = 64
"""Per worker. Each segment takes file descriptors in both processes; tensors beyond this limit travel as torch sends
them.
"""
_DROPPED, _DROPPED_BUT_FORKED = 1, 2


class Lent(NamedTuple):
    """A tensor in a segment, described for the other process. ``descriptor``: for the segment's first use there."""

    owner: int
    segment: int
    slot: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    size: int
    descriptor: Any


class _Segment(mmap.mmap):
    """A segment, created by the worker that owns it."""

    number: int
    descriptor: int
    first: int
    """Its address."""
    lent: int
    is_known: bool

    @property
    def room(self) -> int:
        return len(self) - _SLOTS

    @property
    def is_back(self) -> bool:
        """Whether everything that was lent has been released."""
        return self._slots == bytes([_DROPPED]) * self.lent

    @property
    def is_spent(self) -> bool:
        """The same, but a fork of the other process may still read it."""
        slots = self._slots
        return 0 not in slots and _DROPPED_BUT_FORKED in slots

    @property
    def _slots(self) -> bytes:
        return self[self.room : self.room + self.lent]


class Segments(Recycler):
    """A worker's side. Only the thread that pickles calls ``lend``."""

    def __init__(self, kept_nbytes: int = KEPT_NBYTES, most: int = _MOST_SEGMENTS) -> None:
        super().__init__(kept_nbytes, LEAST_NBYTES)
        self._most = most
        self._numbers = itertools.count()
        self._retired: list[int] = []

    def lend(self, tensor: torch.Tensor) -> Lent | None:
        """Describe the tensor for the other process; None if it is not contiguous in one segment."""
        if not tensor.is_contiguous():
            return None
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._lock:
            # All watched buffers are segments here.
            lent: Iterator[tuple[Any, int]] = ((watch.memory, watch.nbytes) for watch in self._watches.values())
            found = (each for each, nbytes in lent if each.first <= begin and end <= each.first + nbytes)
            segment: Any = next(found, None)
        if segment is None or segment.lent == _SLOTS:
            return None
        slot, segment.lent = segment.lent, segment.lent + 1
        known, segment.is_known = segment.is_known, True
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        descriptor = None if known else DupFd(segment.descriptor)
        return Lent(os.getpid(), segment.number, slot, begin - segment.first, dtype, shape, len(segment), descriptor)

    def retired(self) -> list[int]:
        """Return segments that will not be used again, each once."""
        released, self._retired = self._retired, []
        return released

    def _make(self, nbytes: int) -> mmap.mmap | None:
        if len(self._watches) + len(self._kept) >= self._most:
            idle = next(filter(self._is_back, self._kept), None)
            if idle is None:
                return None
            self._drop(idle)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + _SLOTS
        try:
            descriptor = os.memfd_create("transfer-queue-batches", os.MFD_CLOEXEC)
        except OSError:  # out of descriptors
            return None
        try:
            os.ftruncate(descriptor, size)
            segment = _Segment(descriptor, size)
        except OSError:
            os.close(descriptor)
            return None
        segment.number, segment.descriptor = next(self._numbers), descriptor
        segment.first = int(np.frombuffer(segment, np.uint8, 1).__array_interface__["data"][0])
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

    def _collect(self) -> None:
        super()._collect()
        kept: list[Any] = list(self._kept)
        for segment in kept:
            if segment.is_spent:
                self._drop(segment)

    def _drop(self, memory: Any) -> None:
        super()._drop(memory)
        if memory.is_known:
            self._retired.append(memory.number)


class _Receipt(Watch):
    __slots__ = ("at", "mark")

    at: int
    mark: int


_own: Segments | None = None


def take_all_from_segments(num_workers: int) -> None:
    """In one of ``num_workers`` workers: allocate everything read from storage in segments. Idempotent."""
    global _own
    if _own is None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = _MOST_SEGMENTS if descriptors == resource.RLIM_INFINITY else descriptors // (8 * num_workers)
        _own = Segments(most=min(_MOST_SEGMENTS, share))
        recycling.use(_own)


def lend(tensor: torch.Tensor) -> Lent | None:
    """See ``Segments.lend``; None in a process without segments."""
    return None if _own is None else _own.lend(tensor)


def retired() -> list[int]:
    """See ``Segments.retired``."""
    return [] if _own is None else _own.retired()


_mapped: dict[tuple[int, int], mmap.mmap] = {}
_receipts: dict[int, _Receipt] = {}


def receive(lent: Lent) -> torch.Tensor:
    """Return the tensor in slot; it belongs to this process until it is released."""
    if lent.descriptor is not None:
        descriptor = lent.descriptor.detach()
        try:
            _mapped[lent.owner, lent.segment] = mmap.mmap(descriptor, lent.size)
        finally:
            os.close(descriptor)
    memory = _mapped[lent.owner, lent.segment]
    dtype = dtype_of(lent.dtype)
    nbytes = torch.Size(lent.shape).numel() * dtype.itemsize
    receipt, whole = watched(memory, lent.offset + nbytes, _Receipt, _release)
    receipt.at, receipt.mark = len(memory) - _SLOTS + lent.slot, _DROPPED
    _receipts[id(receipt)] = receipt
    return from_bytes(whole[lent.offset :], dtype, lent.shape)


def _release(receipt: _Receipt) -> None:
    del _receipts[id(receipt)]
    receipt.memory[receipt.at] = receipt.mark


def unmap(owner: int, segments: Iterable[int]) -> None:
    """Unmap segments that are no longer lent, once they are unused."""
    for segment in segments:
        _mapped.pop((owner, segment), None)


def unmap_owners(owners: Sequence[int]) -> None:
    """Unmap the segments of workers that have ended or are about to end."""
    for key in [key for key in _mapped if key[0] in owners]:
        del _mapped[key]


def _mark_as_forked() -> None:
    for receipt in list(_receipts.values()):
        receipt.mark = _DROPPED_BUT_FORKED


os.register_at_fork(before=_mark_as_forked, after_in_child=_mapped.clear)
os.register_at_fork(after_in_child=_receipts.clear)  # a fork releases nothing: the parent still owns all
