# SPDX-License-Identifier: Apache-2.0
"""Runs: what a plain set of numbers would say, in the room of its gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.control.runs import Runs


def runs_of(numbers):
    runs = Runs()
    for number in numbers:
        runs.add(number)
    return runs


@given(st.lists(st.integers(0, 40), max_size=40))
def test_runs_are_a_set_of_numbers(numbers):
    runs, members = runs_of(numbers), set(numbers)
    assert [number for number in range(-1, 43) if number in runs] == sorted(members)
    for number in range(43):
        assert runs.below(number) == max((member + 1 for member in members if member < number), default=0)
    assert runs.end() == max(members, default=-1) + 1
    assert len(runs) == sum(number - 1 not in members for number in members)


def test_a_long_row_of_numbers_takes_the_room_of_one_in_whatever_order_it_came():
    assert len(runs_of([*range(0, 1000, 2), *range(999, 0, -2)])) == 1
