# SPDX-License-Identifier: Apache-2.0
"""The copies of one put or get, made together at its end, by several threads where that pays."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from transfer_queue.storage.pieces import ByteArray

_LATER_NBYTES = 64 * 1024
_SHARED_NBYTES = 4 * 1024 * 1024
_CHUNK_NBYTES = 1024 * 1024
_MOST_HELPERS = 3  # a few cores saturate the memory; the others have better things to do

_Job = tuple[ByteArray, ByteArray]


class Copies:
    """Call it to copy; what it was given must stay as it is until ``finish``.

    Threads take chunks as they come, so one that the system holds up delays its own chunk only. Torch's own threads
    would wait for each other at the end of each copy, which on a busy machine takes longer than the copy.
    """

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._nbytes = 0

    def __call__(self, dst: ByteArray, src: ByteArray) -> None:
        """dst[:] = src, by the time of ``finish``."""
        if dst.nbytes < _LATER_NBYTES:
            dst[...] = src
            return
        self._jobs.append((dst, src))
        self._nbytes += dst.nbytes

    def finish(self) -> None:
        """All copies are made when it returns."""
        jobs, helpers = self._jobs, min(torch.get_num_threads() - 1, _MOST_HELPERS)
        self._jobs = []
        if self._nbytes < _SHARED_NBYTES or helpers < 1:
            _drain(deque(jobs))
            return
        chunks = deque(_chunks(jobs))
        helping = [_helpers().submit(_drain, chunks) for _ in range(helpers)]
        _drain(chunks)
        for help_ in helping:
            if not help_.cancel():  # it has begun
                help_.result()


def _chunks(jobs: Iterable[_Job]) -> Iterable[_Job]:
    for dst, src in jobs:
        for start in range(0, dst.nbytes, _CHUNK_NBYTES):
            yield dst[start : start + _CHUNK_NBYTES], src[start : start + _CHUNK_NBYTES]


def _drain(jobs: deque[_Job]) -> None:
    while True:
        try:
            dst, src = jobs.popleft()
        except IndexError:
            return
        dst[...] = src  # NumPy lets other threads run meanwhile


_pool: list[ThreadPoolExecutor] = []


def _helpers() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(_MOST_HELPERS, thread_name_prefix="tq-copy"))
    return _pool[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # threads are not copied
