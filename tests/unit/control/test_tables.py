# SPDX-License-Identifier: Apache-2.0
"""The sets and tables that a plane is made of, each against the plain Python object that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.control.ledger import Runs
from transfer_queue.control.ready import ReadySet, ReadyView
from transfer_queue.control.rows import RowState, RowTable

ROWS = 5000


def rows(*numbers):
    return np.array(numbers, dtype=np.intp)


def listed(ready):
    return [row for block in ready.blocks() for row in block.tolist()]


def view_of(numbers, size=ROWS):
    """A view whose global index of row r is 10 * r."""
    ready = ReadySet()
    ready.add(rows(*numbers))
    return ReadyView(ready, np.arange(size, dtype=np.int64) * 10)


@settings(max_examples=80, deadline=None, print_blob=True)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, ROWS - 1), max_size=40), st.integers(1, 700)), max_size=12
    )
)
def test_a_ready_set_is_a_set_of_rows(steps):
    ready, model = ReadySet(), set()
    for present, numbers, run in steps:
        picked = numbers + [row for first in numbers[:1] for row in range(first, min(first + run, ROWS))]
        if present:
            ready.add(rows(*picked))
            model |= set(picked)
        else:
            ready.discard(rows(*picked))
            model -= set(picked)
        assert (listed(ready), ready.count) == (sorted(model), len(model))


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    numbers=st.lists(st.integers(0, ROWS - 1), unique=True, max_size=60),
    start=st.one_of(st.none(), st.integers(-70, 70)),
    stop=st.one_of(st.none(), st.integers(-70, 70)),
    step=st.sampled_from([None, 1, 2, 7, -1, -3]),
)
def test_a_view_is_the_sorted_list_of_global_indexes(numbers, start, stop, step):
    view, model = view_of(numbers), sorted(10 * number for number in numbers)
    assert (len(view), list(view), bool(view)) == (len(model), model, bool(model))
    assert view[start:stop:step] == model[start:stop:step]
    assert list(reversed(view)) == model[::-1]
    for position in (0, 1, -1, len(model) - 1, len(model), -len(model) - 1):
        if -len(model) <= position < len(model):
            assert view[position] == model[position]
        else:
            with pytest.raises(IndexError, match=f"position {position} of {len(model)} ready samples"):
                view[position]


@settings(max_examples=60, deadline=None, print_blob=True)
@given(st.lists(st.tuples(st.sampled_from(["append", "kill", "compact"]), st.integers(1, 90)), max_size=25))
def test_values_stay_with_their_index_whatever_is_appended_killed_and_compacted(steps):
    table, model, last = RowTable(), {}, 0
    table.add_column("value", np.int64)
    for step, number in steps:
        if step == "append":
            indexes = np.arange(last, last + number)
            rows = table.append(indexes, RowState.LIVE)
            table.column("value")[rows] = indexes * 3
            model.update({int(index): int(index) * 3 for index in indexes})
            last += number + number % 3
        elif step == "kill":
            gone = [index for index in model if index % 7 < number % 7]
            table.mark_dead(table.find(np.array(gone, dtype=np.int64))[0])
            for index in gone:
                del model[index]
        else:
            table.compact()
            assert (table.size, table.num_dead) == (len(model), 0)
        rows, hit = table.find(np.arange(last))
        values = dict(zip(np.arange(last)[hit].tolist(), table.column("value")[rows[hit]].tolist(), strict=True))
        assert values == model
        assert table.num_dead == table.size - len(model)


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
    assert len(runs.edges) == 2 * sum(number - 1 not in members for number in members)
