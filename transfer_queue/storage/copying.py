# SPDX-License-Identifier: Apache-2.0
"""The copies of one put or get, made together at its end, by several threads where that pays."""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.storage.pieces import ByteArray
from transfer_queue.storage.spans import AT_ONCE, LATER_NBYTES

_SHARED_NBYTES = 24 * 1024 * 1024
_CHUNK_NBYTES = 256 * 1024
_MAPPED_NBYTES = 64 * 1024
"""So much is mapped around a page that is read first (``fault_around_bytes``)."""
_MOST_HELPERS = 3  # a few cores saturate the memory; the others have better things to do

_Rows = NDArray[Any]
_Picks = NDArray[np.int64] | None
_Job = tuple[_Rows, _Rows, _Picks]
"""(dst, src, which of its rows; None: all, in order)."""
_Chunks = deque[tuple[_Rows, _Rows, _Picks, int, int]]
"""(the job, where its chunk begins, how long it is)."""


class Copies:
    """Call it to copy; what it was given must stay as it is until ``finish``.

    Threads take chunks as they come, so one that the system holds up delays its own chunk only. Torch's own threads
    would wait for each other at the end of each copy, which on a busy machine takes longer than the copy.
    """

    def __init__(self, into_mapped: bool = False) -> None:
        """``into_mapped``: memory mapped from another process is copied into, not out of."""
        self._into_mapped = into_mapped
        self._jobs: list[_Job] = []
        self._nbytes = 0

    def __call__(self, dst: ByteArray, src: ByteArray) -> None:
        """dst[:] = src, by the time of ``finish``."""
        if dst.nbytes < LATER_NBYTES:
            dst[...] = src
            return
        self._jobs.append((dst, src, None))
        self._nbytes += dst.nbytes

    def rows(self, dst: _Rows, src: _Rows, picks: NDArray[np.int64]) -> None:
        """dst[i] = src[picks[i]] for every row, by the time of ``finish``."""
        if dst.nbytes < LATER_NBYTES:
            AT_ONCE.rows(dst, src, picks)
            return
        self._jobs.append((dst, src, picks))
        self._nbytes += dst.nbytes

    @property
    def worth_sharing(self) -> bool:
        """There is enough to copy now for several threads."""
        return self._nbytes >= _SHARED_NBYTES

    def finish(self) -> None:
        """All copies are made when it returns."""
        if not self._jobs:
            return
        jobs, helpers = self._jobs, min(torch.get_num_threads() - 1, _MOST_HELPERS) * self.worth_sharing
        self._jobs, self._nbytes = [], 0
        if helpers > 0:
            # What is read is mapped by the dozen anyway: warm copies of this size would pay for the look.
            for dst, _, _ in jobs if self._into_mapped else ():
                _map_pages(dst)
            _copy_together(jobs, helpers)
            return
        for dst, src, picks in jobs:
            if picks is not None:
                AT_ONCE.rows(dst, src, picks)
                continue
            _map_pages(dst if self._into_mapped else src)
            dst[...] = src


def _map_pages(memory: ByteArray) -> None:
    """Look at memory of another process before it is copied into, or out of.

    Linux maps existing pages by the dozen where one is read for the first time, and one by one where they are written;
    and a copy that is interrupted to map them takes longer than both one after the other.
    """
    memory[::_MAPPED_NBYTES].max()


def _copy_together(jobs: Sequence[_Job], num_helpers: int) -> None:
    # A tuple each, and no slices yet: making those of 64 MiB takes as long as copying 3.
    chunks: _Chunks = deque()
    for dst, src, picks in jobs:
        step = _CHUNK_NBYTES if picks is None else max(1, _CHUNK_NBYTES * len(dst) // dst.nbytes)
        chunks += [(dst, src, picks, start, step) for start in range(0, len(dst), step)]
    errors: list[BaseException] = []
    helpers = [_Helper(chunks, errors) for _ in range(num_helpers)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads to be had: then the others do it all
            for helper in helpers:
                helper.start()
        _drain(chunks)
    finally:
        # Whoever gives up here gives back memory that no thread may write into any more. Not in a function of its
        # own: Ctrl-C may come as that begins, before its "try".
        while True:
            try:
                chunks.clear()
                for helper in helpers:
                    helper.wait()
                break
            except BaseException as error:  # a chunk takes less than a millisecond
                errors.insert(0, error)
    if errors:
        raise errors[0]


class _Helper:
    """A thread of this copy alone: it costs less than a hundredth of it, and nothing is left to end, or to fork.

    Nobody waits for it to begin, as ``threading.Thread`` would: where something else has the other cores, which may be
    torch's own threads that look for more work for milliseconds, the copy is over before it does.
    """

    def __init__(self, chunks: _Chunks, errors: list[BaseException]) -> None:
        self._chunks = chunks
        self._errors = errors
        self._begun = self._ended = False
        self._over = threading.Lock()
        self._over.acquire()

    def start(self) -> None:
        """Raises RuntimeError: there is no thread to be had."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._begun = True
        try:
            _drain(self._chunks)
        except BaseException as error:  # raised again by who waits for this thread
            self._errors.append(error)
        finally:
            self._ended = True
            self._over.release()

    def wait(self) -> None:
        """It writes no more when this returns. There must be no chunks left by then: it may begin later than that."""
        while self._begun and not self._ended:  # Ctrl-C may have come after it was over, and before that was noted
            self._over.acquire()


def _drain(chunks: _Chunks) -> None:
    while True:
        try:
            dst, src, picks, start, step = chunks.popleft()
        except IndexError:
            return
        stop = start + step
        # NumPy lets other threads run meanwhile.
        if picks is None:
            dst[start:stop] = src[start:stop]
        else:
            AT_ONCE.rows(dst[start:stop], src, picks[start:stop])
