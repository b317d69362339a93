# SPDX-License-Identifier: Apache-2.0
"""Waiting for room: in order of arrival, with a little overtaking, and nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.utils.wait_queue import WaitQueue


class Item:
    def __init__(self, name, size):
        self.name, self.size, self.overtaken = name, size, 0

    def __repr__(self):
        return f"{self.name}:{self.size}"


def queue_of(*sizes, deadline=10.0):
    queue, items = WaitQueue(), [Item(name, size) for name, size in zip("abcdefgh", sizes, strict=False)]
    for item in items:
        queue.add(item, item.size, deadline)
    return queue, items


def names(items):
    return "".join(item.name for item in items)


def test_those_that_fit_go_in_order_of_arrival():
    queue, _ = queue_of(2, 3, 4)
    assert (names(queue.admit(5)), names(queue.items()), len(queue)) == ("ab", "c", 1)


def test_a_large_one_holds_up_no_small_ones_up_to_its_own_size():
    queue, _ = queue_of(8, 3, 3, 3)
    assert names(queue.admit(7)) == "bc", "a third one would overtake more than 8 in all"
    assert names(queue.admit(7)) == ""
    assert names(queue.admit(8)) == "a"
    assert names(queue.admit(3)) == "d"


def test_one_that_needs_no_room_overtakes_everybody():
    queue, _ = queue_of(8, 2, 0)
    assert names(queue.admit(0)) == "c"


def test_what_overtakes_counts_for_each_that_it_overtakes():
    queue, _ = queue_of(8, 4, 3, 3)
    assert names(queue.admit(3)) == "c"
    assert names(queue.admit(3)) == "", "4 was overtaken by 3 already"


def test_a_size_may_change_while_its_item_waits():
    queue, (a, _b) = queue_of(8, 1)
    queue.resize(a, 2)
    assert names(queue.admit(2)) == "a"


def test_those_whose_deadline_has_come_are_removed_in_order_of_arrival():
    queue, (a, b) = queue_of(1, 1)
    late = Item("z", 1)
    queue.add(late, 1, 20.0)
    assert (queue.next_deadline(), queue.expired(9.9)) == (10.0, [])
    assert queue.expired(10.0) == [a, b]
    assert (queue.next_deadline(), queue.remove(late), queue.remove(late), queue.next_deadline()) == (
        20.0, True, False, None,
    )  # fmt: skip


STEPS = st.lists(st.one_of(st.integers(0, 12), st.tuples(st.integers(0, 12))), max_size=60)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(STEPS)
def test_nobody_is_overtaken_by_more_than_its_own_size_and_nobody_that_may_go_waits(steps):
    """A number arrives, a tuple comes free; the room is 12 in all."""
    queue, waiting, free = WaitQueue(), [], 12
    for step in steps:
        if isinstance(step, tuple):
            free = min(12, free + step[0])
        else:
            waiting.append(Item(str(len(waiting)), step))
            queue.add(waiting[-1], step, 1.0)
        gone = queue.admit(free)
        assert gone == [item for item in waiting if item in gone], "in order"
        for item in gone:
            for other in waiting[: waiting.index(item)]:
                other.overtaken += 0 if other in gone else item.size
        waiting = [item for item in waiting if item not in gone]
        free -= sum(item.size for item in gone)
        assert free >= 0
        assert all(item.overtaken <= item.size for item in waiting)
        assert queue.items() == waiting
        assert not waiting or waiting[0].size > free, "the first one goes as soon as it fits"
        for at, item in enumerate(waiting):
            allowed = all(other.overtaken + item.size <= other.size for other in waiting[:at])
            assert item.size > free or not allowed


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_a_large_one_goes_though_small_ones_never_stop_coming(size, others):
    queue, large, busy = WaitQueue(), Item("large", size), 12
    queue.add(large, size, 1.0)
    for step, other in enumerate(others):
        queue.add(Item(str(step), other), other, 1.0)
        busy = max(0, busy - 1)  # one comes free at a time
        gone = queue.admit(12 - busy)
        busy += sum(item.size for item in gone)
        if large in gone:
            return
    raise AssertionError("starved")
