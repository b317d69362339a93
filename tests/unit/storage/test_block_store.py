# SPDX-License-Identifier: Apache-2.0
"""BlockStore: what it holds, what it gives back, what it costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.messages import FieldColumns, rows_answer, unpack_columns
from transfer_queue.storage.unit.block_store import BlockStore
from transfer_queue.storage.wire import WireColumn, dense_layout, ragged_layout

ROW = 1000
SLACK = 16 * 1024
"""Dead bytes that small blocks may have."""


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def wire(values: list[int], size: int = ROW) -> WireColumn:
    data = np.repeat(np.array(values, np.int64), size).view(np.uint8)
    return WireColumn(dense_layout("int64", 8, (size,)), len(values), data)


def ragged(values: list[int]) -> WireColumn:
    """Row v is v copies of v."""
    data = np.repeat(np.array(values, np.int64), values).view(np.uint8)
    return WireColumn(ragged_layout("int64", 8, 1), len(values), data, np.array(values, np.int64).reshape(-1, 1))


def long_rows(values: list[int]) -> WireColumn:
    """Row v is v copies of v, a hundred times."""
    sizes = np.array(values, np.int64) * 100
    data = np.repeat(np.array(values, np.int64), sizes).view(np.uint8)
    return WireColumn(ragged_layout("int64", 8, 1), len(values), data, sizes.reshape(-1, 1))


def whole(field: str, part: WireColumn) -> list:
    return [(field, slice(0, part.rows), part)]


def numbers(part: WireColumn) -> list[int]:
    """The first number of each row; -1 for an empty one."""
    rows = part.as_ragged()
    words, found = rows.data.view(np.int64), []
    for start, stop in zip(rows.bounds // 8, rows.bounds[1:] // 8, strict=False):
        assert (words[start:stop] == words[start : start + 1]).all()
        found.append(int(words[start]) if stop > start else -1)
    return found


def stored(store: BlockStore, indexes: np.ndarray, fields: list[str]) -> FieldColumns:
    """What a reader without an arena is sent."""
    answer, frames, *_ = rows_answer(0, store.locate(indexes, fields), None)
    return unpack_columns(answer.headers, answer.tables, frames, len(indexes))


def deleted(store: BlockStore, indexes: np.ndarray) -> int:
    """Delete them, and count the values that are gone."""
    before = store.num_values
    store.delete(indexes)
    return before - store.num_values


def read(store: BlockStore, field: str, *indexes: int) -> list[int]:
    """Likewise."""
    found = [None] * len(indexes)
    for _, positions, part in stored(store, ints(*indexes), [field]):
        where = range(len(indexes))[positions] if isinstance(positions, slice) else positions.tolist()
        for position, number in zip(where, numbers(part), strict=True):
            found[position] = number
    return found


def test_values_come_back_in_the_order_asked_for_with_repeats():
    store = BlockStore()
    store.write(np.arange(100, 104), whole("a", wire([0, 1, 2, 3])))
    store.write(ints(7, 300), whole("a", wire([70, 30])))
    assert read(store, "a", 300, 101, 102, 101, 7, 100) == [30, 1, 2, 1, 70, 0]


def test_a_run_of_one_block_is_given_without_a_copy():
    store, mine = BlockStore(), wire([0, 1, 2, 3])
    store.write(np.arange(4), whole("a", mine))
    ((_, positions, part),) = stored(store, ints(1, 2), ["a"])
    assert (positions, np.shares_memory(part.data, mine.data)) == (slice(0, 2), True)


def test_fields_written_at_different_times_are_read_together():
    store = BlockStore()
    store.write(np.arange(3), whole("a", wire([0, 1, 2])))
    store.write(ints(2, 1), whole("b", ragged([5, 6])))
    assert (read(store, "a", 1, 2), read(store, "b", 1, 2)) == ([1, 2], [6, 5])


def test_a_second_write_replaces_and_earlier_answers_stay_as_they_were():
    store = BlockStore()
    store.write(np.arange(2), whole("a", wire([1, 2])))
    ((_, _, before),) = stored(store, ints(0, 1), ["a"])
    store.write(ints(1), whole("a", wire([9])))
    store.delete(ints(0))
    assert read(store, "a", 1) == [9]
    assert before.data.view(np.int64)[::ROW].tolist() == [1, 2]


def test_of_an_index_given_twice_in_one_write_the_last_row_counts():
    store = BlockStore()
    store.write(ints(5, 5, 6), whole("a", wire([1, 2, 3])))
    assert read(store, "a", 5, 6) == [2, 3]
    assert (store.num_values, store.num_samples, store.live_nbytes) == (2, 2, 2 * ROW * 8)
    assert deleted(store, ints(5, 5, 6)) == 2
    assert (store.held_nbytes, store.num_blocks) == (0, 0)


def test_a_missing_value_names_field_and_sample():
    store = BlockStore()
    store.write(np.arange(2), whole("a", wire([1, 2])))
    with pytest.raises(StorageKeyNotFoundError, match=r"field 'a' for sample 7 \(1 of the 2 samples"):
        stored(store, ints(0, 7), ["a"])
    with pytest.raises(StorageKeyNotFoundError, match="field 'b' for sample 0"):
        stored(store, ints(0), ["b"])
    store.delete(ints(0))
    with pytest.raises(StorageKeyNotFoundError, match="field 'a' for sample 0"):
        stored(store, ints(0, 1), ["a"])


def test_deleting_what_is_unknown_changes_nothing():
    store = BlockStore()
    store.write(ints(1), whole("a", wire([1])))
    assert (deleted(store, ints(0, 2, 5000)), deleted(store, ints())) == (0, 0)
    assert read(store, "a", 1) == [1]


@pytest.mark.parametrize("make", [wire, ragged])
def test_clearing_62_of_64_samples_frees_their_bytes(make):
    store = BlockStore()
    store.write(np.arange(64), whole("a", make(list(range(1, 65)))))
    store.delete(np.arange(1, 63))
    assert (read(store, "a", 0, 63), store.held_nbytes) == ([1, 64], store.live_nbytes)
    assert store.live_nbytes == make([1, 64]).nbytes


def test_no_more_than_half_of_what_is_held_is_dead():
    store = BlockStore()
    store.write(np.arange(64), whole("a", wire(list(range(64)))))
    for index in range(0, 64, 3):
        store.delete(ints(index))
        assert store.held_nbytes <= 2 * store.live_nbytes
    store.squeeze()
    assert store.held_nbytes == store.live_nbytes == 42 * ROW * 8


@pytest.mark.parametrize("make", [wire, long_rows])
def test_a_large_block_that_is_mostly_dead_is_moved_a_step_at_a_time_and_read_all_the_while(make):
    rows = make(list(range(1, 65)))
    store = BlockStore()
    store.step_nbytes = rows.nbytes // 16
    store.write(np.arange(64), whole("a", rows))
    kept = list(range(1, 64, 3))
    store.delete(np.setdiff1d(np.arange(64), kept))
    steps = 0
    while store.is_moving:
        assert store.held_nbytes <= rows.nbytes + store.live_nbytes
        assert read(store, "a", *kept) == [index + 1 for index in kept]
        before = store.held_nbytes
        store.move()
        assert store.held_nbytes - before <= rows.nbytes // 16, "no more than a step is copied at once"
        steps += 1
    assert 8 <= steps <= 24
    assert read(store, "a", *kept) == [index + 1 for index in kept]
    assert store.held_nbytes == store.live_nbytes == make([index + 1 for index in kept]).nbytes


def test_what_dies_while_its_block_is_moved_is_not_moved():
    store = BlockStore()
    store.step_nbytes = 4 * ROW * 8
    store.write(np.arange(64), whole("a", wire(list(range(64)))))
    store.delete(np.arange(0, 64, 3))
    store.delete(np.arange(1, 64, 3))
    for _ in range(3):
        store.move()
    store.delete(np.arange(0, 62))
    assert (read(store, "a", 62), store.is_moving) == ([62], False)
    assert store.held_nbytes == store.live_nbytes == ROW * 8


class Memory:
    """For the blocks that a store makes of others: none while it is ``short``."""

    short = True

    def __call__(self, nbytes: int) -> np.ndarray:
        if self.short:
            raise MemoryError(f"no {nbytes} bytes left")
        return np.empty(nbytes, np.uint8)


@pytest.mark.parametrize("make", [wire, ragged])
def test_without_memory_to_compact_dead_rows_stay_and_every_value_is_as_it_was(make):
    memory = Memory()
    store = BlockStore(memory)
    store.write(np.arange(64), whole("a", make(list(range(1, 65)))))
    assert deleted(store, np.arange(2, 64)) == 62
    for index in range(100, 140):
        store.write(ints(index), whole("a", make([index])))
    store.squeeze()
    assert read(store, "a", 0, 1, *range(100, 140)) == [1, 2, *range(100, 140)]
    assert store.held_nbytes > store.live_nbytes
    memory.short = False
    store.squeeze()
    assert store.held_nbytes == store.live_nbytes == make([1, 2, *range(100, 140)]).nbytes
    assert read(store, "a", 0, 1, *range(100, 140)) == [1, 2, *range(100, 140)]


def test_samples_written_one_by_one_end_in_few_blocks_whatever_their_shapes():
    store = BlockStore()
    for index in range(1000):
        store.write(ints(index), whole("a", wire([index], size=1 + index % 7)))
    assert store.num_blocks < 64
    assert read(store, "a", *range(1000)) == list(range(1000))
    assert len(stored(store, np.arange(1000), ["a"])) < 64


def test_memory_of_the_tables_follows_what_is_kept_while_indexes_grow():
    store, sizes = BlockStore(), []
    tracemalloc.start()
    for start in range(0, 300_000, 1000):
        store.write(np.arange(start, start + 1000), whole("a", wire([start] * 1000, size=1)))
        store.delete(np.arange(start - 1000, start))
        if start in (20_000, 299_000):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100_000
    assert (store.num_samples, read(store, "a", 299_999)) == (1000, [299_000])
    store.delete(np.arange(299_000, 300_000))
    assert (store.num_samples, store.held_nbytes, store.num_blocks) == (0, 0, 0)


def wide(num_fields: int) -> FieldColumns:
    return [column for number in range(num_fields) for column in whole(f"f{number}", wire([1, 2], size=1))]


@pytest.mark.parametrize("wide_first", [True, False])
def test_memory_of_the_tables_is_not_fields_times_samples(wide_first):
    store = BlockStore()
    writes = [(np.arange(2), wide(100)), (np.arange(1000, 101_000), whole("x", wire([1] * 100_000, size=1)))]
    tracemalloc.start()
    for indexes, columns in writes if wide_first else reversed(writes):
        store.write(indexes, columns)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (store.num_samples, store.num_values, read(store, "f7", 0, 1)) == (100_002, 100_200, [1, 2])
    assert memory < 6_000_000, "100 x 100 002 entries of 8 bytes would be 80 MB"


def test_memory_of_a_table_is_that_of_the_values_that_its_field_has_now():
    store = BlockStore()
    store.write(np.arange(100_000), whole("x", wire([1] * 100_000, size=1)))
    store.write(ints(99_999), whole("a", wire([7], size=1)))
    tracemalloc.start()
    for start in range(0, 99_500, 500):
        indexes = np.arange(start, start + 500)
        store.write(indexes, whole("a", wire([start] * 500, size=1)))
        assert read(store, "a", start, start + 499, 99_999) == [start, start, 7]
        store.delete(indexes)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert memory < 300_000, "100 000 entries of 8 bytes would be 800 kB"


def test_pages_that_are_empty_when_others_are_claimed_are_not_lost():
    store = BlockStore()
    store.write(np.arange(192), whole("x", wire([1] * 192)))
    for index in (0, 64, 128):
        store.write(ints(index), whole("a", wire([2])))
    store.delete(ints(64))
    store.write(np.arange(64, 256), whole("a", wire(list(range(192)))))
    assert read(store, "a", 0, *range(64, 256)) == [2, *range(192)]
    assert store.num_values == 191 + 193
    for unknown in (1, 63, 256, 6400):
        with pytest.raises(StorageKeyNotFoundError):
            read(store, "a", unknown)


def test_an_index_that_a_write_names_without_a_value_costs_nothing_afterwards():
    store = BlockStore()
    store.write(ints(0, 6400), [("a", np.array([1]), wire([5]))])
    assert (read(store, "a", 6400), store.num_samples) == ([5], 1)
    store.delete(ints(0, 6400))
    assert not store._fields


def test_replaced_bytes_are_those_a_write_would_free():
    store = BlockStore()
    store.write(np.arange(4), whole("a", wire([0, 1, 2, 3])) + whole("b", wire([0, 1, 2, 3])))
    assert store.replaced_nbytes(ints(3, 4), ["a"]) == ROW * 8
    assert store.replaced_nbytes(ints(9), ["c"]) == 0


def test_without_memory_to_move_a_block_it_stays_until_more_of_it_dies():
    memory = Memory()
    store = BlockStore(memory)
    store.step_nbytes = 4 * ROW * 8
    store.write(np.arange(64), whole("a", wire(list(range(64)))))
    store.delete(np.arange(2, 42))
    store.move()
    assert (store.is_moving, store.held_nbytes, store.live_nbytes) == (False, 64 * ROW * 8, 24 * ROW * 8)
    memory.short = False
    store.delete(ints(42))
    assert store.is_moving
    while store.is_moving:
        store.move()
    assert store.held_nbytes == store.live_nbytes == 23 * ROW * 8
    assert read(store, "a", 0, 1, *range(43, 64)) == [0, 1, *range(43, 64)]


class AgainstADict(RuleBasedStateMachine):
    """Any sequence of writes, reads and deletes does what a dict of (index, field) would, at any time of a move."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore()
        self.model: dict[tuple[int, str], int] = {}

    @initialize(rows=st.sampled_from([None, 1, 3, 10]))
    def begin(self, rows):
        if rows is not None:
            self.store = BlockStore()
            self.store.step_nbytes = rows * ROW * 8

    @rule(steps=st.integers(1, 5))
    def move(self, steps):
        before = self.store.live_nbytes
        for _ in range(steps if self.store.is_moving else 0):
            if self.store.is_moving:
                self.store.move()
        assert abs(self.store.live_nbytes - before) <= 8 * self.store.num_values, "but for the sizes of rows"

    @rule(
        indexes=st.lists(st.integers(0, 200), min_size=1, max_size=20),
        field=st.sampled_from("ab"),
        make=st.sampled_from([wire, ragged]),
        data=st.data(),
    )
    def write(self, indexes, field, make, data):
        self._write(indexes, field, make, data)

    @rule(first=st.integers(0, 200), count=st.integers(1, 40), field=st.sampled_from("ab"), data=st.data())
    def write_run(self, first, count, field, data):
        self._write(list(range(first, first + count)), field, data.draw(st.sampled_from([wire, ragged])), data)

    def _write(self, indexes, field, make, data):
        values = data.draw(st.lists(st.integers(1, 40), min_size=len(indexes), max_size=len(indexes)))
        self.store.write(ints(*indexes), whole(field, make(values)))
        self.model.update({(index, field): value for index, value in zip(indexes, values, strict=True)})

    @rule(indexes=st.lists(st.integers(0, 200), max_size=60))
    def delete(self, indexes):
        gone = [key for key in self.model if key[0] in indexes]
        assert deleted(self.store, ints(*indexes)) == len(gone)
        for key in gone:
            del self.model[key]

    @rule()
    def squeeze(self):
        self.store.squeeze()
        assert self.store.held_nbytes == self.store.live_nbytes

    @rule(field=st.sampled_from("ab"), order=st.randoms(use_true_random=False))
    def read(self, field, order):
        indexes = [index for index, name in self.model if name == field] * 2
        order.shuffle(indexes)
        assert read(self.store, field, *indexes) == [self.model[index, field] for index in indexes] if indexes else True

    @rule(field=st.sampled_from("ab"), first=st.integers(0, 200), count=st.integers(1, 40))
    def read_run(self, field, first, count):
        run = range(first, first + count)
        if all((index, field) in self.model for index in run):
            values = [self.model[index, field] for index in run]
            assert read(self.store, field, *run) == values
            found = {}
            for _, block, at, rows in self.store.locate(ints(*run), [field]):
                found |= zip(np.arange(count)[at].tolist(), np.array(numbers(block))[rows].tolist(), strict=True)
            assert [found[position] for position in range(count)] == values
        else:
            with pytest.raises(StorageKeyNotFoundError):
                self.store.locate(ints(*run), [field])

    @invariant()
    def counts_agree(self):
        assert self.store.num_values == len(self.model)
        assert self.store.num_samples == len({index for index, _ in self.model})
        held = {name: set(found.tolist()) for name, found in self.store.held(np.arange(201)).items()}
        for field in "ab":
            assert held.get(field, set()) == {index for index, name in self.model if name == field and index < 201}
        assert self.store.live_nbytes <= self.store.held_nbytes
        slack = 4 * SLACK  # of two fields, each with rows of one size and of several
        assert self.store.is_moving or self.store.held_nbytes <= 2 * self.store.live_nbytes + slack
        assert (self.store.num_blocks == 0) == (not self.model)


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, print_blob=True)
