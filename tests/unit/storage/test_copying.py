# SPDX-License-Identifier: Apache-2.0
"""Copies: all bytes are there after finish, by however many threads; nobody writes any more once it returned."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.copying import Copies

KIB, MIB = 1024, 1024 * 1024
SOURCE = np.random.default_rng(1).integers(0, 256, 32 * MIB, np.uint8)


@pytest.fixture(params=[1, 2, 4], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def copied(sizes: list[int], into_mapped: bool = False) -> bool:
    """Copy so many spans of the source into one buffer, and compare."""
    copies, out = Copies(into_mapped), np.zeros(sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes])
    sources = [SOURCE[7 * n : 7 * n + size] for n, size in enumerate(sizes)]
    for start, source in zip(starts, sources, strict=False):
        copies(out[start : start + source.nbytes], source)
    copies.finish()
    return out.tobytes() == b"".join(source.tobytes() for source in sources)


SIZES = {
    "none": [],
    "small ones": [0, 1, 100, 64 * KIB - 1],
    "one that is shared": [25 * MIB],
    "one just below": [24 * MIB - 1],
    "chunks and rests": [64 * KIB, MIB + 1, 3 * MIB - 1, 5, 21 * MIB],
    "many": [130 * KIB] * 200,
}


@pytest.mark.parametrize("into_mapped", [False, True], ids=["out of", "into"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_all_bytes_are_there_whoever_copied_them(threads, sizes, into_mapped):
    assert copied(sizes, into_mapped)


@settings(max_examples=25, deadline=None, print_blob=True)
@given(sizes=st.lists(st.one_of(st.integers(0, 200 * KIB), st.integers(2 * MIB, 5 * MIB)), max_size=8))
def test_all_bytes_are_there_for_any_sizes(sizes):
    assert copied(sizes)


@pytest.mark.parametrize("row_nbytes", [8, 24 * KIB, 3 * MIB])
def test_rows_that_were_picked_are_there_whoever_copied_them(threads, row_nbytes):
    rows = 26 * MIB // row_nbytes
    source = SOURCE[: rows * row_nbytes].view(np.int64).reshape(rows, -1)
    selection = np.random.default_rng(2).integers(0, rows, rows)
    copies, out, few = Copies(), np.zeros_like(source), np.zeros((3, source.shape[1]), np.int64)
    copies(out, source, selection)
    copies(few, source, selection[:3])
    copies.finish()
    assert np.array_equal(out, source[selection])
    assert np.array_equal(few, source[selection[:3]])


def test_it_can_be_used_again_after_finish(threads):
    copies, out = Copies(), np.zeros(26 * MIB, np.uint8)
    for begin in (0, 1):
        copies(out, SOURCE[begin : begin + out.nbytes])
        copies.finish()
        assert out.tobytes() == SOURCE[begin : begin + out.nbytes].tobytes()


def until_threads(count: int) -> None:
    """One that is over may take a moment to end."""
    deadline = time.monotonic() + 10.0
    while _thread._count() > count:
        assert time.monotonic() < deadline, f"{_thread._count()} threads, there should be {count}"
        os.sched_yield()


def test_no_thread_is_left_when_it_is_finished(threads):
    before = _thread._count()
    assert copied([25 * MIB])
    until_threads(before)


@pytest.mark.parametrize("threads", [2, 4], indirect=True)
def test_nobody_waits_for_a_thread_that_has_not_begun_and_it_writes_nothing_later(threads, monkeypatch):
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, args: late.append(run))
    copies, out = Copies(), np.zeros(25 * MIB, np.uint8)
    copies(out, SOURCE[: out.nbytes])
    copies.finish()
    assert out.tobytes() == SOURCE[: out.nbytes].tobytes()
    out[:] = 0
    assert len(late) == threads - 1
    for run in late:
        run()
    assert not out.any()


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_what_a_thread_has_begun_to_copy_is_waited_for(threads):
    copies, out, at = Copies(), np.zeros(25 * MIB, np.uint8), Meeting()
    copies(out, at)
    copies.finish()
    assert at.met
    assert out.tobytes() == SOURCE[: out.nbytes].tobytes()


class Meeting:
    """A source of two threads' chunks: each waits for the other before its first one is read."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.seen: set[int] = set()

    @property
    def met(self) -> bool:
        return len(self.seen) == 2

    def __getitem__(self, at: slice) -> np.ndarray:
        if threading.get_ident() not in self.seen:
            self.seen.add(threading.get_ident())
            self.barrier.wait(30.0)
        return SOURCE[at]


class Broken:
    """A source whose reading fails after it was asked for so many chunks."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.lock = threading.Lock()

    def __getitem__(self, at: slice) -> np.ndarray:
        return BrokenChunk(self, SOURCE[at])


class BrokenChunk:
    def __init__(self, source: Broken, chunk: np.ndarray) -> None:
        self.source, self.chunk = source, chunk

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        with self.source.lock:
            self.source.left -= 1
            if self.source.left < 0:
                raise OSError("can't be read")
        return self.chunk


@pytest.mark.parametrize("threads", [2, 4], indirect=True)
@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_an_error_of_any_thread_is_raised_once_and_then_nobody_writes_any_more(threads, after):
    copies, out, before = Copies(), np.zeros(26 * MIB, np.uint8), _thread._count()
    copies(out, Broken(after))
    with pytest.raises(OSError, match="can't be read"):
        copies.finish()
    until_threads(before)


def test_where_no_more_threads_can_be_started_one_copies_alone(monkeypatch):
    def refuse(run: object, args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert copied([25 * MIB])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come while garbage is collected
def test_after_ctrl_c_at_any_moment_no_thread_writes_any_more(threads):
    before, out, interrupted = signal.signal(signal.SIGALRM, _interrupt), np.zeros(32 * MIB, np.uint8), 0
    count = _thread._count()
    try:
        for after_us in range(50, 4000, 50):
            copies = Copies()
            copies(out, SOURCE)
            try:
                signal.setitimer(signal.ITIMER_REAL, after_us * 1e-6)
                copies.finish()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            out[:] = 0
            until_threads(count)  # one that was just being started finds nothing to do
            assert not out.any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted
