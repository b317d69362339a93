# SPDX-License-Identifier: Apache-2.0
"""Cuts into micro-batches: as many as asked for, none of them empty, and within the budget where a row allows it."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.sampler.micro_batches import cut_of_rest, refined, starts_within

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(lengths=LENGTHS, most=st.integers(1, 20), more=st.integers(0, 30))
def test_a_share_is_cut_into_as_many_micro_batches_as_asked_for_within_the_budget(lengths, most, more):
    starts = starts_within(lengths, most)
    count = min(len(starts) + more, len(lengths))
    sizes = refined(lengths, starts, count)
    assert (len(sizes), sum(sizes), min(sizes) > 0) == (count, len(lengths), True)
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        assert sum(lengths[stop - size : stop]) <= most or size == 1


@given(data=st.data(), cut=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_what_is_left_of_a_batch_fills_as_many_micro_batches(data, cut):
    remains = data.draw(st.lists(st.booleans(), min_size=sum(cut), max_size=sum(cut)))
    found = cut_of_rest(cut, remains)
    assert (len(found), sum(found)) == (len(cut), sum(cut))
    starts = accumulate(found, initial=0)
    left = [sum(remains[start : start + size]) for start, size in zip(starts, found, strict=False)]
    assert min(left) > 0 or sum(remains) < len(cut)
