# SPDX-License-Identifier: Apache-2.0
"""The copies of one put or get, made together at its end, by several threads where that pays."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable

import torch

from transfer_queue.storage.pieces import ByteArray

_LATER_NBYTES = 64 * 1024
_SHARED_NBYTES = 8 * 1024 * 1024
_CHUNK_NBYTES = 256 * 1024
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

    @property
    def worth_sharing(self) -> bool:
        """There is enough to copy now for several threads."""
        return self._nbytes >= _SHARED_NBYTES

    def finish(self) -> None:
        """All copies are made when it returns."""
        if not self._jobs:
            return
        jobs, shared, helpers = self._jobs, self.worth_sharing, min(torch.get_num_threads() - 1, _MOST_HELPERS)
        self._jobs, self._nbytes = [], 0
        if not shared or helpers < 1:
            _drain(deque(jobs))
            return
        chunks, errors = deque(_chunks(jobs)), list[BaseException]()
        # Threads of this copy alone: they cost less than a hundredth of it, and nothing is left to end, or to fork.
        threads = [threading.Thread(target=_help, args=(chunks, errors), name="tq-copy") for _ in range(helpers)]
        try:
            with contextlib.suppress(RuntimeError):  # no more threads to be had: then the others do it all
                for thread in threads:
                    thread.start()
            _drain(chunks)
        finally:
            # Whoever gives up here gives back memory that no thread may write into any more. Not in a function of its
            # own: Ctrl-C may come as that begins, before its "try".
            while True:
                try:
                    chunks.clear()
                    for thread in threads:
                        if thread.is_alive():  # one that begins later finds nothing to do
                            thread.join()
                    break
                except BaseException as error:  # a chunk takes less than a millisecond
                    errors.insert(0, error)
        if errors:
            raise errors[0]


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


def _help(jobs: deque[_Job], errors: list[BaseException]) -> None:
    try:
        _drain(jobs)
    except BaseException as error:  # raised again by who waits for this thread
        errors.append(error)
