# SPDX-License-Identifier: Apache-2.0
"""Collects the copies of one put or get and makes them together at its end, with several threads if that pays."""

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
"""Linux maps this much around a page on its first read (``fault_around_bytes``)."""
_MOST_HELPERS = 3  # a few cores saturate the memory bandwidth

_Rows = NDArray[Any]
_Picks = NDArray[np.int64] | None
_Job = tuple[_Rows, _Rows, _Picks]
"""(dst, src, row indices; None: all rows in order)."""
_Chunks = deque[tuple[_Rows, _Rows, _Picks, int, int]]
"""(the job's three fields, first row of the chunk, number of rows)."""


class Copies:
    """Call it to copy. Its arguments must not change until ``finish``.

    Threads take chunks as they become free, so a delayed thread delays only its own chunk. Torch's own threads wait for
    each other at the end of each copy, which on a busy machine takes longer than the copy.
    """

    def __init__(self, into_mapped: bool = False) -> None:
        """``into_mapped``: the destination, not the source, is memory mapped from another process."""
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
        """Whether there is enough to copy for several threads."""
        return self._nbytes >= _SHARED_NBYTES

    def finish(self) -> None:
        """Make all copies before returning."""
        if not self._jobs:
            return
        jobs, helpers = self._jobs, min(torch.get_num_threads() - 1, _MOST_HELPERS) * self.worth_sharing
        self._jobs, self._nbytes = [], 0
        if helpers > 0:
            # Sources are mapped in groups of pages anyway, so touching them first would not pay at this size.
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
    """Touch another process's memory before it is copied into or out of.

    Linux maps existing pages in groups on a first read, but one by one on a first write. A copy interrupted by page
    faults takes longer than the touch and the copy in sequence.
    """
    memory[::_MAPPED_NBYTES].max()


def _copy_together(jobs: Sequence[_Job], num_helpers: int) -> None:
    # Tuples, because creating the slices of 64 MiB up front takes as long as copying 3 MiB.
    chunks: _Chunks = deque()
    for dst, src, picks in jobs:
        step = _CHUNK_NBYTES if picks is None else max(1, _CHUNK_NBYTES * len(dst) // dst.nbytes)
        chunks += [(dst, src, picks, start, step) for start in range(0, len(dst), step)]
    errors: list[BaseException] = []
    helpers = [_Helper(chunks, errors) for _ in range(num_helpers)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads available: this thread copies everything
            for helper in helpers:
                helper.start()
        _drain(chunks)
    finally:
        # After an error the caller frees the memory, so no thread may still write into it.
        # This loop is inline: in a function of its own, Ctrl-C could arrive before its "try".
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
    """A thread for this copy alone. Starting it costs under a hundredth of the copy, and none remains to stop or to
    fork.

    Unlike with ``threading.Thread``, no caller waits for it to start. If other work occupies the cores, such as torch's
    spinning threads, the copy ends before the helper starts.
    """

    def __init__(self, chunks: _Chunks, errors: list[BaseException]) -> None:
        self._chunks = chunks
        self._errors = errors
        self._begun = self._ended = False
        self._over = threading.Lock()
        self._over.acquire()

    def start(self) -> None:
        """Raises RuntimeError if no thread is available."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._begun = True
        try:
            _drain(self._chunks)
        except BaseException as error:  # raised again by the thread that waits for this one
            self._errors.append(error)
        finally:
            self._ended = True
            self._over.release()

    def wait(self) -> None:
        """After this the helper writes no more. All chunks must have been taken, because it may still start later."""
        while self._begun and not self._ended:  # Ctrl-C may have come between its end and the note of it
            self._over.acquire()


def _drain(chunks: _Chunks) -> None:
    while True:
        try:
            dst, src, picks, start, step = chunks.popleft()
        except IndexError:
            return
        stop = start + step
        # NumPy releases the interpreter lock meanwhile.
        if picks is None:
            dst[start:stop] = src[start:stop]
        else:
            AT_ONCE.rows(dst[start:stop], src, picks[start:stop])
