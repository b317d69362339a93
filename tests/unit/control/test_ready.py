# SPDX-License-Identifier: Apache-2.0
"""ReadySet and ReadyView: what a plain sorted list would say, without touching more than the front."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.control.ready import ReadySet, ReadyView

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


def test_rows_named_twice_or_known_count_once():
    ready = ReadySet()
    ready.add(rows(4, 2, 4))
    ready.add(rows(2, 3))
    assert (listed(ready), ready.count) == ([2, 3, 4], 3)
    ready.discard(rows(3, 3, 9, 100_000))
    assert (listed(ready), ready.count) == ([2, 4], 2)


def test_rows_far_beyond_the_first_size_are_kept_in_order():
    ready = ReadySet(np.zeros(10, dtype=np.bool_))
    ready.add(rows(70_000, 1023, 1024, 0))
    assert listed(ready) == [0, 1023, 1024, 70_000]
    ready.discard(rows(1, 1024, 10**6))
    assert (listed(ready), ready.count) == ([0, 1023, 70_000], 3)


def test_hidden_rows_come_back_and_only_those_that_were_there():
    ready = ReadySet()
    ready.add(rows(*range(2000)))
    ready.hide(rows(0, 1, 1999, 2500))
    ready.hide(rows(1, 2))
    assert (ready.count, listed(ready)[:2]) == (1996, [3, 4])
    ready.unhide()
    ready.unhide()
    assert listed(ready) == list(range(2000))


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


def test_a_view_answers_what_samplers_ask_of_a_list():
    view = view_of([1, 3, 2000])
    assert (20000 in view, 20 in view, view.index(30), view.count(10)) == (True, False, 1, 1)
    assert all(type(index) is int for index in [*view, *view[:2], view[0]])


def test_the_front_is_read_without_looking_at_the_rest():
    ready = ReadySet()
    ready.add(np.arange(100_000))
    touched = []

    class Watched(np.ndarray):
        def __getitem__(self, key):
            result = super().__getitem__(key)
            touched.append(len(result))
            return result

    view = ReadyView(ready, np.arange(100_000, dtype=np.int64).view(Watched))
    assert view[:5] == [0, 1, 2, 3, 4]
    assert sum(touched) < 5000
