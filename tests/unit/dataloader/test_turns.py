# SPDX-License-Identifier: Apache-2.0
"""Who fetches a stream's batches, over made-up costs: no clock is needed for this."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.dataloader.turns import MOMENT_S, Turns


class World:
    """A stream whose batches take so many seconds, from one to the next: by the thread, or by the reader itself."""

    def __init__(self, by_thread: float, by_reader: float, busy: float = 0.0) -> None:
        self.turns = Turns()
        self.now = 100.0
        self.cost = {False: by_thread, True: by_reader}
        self.busy = busy
        self.by: list[bool] = []

    def read(self, batches: int) -> list[bool]:
        """Whose turn each was."""
        for _ in range(batches):
            self.turns.asked(self.now)
            whose = self.turns.is_readers
            self.by.append(whose)
            self.now += max(0.0, self.cost[whose] - self.busy)
            self.turns.taken(self.now)
            self.now += self.busy
        return self.by[-batches:]


def test_a_reader_who_comes_soon_fetches_and_the_thread_is_tried_soon():
    by = World(0.0020, 0.0018).read(60)
    assert by[:2] == [False] * 2
    assert all(by[3:18])
    assert not any(by[21:34])
    assert all(by[40:])


def test_where_there_is_little_to_save_the_thread_is_tried_later():
    by = World(0.0010, 0.0009).read(340)
    assert by[:2] == [False] * 2
    assert all(by[3:270])
    assert 12 <= by[270:300].count(False) <= 18
    assert all(by[300:])


@pytest.mark.parametrize(("pair", "is_better"), [((0.0001, 0.0016), False), ((0.0001, 0.0010), True)])
def test_batches_that_come_in_pairs_are_judged_by_both(pair, is_better):
    """The thread may hand over two at once, again and again."""
    turns, now, by = Turns(), 100.0, []
    for number in range(2000):
        turns.asked(now)
        by.append(not turns.is_readers)
        now += 0.0007 if turns.is_readers else pair[number % 2]
        turns.taken(now)
    assert by[300:].count(is_better) > 0.9 * len(by[300:])


def test_a_try_that_goes_badly_is_soon_over():
    by = World(0.0020, 0.0010).read(600)
    assert 1 <= by[20:].count(False) <= 2 * 8


@given(st.floats(1e-4, 0.9 * MOMENT_S), st.floats(1e-4, 0.9 * MOMENT_S))
def test_the_faster_one_fetches_nearly_all(by_thread, by_reader):
    """Both are tried again now and then, which costs one window in seventeen."""
    by = World(by_thread, by_reader).read(3000)[300:]
    share = sum(by) / len(by)
    if by_reader < 0.94 * by_thread:
        assert share > 0.9
    if by_reader > 0.96 * by_thread:
        assert share < 0.1


@given(st.floats(1.06 * MOMENT_S, 10.0), st.floats(0.96, 10.0))
def test_where_a_batch_takes_long_the_thread_fetches(by_thread, ratio):
    assert not any(World(by_thread, ratio * by_thread).read(200)[21:])


@given(st.floats(1.01 * MOMENT_S, 10.0), st.floats(1e-4, 0.9 * MOMENT_S))
def test_a_reader_who_is_faster_keeps_his_turn_where_the_thread_takes_long(by_thread, by_reader):
    assert World(by_thread, by_reader).read(3000)[20:].count(False) <= 3000 / 15


@given(st.floats(1.01 * MOMENT_S, 100.0))
def test_a_busy_reader_is_left_alone(busy):
    assert not any(World(busy + 1e-4, busy + 1e-4, busy).read(200))


def test_a_first_look_that_takes_long_says_nothing_of_the_reader():
    world = World(0.0010, 0.0005)
    world.busy = 0.1
    world.read(1)
    world.busy = 0.0
    assert all(world.read(20)[5:])


def test_a_reader_who_becomes_busy_is_relieved_when_he_is_away_again():
    world = World(0.0010, 0.0005)
    assert all(world.read(100)[-50:])
    world.busy, world.cost = 0.1, {False: 0.1, True: 0.1}
    assert world.read(50)[2:] == [False] * 48
    world.busy, world.cost = 0.0, {False: 0.0010, True: 0.0005}
    assert world.read(100)[-80:].count(False) <= 16, "the reader's again, but for one window in which the thread tries"


def test_a_reader_who_is_away_now_and_then_goes_on_as_before():
    """He writes a checkpoint, say: what was found out about the two still holds."""
    world = World(0.0010, 0.0005)
    world.read(40)
    world.by.clear()
    for _ in range(50):
        world.read(39)
        world.busy = 0.1
        world.read(1)
        world.busy = 0.0
    assert sum(world.by) > 0.9 * len(world.by)


@pytest.mark.parametrize("better", [False, True])
def test_what_was_better_once_need_not_be_for_ever(better):
    world = World(*((0.0010, 0.0005) if better else (0.0005, 0.0010)))
    world.read(100)
    world.cost = {not whose: cost for whose, cost in world.cost.items()}
    assert world.read(600)[-200:].count(not better) > 150


def test_single_batches_that_take_long_decide_nothing():
    world = World(0.0010, 0.0005)
    for _ in range(100):
        world.read(9)
        world.cost[True] += 1.0
        world.read(1)
        world.cost[True] -= 1.0
    assert sum(world.by) > 0.85 * len(world.by)
