# SPDX-License-Identifier: Apache-2.0
"""Reservations: runs of indexes by partition, given out once and ascending; what nobody will use is given back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.reservations import Ahead, Reservations

NOTHING = Ahead(0, [])


def steady(*counts: int, partition: str = "p") -> Reservations:
    """After puts of so many samples, for which nothing was reserved ahead."""
    held = Reservations()
    for count in counts:
        held.wish(partition, count)
    return held


def test_what_is_kept_is_given_once_and_only_to_its_partition():
    held = Reservations()
    assert held.keep("p", [4, 5]) == held.keep("p", []) == {}
    assert (held.take("q", 2), held.take("p", 2), held.take("p", 2)) == (None, [4, 5], None)


def test_a_smaller_put_takes_the_lowest_and_leaves_the_rest_to_the_next():
    held = Reservations()
    held.keep("p", range(10, 20))
    assert (held.take("p", 3), held.take("p", 5), held.take("p", 2)) == ([10, 11, 12], [13, 14, 15, 16, 17], [18, 19])
    assert held.drop("p") == []


def test_neighbours_are_one_run_also_where_they_came_one_after_the_other_or_in_another_order():
    held = Reservations()
    held.keep("p", range(4, 8))
    assert held.take("p", 3) == [4, 5, 6]
    held.keep("p", range(12, 16))
    held.keep("p", range(8, 12))
    assert held.take("p", 9) == list(range(7, 16))


def test_the_samples_of_one_put_are_neighbours_and_what_is_passed_over_is_given_back_with_the_publish():
    held = steady(4)
    held.keep("p", [1, 2])
    held.keep("p", [5, 6, 7, 8])
    assert held.take("p", 3) == [5, 6, 7]
    assert held.wish("p", 3) == Ahead(0, [1, 2]), "a later put would get lower indexes"
    assert held.wish("p", 3).unused == []
    assert held.take("p", 2) is None
    assert held.wish("p", 2).unused == [8]


def test_what_was_passed_over_by_a_put_that_never_came_to_its_publish_is_dropped_with_the_rest():
    held = Reservations()
    held.keep("p", [1, 2])
    held.keep("p", [5, 6, 7, 8])
    assert held.take("p", 4) == [5, 6, 7, 8]
    held.keep("p", [9])
    assert (held.drop("p"), held.drop("p"), held.drop("never used")) == ([1, 2, 9], [], [])


def test_the_third_put_into_one_partition_wishes_for_the_next_of_its_size():
    held = Reservations()
    assert [held.wish("p", 2) for _ in range(4)] == [NOTHING, NOTHING, Ahead(2, []), Ahead(2, [])]
    held.keep("p", [0, 1])
    assert held.wish("p", 2) == NOTHING


def test_puts_that_vary_wish_for_what_the_largest_of_them_would_need_until_so_much_is_held():
    held = steady(4, 16)
    assert held.wish("p", 8).reserve == 20
    held.keep("p", range(20))
    assert held.take("p", 5) is not None
    assert held.wish("p", 5).reserve == 20
    held.keep("p", range(20, 40))
    assert held.wish("p", 5) == NOTHING


def test_partitions_by_turns_are_each_a_stream_of_their_own():
    held = Reservations()
    wishes = [held.wish(partition, count).reserve for _ in range(3) for partition, count in (("p", 2), ("q", 5))]
    assert wishes == [0, 0, 0, 0, 2, 5]


def test_of_many_partitions_the_ones_not_put_into_for_longest_are_given_back():
    held = Reservations()
    for number in range(8):
        assert held.keep(f"p{number}", [number]) == {}
    assert held.keep("p0", [10]) == {}
    assert held.keep("p8", [8]) == {"p1": [1]}
    assert held.take("p0", 1) == [0]
    assert held.drop("p0") == [10]
    assert held.keep("p9", [9]) == {"p2": [2]}
    assert held.take("p1", 1) is None


def test_a_partition_that_was_put_into_twice_is_forgotten_after_many_others():
    held = steady(2, 2)
    for number in range(8):
        held.wish(f"p{number}", 1)
    assert held.wish("p", 2) == NOTHING


class Controller:
    """Hands out indexes, and takes note of what becomes of them."""

    def __init__(self) -> None:
        self.next_index = 0
        self.ahead: dict[str, list[int]] = {}
        self.used: dict[str, list[int]] = {}
        self.given_back: dict[str, list[int]] = {}

    def reserve(self, count: int) -> range:
        self.next_index += count
        return range(self.next_index - count, self.next_index)


PUTS = st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 9), st.sampled_from(["ends", "goes on", "fails"])))


@given(puts=PUTS, others=st.integers(0, 2))
def test_every_index_is_handed_out_once_or_held_or_given_back(puts, others):
    """``goes on``: the answer to the publish comes after the next put has begun, as where threads put."""
    held, controller, under_way = Reservations(), Controller(), []

    def finish() -> None:
        for partition, asked in under_way:
            for name, left in held.keep(partition, asked).items():
                controller.given_back.setdefault(name, []).extend(left)
        under_way.clear()

    for partition, count, how in puts:
        taken = held.take(partition, count)
        if taken is None:
            taken = list(controller.reserve(count))
        else:
            controller.used.setdefault(partition, []).extend(taken)
        assert taken == list(range(taken[0], taken[0] + count)), "neighbours"
        ahead = held.wish(partition, count)
        controller.given_back.setdefault(partition, []).extend(ahead.unused)
        controller.reserve(others)
        if how != "fails" and ahead.reserve:
            asked = controller.reserve(ahead.reserve)
            controller.ahead.setdefault(partition, []).extend(asked)
            under_way.append((partition, asked))
        if how != "goes on":
            finish()
    finish()
    for partition in "pqr":
        ends = [source.get(partition, []) for source in (controller.used, controller.given_back)]
        everything = Counter([*ends[0], *ends[1], *held.drop(partition)])
        assert everything == Counter(controller.ahead.get(partition, [])), "each once, and none is lost"


@given(counts=st.lists(st.integers(1, 9), min_size=1), others=st.integers(0, 2))
def test_indexes_ascend_from_put_to_put_without_a_gap_unless_others_reserve_or_too_few_were_held(counts, others):
    held, controller, end = Reservations(), Controller(), 0
    for count in counts:
        taken = held.take("p", count)
        own = taken or controller.reserve(count)
        ahead = held.wish("p", count)
        assert own[0] == end if others == 0 and not ahead.unused else own[0] >= end
        assert not (taken and ahead.unused) or others, "what is reserved next follows on what is held"
        end = own[-1] + 1
        held.keep("p", controller.reserve(ahead.reserve))
        controller.reserve(others)
