# SPDX-License-Identifier: Apache-2.0
"""Reservations: blocks by partition, given out once, and not kept for partitions that nobody puts into any more."""

from __future__ import annotations

from transfer_queue.reservations import Reservations


def test_a_block_is_given_once_and_only_for_as_many_samples():
    held = Reservations()
    assert held.keep("p", [4, 5]) == held.keep("p", []) == {}
    assert (held.take("p", 3), held.take("q", 2), held.take("p", 2), held.take("p", 2)) == (None, None, [4, 5], None)


def test_the_third_put_of_one_size_into_one_partition_wishes_for_the_next():
    held = Reservations()
    assert [held.wish("p", 2) for _ in range(4)] == [0, 0, 2, 2]
    held.keep("p", [0, 1])
    assert [held.wish("p", 2), held.wish("p", 3), held.wish("q", 3)] == [0, 0, 0]


def test_of_many_partitions_the_ones_not_put_into_for_longest_are_given_back():
    held = Reservations()
    for number in range(8):
        assert held.keep(f"p{number}", [number]) == {}
    assert held.keep("p0", [10]) == {}
    assert held.keep("p8", [8]) == {"p1": [1]}
    assert held.take("p0", 1) == [0]
    assert held.drop("p0") == [10]
    assert held.keep("p9", [9]) == {}
    assert held.take("p1", 1) is None
