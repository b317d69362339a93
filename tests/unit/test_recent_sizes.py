# SPDX-License-Identifier: Apache-2.0
"""RecentSizes: how much room the next of a series gets, judged by those before it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.utils.recent import RecentSizes


def sizes_of(*sizes: int) -> RecentSizes:
    sizes_so_far = RecentSizes()
    for size in sizes:
        sizes_so_far.note(size)
    return sizes_so_far


def test_sizes_that_are_alike_get_exactly_their_size():
    assert [sizes_of(*[7] * count).room for count in (1, 2, 40)] == [7, 7, 7]


def test_sizes_that_vary_get_a_quarter_more_than_the_largest_of_them():
    assert sizes_of(8, 16, 12).room == 20


def test_one_that_is_far_larger_than_the_others_makes_no_room_for_another_like_it():
    assert sizes_of(*[10] * 9, 1000).room == 3 * 1090 // 10


def test_only_the_latest_32_count():
    assert len(sizes_of(*range(1, 100))) == 32
    assert sizes_of(1000, *[4] * 31).room == 3 * 1124 // 32
    assert sizes_of(1000, *[4] * 32).room == 4


def test_the_next_of_sizes_that_vary_eightfold_hardly_ever_finds_too_little():
    chance, sizes = random.Random(0), RecentSizes()
    for _ in range(32):
        sizes.note(chance.randint(4, 32))
    too_little = 0
    for _ in range(1000):
        size = chance.randint(4, 32)
        too_little += size > sizes.room
        sizes.note(size)
    assert too_little < 10


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=50))
def test_room_is_never_less_than_the_smallest_nor_more_than_thrice_the_mean(sizes):
    latest = sizes[-32:]
    assert min(latest) <= sizes_of(*sizes).room <= 3 * sum(latest) / len(latest)
