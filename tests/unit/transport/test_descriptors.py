# SPDX-License-Identifier: Apache-2.0
"""Looking before sleeping: finds what comes soon, and costs next to nothing where nothing does."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import ConfigError
from transfer_queue.transport.descriptors import LONGEST_S, Spin, longest_s

LOOK_S = 4e-6


class World:
    """Time passes by looking, by sleeping, by what another thread does while it has the core, and by ticks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answer_at: float | None = None
        self.other_thread_s = self.tick_s = 0.0
        self.preempted = 0
        self.looks = 0
        self.spin = Spin(LONGEST_S, lambda: self.now, self.pass_on, lambda: self.preempted)

    def pass_on(self) -> None:
        self.now += self.other_thread_s + self.tick_s
        self.preempted += self.other_thread_s > 0

    def poll(self, timeout: int) -> list[Any]:
        assert timeout == 0
        self.looks += 1
        self.now += LOOK_S
        return [("socket", 1)] if self.answer_at is not None and self.now >= self.answer_at else []

    def wait(self, answer_after_s: float | None) -> list[Any]:
        self.looks = 0
        self.answer_at = None if answer_after_s is None else self.now + answer_after_s
        return self.spin.wait(self.poll, list, 10.0)

    def sleep(self, answer_after_s: float) -> None:
        """A wait that sleeps if the spin rests."""
        self.looks = 0
        self.answer_at = self.now + answer_after_s
        assert self.spin.wait(self.poll, self.slept, 10.0) == [("socket", 1)]

    def slept(self) -> list[Any]:
        assert self.answer_at is not None
        self.now = max(self.now, self.answer_at)
        return [("socket", 1)]

    def doubts_most(self) -> World:
        """So often in vain that the rest is as long as it gets, and has just begun."""
        for _ in range(1000):
            self.wait(None)
        while self.looks == 0:
            self.wait(None)
        return self

    def sleeps_until_it_looks(self, answer_after_s: float) -> int:
        for number in range(1000):
            self.sleep(answer_after_s)
            if self.looks:
                return number
        raise AssertionError("it never looked again")


@pytest.mark.parametrize("after_s", [0.0, 30e-6, 0.95 * LONGEST_S])
def test_what_comes_soon_is_found(after_s):
    world = World()
    assert world.wait(after_s) == [("socket", 1)]
    assert world.now == pytest.approx(max(after_s, LOOK_S), abs=LOOK_S)


@pytest.mark.parametrize("after_s", [None, 1.1 * LONGEST_S])
def test_what_does_not_come_soon_is_slept_for(after_s):
    world = World()
    assert world.wait(after_s) == []
    assert world.now == pytest.approx(LONGEST_S, abs=2 * LOOK_S)


def test_a_core_that_another_thread_wants_is_left_to_it():
    world = World()
    world.other_thread_s = 60e-6
    assert world.wait(300e-6) == []
    assert world.looks == 1


def test_a_tick_of_the_clock_is_no_other_thread():
    world = World()
    world.tick_s = 60e-6
    assert world.wait(300e-6) == [("socket", 1)]


def test_a_rest_ends_sooner_where_sleeping_shows_that_looking_would_pay():
    assert World().doubts_most().sleeps_until_it_looks(50e-6) <= 16


def test_a_rest_is_as_long_as_ever_where_what_is_slept_for_takes_long():
    assert World().doubts_most().sleeps_until_it_looks(2 * LONGEST_S) == 63


def test_a_rest_is_as_long_as_ever_where_another_thread_wanted_the_core():
    world = World()
    world.other_thread_s = 60e-6
    assert world.doubts_most().sleeps_until_it_looks(50e-6) == 63


@given(st.lists(st.booleans(), max_size=300).map(lambda outcomes: outcomes * 12))
def test_looks_in_vain_are_an_eighth_of_the_others_or_get_rare(outcomes):
    world, found, vain = World(), 0, 0
    for soon in outcomes:
        found += bool(world.wait(50e-6 if soon else None))
        vain += world.looks > 0 and not soon
    assert vain <= 6 + found / 8 + len(outcomes) / 64 + 1


def test_where_answers_come_soon_again_every_wait_looks_again():
    world = World()
    while not (world.wait(None) == [] and world.looks == 0):
        pass
    for _ in range(500):
        world.wait(None)
    waits = 1 + next(number for number in range(500) if world.wait(50e-6))
    assert waits <= 64
    assert all(world.wait(50e-6) for _ in range(100))


@pytest.mark.parametrize("left_s", [0.0, 0.5 * LONGEST_S])
def test_a_wait_that_ends_sooner_than_a_look_is_not_made_longer(left_s):
    world = World()
    assert (world.spin.wait(world.poll, list, left_s), world.looks, world.now) == ([], 0, 0.0)


def test_the_variable_says_how_long(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    for text, longest in (("", LONGEST_S), ("150", 0.00015), ("0", 0.0)):
        monkeypatch.setenv("TQ_SPIN_US", text)
        assert longest_s() == pytest.approx(longest if cores > 1 else 0.0)
    monkeypatch.setenv("TQ_SPIN_US", "0")
    world = World()
    world.spin = Spin(longest_s(), lambda: world.now, world.pass_on)
    assert (world.wait(0.0), world.looks) == ([], 0)
    monkeypatch.setenv("TQ_SPIN_US", "long")
    if cores > 1:
        with pytest.raises(ConfigError, match="TQ_SPIN_US must be a number, got 'long'"):
            longest_s()
