# SPDX-License-Identifier: Apache-2.0
"""PageTable: pages of indexes, recycled."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.unit.block_store import PageTable


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def kept(slots: PageTable, indexes: np.ndarray) -> np.ndarray:
    slots.claim(indexes)
    found = slots.find(indexes)
    slots.keep(found)
    return found


def test_every_index_has_a_slot_of_its_own_and_unknown_ones_have_none():
    slots = PageTable()
    found = kept(slots, ints(5, 64, 1_000_000, 6))
    assert len(set(found.tolist())) == 4
    assert found.max() < slots.capacity
    assert slots.find(ints(5, 128, 6)).tolist() == [found[0], -1, found[3]]


def test_a_page_is_recycled_when_its_last_value_goes():
    slots = PageTable()
    first = kept(slots, ints(0, 1))
    kept(slots, ints(64))
    slots.release(first[:1])
    assert slots.find(ints(1))[0] == first[1]
    slots.release(first[1:])
    assert slots.find(ints(0, 1)).tolist() == [-1, -1]
    assert kept(slots, ints(6400)).tolist() == [first[0]]


def test_tables_stay_as_long_as_what_is_kept_while_indexes_grow():
    slots = PageTable()
    for start in range(0, 1_000_000, 1000):
        slots.release(kept(slots, np.arange(start, start + 1000)))
    assert slots.capacity == 0
    alive = [kept(slots, np.arange(start, start + 64)) for start in range(0, 64 * 10, 64)]
    for start in range(6400, 640_000, 64):
        slots.release(alive.pop(0))
        alive.append(kept(slots, np.arange(start, start + 64)))
    assert slots.capacity == 1024


@settings(max_examples=100, deadline=None, print_blob=True)
@given(runs=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300), st.booleans()), max_size=12))
def test_a_run_has_the_slots_that_its_indexes_have_one_by_one(runs):
    slots, held = PageTable(), set[int]()
    for start, count, stays in runs:
        indexes = np.arange(start, start + count)
        fresh = np.array([index for index in indexes.tolist() if index not in held], np.int64)
        if len(fresh):
            kept(slots, fresh)
            held.update(fresh.tolist())
        if not stays:
            slots.release(slots.find(indexes))
            held -= set(indexes.tolist())
        wanted = np.arange(max(0, start - 70), start + count + 70)
        found = slots.find(wanted)
        assert found.tolist() == [slots.find_one(index) for index in wanted.tolist()]
        own = [slot for index, slot in zip(wanted.tolist(), found.tolist(), strict=True) if index in held]
        assert -1 not in own
        assert len(set(own)) == len(own)
