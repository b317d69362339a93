# SPDX-License-Identifier: Apache-2.0
"""FreeList against a set of free pages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.storage.unit.arena import FreeList

SPACE = 64


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """(start, size) of each run of neighbouring free pages."""
    runs: list[tuple[int, int]] = []
    for page in sorted(free):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


class FreeListMachine(RuleBasedStateMachine):
    """The model: which pages are free."""

    def __init__(self) -> None:
        super().__init__()
        self.list = FreeList()
        self.free: set[int] = set()
        self.taken: list[tuple[int, int]] = [(0, SPACE)]

    @rule(data=st.data())
    @precondition(lambda self: self.taken)
    def free(self, data: st.DataObject) -> None:
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        begin = data.draw(st.integers(start, start + size - 1))
        end = data.draw(st.integers(begin + 1, start + size))
        self.taken += [part for part in ((start, begin - start), (end, start + size - end)) if part[1]]
        self.list.free(begin, end - begin)
        self.free.update(range(begin, end))

    @rule(size=st.integers(1, SPACE))
    def take(self, size: int) -> None:
        fitting = [length for _, length in runs_of(self.free) if length >= size]
        ranges = dict(runs_of(self.free))
        start = self.list.take(size)
        assert (start is None) == (not fitting)
        if start is not None:
            assert ranges[start] == min(fitting), "the smallest range that fits is taken, from its beginning"
            self.free.difference_update(range(start, start + size))
            self.taken.append((start, size))

    @rule(data=st.data())
    def take_largest(self, data: st.DataObject) -> None:
        total = data.draw(st.integers(0, len(self.free)))
        largest = sorted((length for _, length in runs_of(self.free)), reverse=True)
        taken = self.list.take_largest(total)
        sizes = [size for _, size in taken]
        assert (sum(sizes), sizes[:-1]) == (total, largest[: max(len(sizes) - 1, 0)]), "whole ranges, but for the last"
        for start, size in taken:
            assert self.free.issuperset(range(start, start + size))
            self.free.difference_update(range(start, start + size))
            self.taken.append((start, size))

    @invariant()
    def the_total_is_the_number_of_free_pages(self) -> None:
        assert self.list.total == len(self.free)

    def teardown(self) -> None:
        assert sorted(self.list.take_largest(len(self.free))) == runs_of(self.free), "no two ranges touch"


FreeListMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, print_blob=True)
TestFreeListIsASetOfPages = FreeListMachine.TestCase
