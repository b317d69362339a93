# SPDX-License-Identifier: Apache-2.0
"""Copies rows and spans of bytes, in client and server, without a loop over rows; large copies with several threads."""

from __future__ import annotations

import _thread
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Copy(Protocol):
    """Copies now or later: dst[:] = src, or dst[i] = src[row_indices[i]], both [rows, words per row]."""

    def __call__(self, dst: NDArray[Any], src: NDArray[Any], row_indices: NDArray[np.int64] | None = None) -> None: ...


def copy_now(dst: NDArray[Any], src: NDArray[Any], row_indices: NDArray[np.int64] | None = None) -> None:
    """A ``Copy`` that this thread makes before it returns."""
    if row_indices is None:
        np.copyto(dst, src)
    else:
        # mode="clip" writes straight into ``out``; the default would use a buffer.
        np.take(src, row_indices, axis=0, out=dst, mode="clip")


_LONG_RUN_NBYTES = 16 * 1024
"""Runs of rows at least this long on average are copied one by one, as slices."""
_LOOP_NBYTES = 512
"""The same for spans of different sizes. For shorter spans, the interpreter would cost more than the bytes."""
LATER_NBYTES = 64 * 1024
"""Spans of at least this size are worth copying separately: later, or in another thread."""
_CACHED_NBYTES = 256 * 1024
"""Rows are gathered and then scattered in steps of this size, which stay in a core's cache."""


def copy_rows(
    dst: NDArray[np.uint8],
    at: slice | NDArray[np.int64],
    src: NDArray[np.uint8],
    row_indices: NDArray[np.int64] | None,
    copy: Copy = copy_now,
) -> None:
    """Row ``at[i]`` of ``dst`` = row ``row_indices[i]`` of ``src`` (None: row i). All rows have one size, not 0.

    Args:
        dst: [rows, bytes per row], contiguous.
        src: Rows of the same size, one after the other.
    """
    if isinstance(at, slice) and row_indices is None:
        copy(dst[at].reshape(-1), src)
        return
    row_nbytes, dst = dst.shape[1], dst.reshape(-1)
    count = at.stop - at.start if isinstance(at, slice) else len(at)
    to = np.arange(at.start, at.stop) if isinstance(at, slice) else at
    rows = np.arange(count) if row_indices is None else row_indices
    cuts = np.flatnonzero((np.diff(to) != 1) | (np.diff(rows) != 1)) + 1
    # Single rows that land in order are gathered in one call; a loop would take twice as long.
    single = isinstance(at, slice) and 2 * (len(cuts) + 1) > count
    if not single and count * row_nbytes >= _LONG_RUN_NBYTES * (len(cuts) + 1):
        first, sizes = np.append(0, cuts), np.diff(np.concatenate(([0], cuts, [count]))) * row_nbytes
        _copy_each(dst, src, Spans(to[first] * row_nbytes, rows[first] * row_nbytes, sizes), copy)
        return
    target, source = as_words(dst, src, row_nbytes)
    if isinstance(at, slice):
        copy(target[at], source, rows)
    elif row_indices is None:
        target[to] = source
    else:
        step = max(1, _CACHED_NBYTES // row_nbytes)
        for begin in range(0, count, step):
            target[to[begin : begin + step]] = source[rows[begin : begin + step]]


class Spans(NamedTuple):
    """``sizes[i]`` bytes from ``starts[i]`` of one buffer go to ``to[i]`` of another, for every i."""

    to: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def merged(self) -> Spans:
        """Merge spans that are contiguous in both buffers."""
        to, starts, sizes = self
        follows = (to[:-1] + sizes[:-1] == to[1:]) & (starts[:-1] + sizes[:-1] == starts[1:])
        if not follows.any():
            return self
        first = np.flatnonzero(np.append(True, ~follows))
        return Spans(to[first], starts[first], np.add.reduceat(sizes, first))


def copy_spans(dst: NDArray[np.uint8], src: NDArray[np.uint8], spans: Spans, copy: Copy = copy_now) -> None:
    keep = spans.sizes > 0
    if not keep.all():
        spans = Spans(*(each[keep] for each in spans))
    if len(spans.sizes) == 0:
        return
    spans = spans.merged()
    to, starts, sizes = spans
    total = int(sizes.sum())
    if len(sizes) == 1 or total >= _LOOP_NBYTES * len(sizes):
        _copy_each(dst, src, spans, copy)
        return
    word = _word(np.bitwise_or.reduce(np.concatenate(spans)).item(), dst.nbytes, src.nbytes)
    counts = sizes // word
    within = np.arange(total // word) - np.repeat(np.cumsum(counts) - counts, counts)
    to, at = np.repeat(to // word, counts) + within, np.repeat(starts // word, counts) + within
    dst_words, src_words = as_words(dst, src, word)
    if dst_words.shape[1] == 1:  # flat indexing is faster for single words; unaligned buffers have more per row
        dst_words, src_words = dst_words.reshape(-1), src_words.reshape(-1)
    dst_words[to] = src_words[at]


def _copy_each(dst: NDArray[np.uint8], src: NDArray[np.uint8], spans: Spans, copy: Copy) -> None:
    to, starts, sizes = spans
    stops = to + sizes
    edges = (to.tolist(), stops.tolist(), starts.tolist(), (starts + sizes).tolist())
    if sizes.sum() >= LATER_NBYTES * len(sizes):
        for begin, end, at, stop in zip(*edges, strict=True):
            copy(dst[begin:end], src[at:stop])
    elif (stops[:-1] == to[1:]).all():  # contiguous in dst: nearly twice as fast in one call
        np.concatenate(list(map(src.__getitem__, map(slice, *edges[2:]))), out=dst[to[0] : stops[-1]])
    else:
        for begin, end, at, stop in zip(*edges, strict=True):
            dst[begin:end] = src[at:stop]


def _word(*numbers: int) -> int:
    """The largest of 8, 4, 2, 1 that divides all numbers."""
    return next(word for word in (8, 4, 2, 1) if not any(number % word for number in numbers))


def as_words(dst: NDArray[np.uint8], src: NDArray[np.uint8], row_nbytes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """View both buffers as [rows, words per row], in the widest words that fit: NumPy copies small rows word by word.

    ``row_nbytes`` is at least 1.
    """
    # NumPy would copy an unaligned source (a frame inside a larger buffer) whole before it takes any row.
    word = _word(row_nbytes, *(each.__array_interface__["data"][0] for each in (dst, src)))
    target, source = (each.view(f"i{word}").reshape(-1, row_nbytes // word) for each in (dst, src))
    return target, source


_SHARED_NBYTES = 24 * 1024 * 1024
_CHUNK_NBYTES = 256 * 1024
_MAPPED_NBYTES = 64 * 1024
"""Linux maps this much around a page on its first read (``fault_around_bytes``)."""
_MOST_HELPERS = 3  # a few cores saturate the memory bandwidth

_Rows = NDArray[Any]
_RowIndices = NDArray[np.int64] | None
_Job = tuple[_Rows, _Rows, _RowIndices]
"""(dst, src, row indices; None: all rows in order)."""
_Chunks = deque[tuple[_Rows, _Rows, _RowIndices, int, int]]
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

    def __call__(self, dst: _Rows, src: _Rows, row_indices: _RowIndices = None) -> None:
        """See ``Copy``: by the time of ``finish``."""
        if dst.nbytes < LATER_NBYTES:
            copy_now(dst, src, row_indices)
            return
        self._jobs.append((dst, src, row_indices))
        self._nbytes += dst.nbytes

    def finish(self) -> None:
        """Make all copies before returning."""
        if not self._jobs:
            return
        import torch  # storage units copy without it

        jobs, helpers = self._jobs, min(torch.get_num_threads() - 1, _MOST_HELPERS) * (self._nbytes >= _SHARED_NBYTES)
        self._jobs, self._nbytes = [], 0
        if helpers > 0:
            # Sources are mapped in groups of pages anyway, so touching them first would not pay at this size.
            for dst, _, _ in jobs if self._into_mapped else ():
                _map_pages(dst)
            _copy_together(jobs, helpers)
            return
        for dst, src, row_indices in jobs:
            if row_indices is None:
                _map_pages(dst if self._into_mapped else src)
            copy_now(dst, src, row_indices)


def _map_pages(memory: NDArray[np.uint8]) -> None:
    """Touch another process's memory before it is copied into or out of.

    Linux maps existing pages in groups on a first read, but one by one on a first write. A copy interrupted by page
    faults takes longer than the touch and the copy in sequence.
    """
    memory[::_MAPPED_NBYTES].max()


def _copy_together(jobs: Sequence[_Job], num_helpers: int) -> None:
    # Tuples, because creating the slices of 64 MiB up front takes as long as copying 3 MiB.
    chunks: _Chunks = deque()
    for dst, src, row_indices in jobs:
        step = _CHUNK_NBYTES if row_indices is None else max(1, _CHUNK_NBYTES * len(dst) // dst.nbytes)
        chunks += [(dst, src, row_indices, start, step) for start in range(0, len(dst), step)]
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
        self._started = self._is_over = False
        # No Event: Ctrl-C amid its wait can leave its lock held for ever.
        self._running = _thread.allocate_lock()
        self._running.acquire()

    def start(self) -> None:
        """Raises RuntimeError if no thread is available."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._started = True
        try:
            _drain(self._chunks)
        except BaseException as error:  # raised again by the thread that waits for this one
            self._errors.append(error)
        finally:
            self._is_over = True
            self._running.release()

    def wait(self) -> None:
        """After this the helper writes no more. All chunks must have been taken, because it may still start later."""
        while self._started and not self._is_over:
            self._running.acquire()


def _drain(chunks: _Chunks) -> None:
    while True:
        try:
            dst, src, row_indices, start, step = chunks.popleft()
        except IndexError:
            return
        stop = start + step
        # NumPy releases the interpreter lock meanwhile.
        if row_indices is None:
            copy_now(dst[start:stop], src[start:stop])
        else:
            copy_now(dst[start:stop], src, row_indices[start:stop])
