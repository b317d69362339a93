# SPDX-License-Identifier: Apache-2.0
"""FreeList against a set of free pages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.storage.simple.free_list import FreeList

SPACE = 64


def runs_of(free: dict[int, float]) -> list[tuple[int, int]]:
    """(start, size) of each run of neighbouring free pages."""
    runs: list[tuple[int, int]] = []
    for page in sorted(free):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


class FreeListMachine(RuleBasedStateMachine):
    """The model: which pages are free, and the time of the whole run each of them lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.list = FreeList()
        self.free: dict[int, float] = {}
        self.taken: list[tuple[int, int]] = [(0, SPACE)]
        self.now = 0.0

    @rule(data=st.data(), wait=st.sampled_from([0.0, 1.0, 5.0]))
    @precondition(lambda self: self.taken)
    def give(self, data: st.DataObject, wait: float) -> None:
        self.now += wait
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        begin = data.draw(st.integers(start, start + size - 1))
        end = data.draw(st.integers(begin + 1, start + size))
        self.taken += [part for part in ((start, begin - start), (end, start + size - end)) if part[1]]
        self.list.give(begin, end - begin, self.now)
        self.free.update(dict.fromkeys(range(begin, end), self.now))
        for first, length in runs_of(self.free):
            latest = max(self.free[page] for page in range(first, first + length))
            self.free.update(dict.fromkeys(range(first, first + length), latest))

    @rule(size=st.integers(1, SPACE))
    def take(self, size: int) -> None:
        fitting = [length for _, length in runs_of(self.free) if length >= size]
        ranges = dict(runs_of(self.free))
        start = self.list.take(size)
        assert (start is None) == (not fitting)
        if start is not None:
            assert ranges[start] == min(fitting), "the smallest range that fits is taken, from its beginning"
            for page in range(start, start + size):
                del self.free[page]
            self.taken.append((start, size))

    @rule(age=st.sampled_from([0.0, 1.0, 4.0, 9.0]))
    def take_older(self, age: float) -> None:
        old = [run for run in runs_of(self.free) if self.free[run[0]] <= self.now - age]
        assert sorted(self.list.take_older(self.now - age)) == old
        for start, size in old:
            for page in range(start, start + size):
                del self.free[page]
            self.taken.append((start, size))

    @invariant()
    def ranges_are_the_runs_of_free_pages_and_no_two_of_them_touch(self) -> None:
        assert self.list.ranges() == runs_of(self.free)
        assert (self.list.total, len(self.list)) == (len(self.free), len(runs_of(self.free)))


FreeListMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, print_blob=True)
TestFreeListIsASetOfPages = FreeListMachine.TestCase


def test_of_ranges_that_fit_the_smallest_is_taken_and_of_equal_ones_the_first():
    free = FreeList()
    for start, size in ((0, 10), (20, 4), (40, 4), (60, 3)):
        free.give(start, size)
    assert [free.take(4), free.take(4), free.take(4), free.take(4)] == [20, 40, 0, 4]
    assert (free.ranges(), free.take(4), free.total) == ([(8, 2), (60, 3)], None, 5)


def test_a_range_given_back_between_two_others_joins_both():
    free = FreeList()
    for start, size in ((0, 4), (8, 4), (4, 4)):
        free.give(start, size)
    assert free.ranges() == [(0, 12)]


def test_a_range_is_as_young_as_its_youngest_part_and_its_rest_as_old_as_it_was():
    free = FreeList()
    free.give(0, 4, 1.0)
    free.give(4, 4, 9.0)
    free.give(20, 4, 2.0)
    assert free.take(2) == 20
    assert (free.take_older(8.0), free.take_older(9.0)) == ([(22, 2)], [(0, 8)])
