# SPDX-License-Identifier: Apache-2.0
"""Copying many byte spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.copying import Spans, as_words, copy_spans


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


@pytest.mark.parametrize(("row_nbytes", "itemsize"), [(16, 8), (12, 4), (6, 2), (3, 1)])
def test_rows_are_seen_in_the_widest_words_that_divide_them(row_nbytes, itemsize):
    dst, src = as_words(np.zeros(row_nbytes * 2, np.uint8), np.zeros(row_nbytes * 4, np.uint8), row_nbytes)
    assert (dst.itemsize, dst.shape, src.shape) == (itemsize, (2, row_nbytes // itemsize), (4, row_nbytes // itemsize))


def test_unaligned_memory_is_read_byte_by_byte():
    memory = np.arange(33, dtype=np.uint8)
    dst, src = as_words(np.zeros(32, np.uint8), memory[1:], 8)
    dst[[1, 0, 2, 3]] = src
    assert dst.reshape(-1).tolist() == [*range(9, 17), *range(1, 9), *range(17, 33)]
