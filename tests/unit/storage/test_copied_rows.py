# SPDX-License-Identifier: Apache-2.0
"""Rows of one size: copying from any rows to any rows, against plain indexing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.copying import AT_ONCE, copy_rows

BYTES = np.random.default_rng(0).integers(0, 256, 40 * 40_000 + 8, np.uint8)
ROW_NBYTES = st.one_of(
    st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 24, 512, 4096, 16384, 40_000]), st.integers(1, 40_000)
)


class Later:
    """A ``Copy`` that is made by ``finish``."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.jobs: list[Callable[[], None]] = []

    def __call__(self, dst: np.ndarray, src: np.ndarray) -> None:
        self.nbytes.append(dst.nbytes)
        self.jobs.append(lambda: AT_ONCE(dst, src))

    def rows(self, dst: np.ndarray, src: np.ndarray, selection: np.ndarray) -> None:
        self.nbytes.append(dst.nbytes)
        self.jobs.append(lambda: AT_ONCE.rows(dst, src, selection))

    def finish(self) -> None:
        for job in self.jobs:
            job()


def as_array(at: slice | np.ndarray) -> np.ndarray:
    return np.arange(at.start, at.stop) if isinstance(at, slice) else at


@st.composite
def runs_of_numbers(draw: st.DrawFn, stop: int, most: int) -> list[int]:
    """Numbers below ``stop``, in runs as in real batches, repeats allowed."""
    numbers: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, stop - 1))
        numbers += range(first, min(stop, first + draw(st.integers(1, 8))))
    return numbers[:most]


@settings(max_examples=120, deadline=None, print_blob=True)
@given(data=st.data(), row_nbytes=ROW_NBYTES, offset=st.sampled_from([0, 0, 0, 1, 4]))
def test_rows_land_where_plain_indexing_puts_them(data, row_nbytes, offset):
    """``offset``: frames lie unaligned in what was received."""
    num_rows = data.draw(st.integers(1, 30))
    src = BYTES[offset : offset + num_rows * row_nbytes]
    selection = data.draw(
        st.one_of(st.none(), runs_of_numbers(num_rows, 20).map(lambda rows: np.array(rows, np.int64)))
    )
    count = num_rows if selection is None else len(selection)
    room = count + data.draw(st.integers(0, 5))
    if data.draw(st.booleans()):
        begin = data.draw(st.integers(0, room - count))
        at: slice | np.ndarray = slice(begin, begin + count)
    else:
        at = np.array(data.draw(st.permutations(range(room)))[:count], np.int64)
        if data.draw(st.booleans()):
            at.sort()
    got = np.full((room, row_nbytes), 7, np.uint8)
    later = Later()
    copy_rows(got, at, src, selection, later)
    later.finish()
    expected = np.full((room, row_nbytes), 7, np.uint8)
    expected[as_array(at)] = src.reshape(num_rows, row_nbytes)[slice(None) if selection is None else selection]
    assert np.array_equal(got, expected)
    again = np.full_like(got, 7)
    copy_rows(again, at, src, selection)
    assert np.array_equal(again, got)


@pytest.mark.parametrize("row_nbytes", [20_000, 40_000])
def test_long_runs_are_handed_over_as_slices(row_nbytes):
    later = Later()
    src, dst = BYTES[: 10 * row_nbytes], np.zeros((10, row_nbytes), np.uint8)
    selection = np.array([5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    copy_rows(dst, slice(0, 10), src, selection, later)
    assert later.nbytes == [5 * row_nbytes, 5 * row_nbytes]


@pytest.mark.parametrize("row_nbytes", [8, 512, 20_000, 40_000])
def test_single_rows_that_land_in_order_are_handed_over_at_once(row_nbytes):
    later = Later()
    src, dst = BYTES[: 10 * row_nbytes], np.zeros((10, row_nbytes), np.uint8)
    copy_rows(dst, slice(0, 10), src, np.array([5, 0, 7, 2, 9, 4, 1, 6, 3, 8]), later)
    assert later.nbytes == [10 * row_nbytes]
