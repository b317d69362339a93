# SPDX-License-Identifier: Apache-2.0
"""Copying rows of one size and spans of any, from anywhere to anywhere, against plain indexing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.copying import Spans, copy_now, copy_rows, copy_spans

BYTES = np.random.default_rng(0).integers(0, 256, 40 * 40_000 + 8, np.uint8)
ROW_NBYTES = st.one_of(
    st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 24, 512, 4096, 16384, 40_000]), st.integers(1, 40_000)
)


class Later:
    """A ``Copy`` that is made by ``finish``."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.jobs: list[Callable[[], None]] = []

    def __call__(self, dst: np.ndarray, src: np.ndarray, row_indices: np.ndarray | None = None) -> None:
        self.nbytes.append(dst.nbytes)
        self.jobs.append(lambda: copy_now(dst, src, row_indices))

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


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=12),
    scale=st.sampled_from([1, 2, 4, 8, 600]),
    shuffle=st.randoms(use_true_random=False),
)
def test_spans_land_where_they_belong_whatever_their_order_and_size(sizes, scale, shuffle):
    sizes = [size * scale for size in sizes]
    src = np.arange(sum(sizes), dtype=np.int64).astype(np.uint8)
    order = list(range(len(sizes)))
    shuffle.shuffle(order)
    src_starts = np.array([sum(sizes[:i]) for i in order], np.int64)
    mine = np.array([sizes[i] for i in order], np.int64)
    dst_starts = np.cumsum(mine) - mine
    dst = np.zeros(sum(sizes), np.uint8)
    copy_spans(dst, src, Spans(dst_starts, src_starts, mine))
    expected = b"".join(src[start : start + size].tobytes() for start, size in zip(src_starts, mine, strict=True))
    assert dst.tobytes() == expected
    back = np.zeros_like(src)
    copy_spans(back, dst, Spans(src_starts, dst_starts, mine))
    assert back.tobytes() == src.tobytes()
