# SPDX-License-Identifier: Apache-2.0
"""RowTable: columns that grow together, find by global index, and shrink by compaction."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.control.rows import RowState, RowTable


def table_of(*indexes):
    table = RowTable()
    table.append(np.array(indexes, dtype=np.int64), RowState.LIVE)
    return table


def found(table, *indexes):
    rows, hit = table.find(np.array(indexes, dtype=np.int64))
    return table.column("index")[rows[hit]].tolist(), hit.tolist()


def test_rows_are_found_by_index_and_unknown_or_dead_ones_are_not():
    table = table_of(3, 5, 8)
    table.mark_dead(np.array([1]))
    assert found(table, 8, 5, 3, 4, 9, -1) == ([8, 3], [True, False, True, False, False, False])


def test_an_empty_table_finds_nothing():
    assert found(RowTable(), 0, 7) == ([], [False, False])
    assert found(table_of(1)) == ([], [])


def test_a_column_added_late_has_its_fill_in_present_and_future_rows_even_where_memory_was_used_before():
    table = table_of(0, 1)
    table.add_column("score", np.float32, fill=2.5)
    table.column("score")[:] = 9.0
    table.append(np.array([2]), RowState.RESERVED)
    table.add_column("shapes", np.int32, fill=np.array([4, 7]), width=2)
    assert table.column("score").tolist() == [9.0, 9.0, 2.5]
    assert table.column("shapes").tolist() == [[4, 7]] * 3
    table.append(np.array([3]), RowState.RESERVED)
    assert table.column("shapes").tolist() == [[4, 7]] * 4


def test_rows_appended_after_a_compaction_are_clean():
    table = table_of(*range(200))
    table.add_column("given", np.int32)
    table.column("given")[:] = 5
    table.mark_dead(np.arange(1, 200))
    table.compact()
    table.append(np.array([300, 301]), RowState.LIVE)
    assert table.column("given").tolist() == [5, 0, 0]


def test_a_dropped_column_is_gone_and_may_be_dropped_again():
    table = table_of(0)
    table.add_column("x", np.bool_)
    table.drop_column("x")
    table.drop_column("x")
    assert not table.has_column("x")


def test_compaction_is_wanted_when_more_than_half_of_many_rows_are_dead():
    table = table_of(*range(200))
    table.mark_dead(np.arange(100))
    assert not table.wants_compaction()
    table.mark_dead(np.array([100]))
    assert table.wants_compaction()
    small = table_of(*range(20))
    small.mark_dead(np.arange(20))
    assert not small.wants_compaction()


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
