# SPDX-License-Identifier: Apache-2.0
"""Uncommitted writes: nobody sees them before their commit, and nothing is left of those that have none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.storage.arena_kit import PAGE, ArenaClient, ArenaUnit, indexes_of, of_arena, refused
from transfer_queue.protocol import Done
from transfer_queue.storage.messages import EndSession, Read
from transfer_queue.storage.unit.session_memory import Uncommitted, UncommittedWrite
from transfer_queue.storage.unit.unit import UnitReply
from transfer_queue.storage.wire import WireColumn, dense_layout

BYTE = dense_layout("uint8", 1, ())


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def wire(*values: int) -> WireColumn:
    return WireColumn(BYTE, len(values), np.array(values, np.uint8))


def write(values: dict[int, int], field: str = "a") -> UncommittedWrite:
    return UncommittedWrite(ints(*values), [(field, slice(0, len(values)), wire(*values.values()))])


def values_of(found: UncommittedWrite | None) -> dict[tuple[str, int], int]:
    values = {}
    for name, at, rows in [] if found is None else found.columns:
        values.update(zip([(name, index) for index in found.indexes[at].tolist()], rows.data.tolist(), strict=True))
    return values


# ---- the collection ----


@pytest.fixture
def uncommitted() -> Uncommitted:
    return Uncommitted()


def test_a_write_is_taken_once_and_by_its_own_name_alone(uncommitted):
    uncommitted.add("me", 7, write({1: 10}))
    assert (uncommitted.nbytes, bool(uncommitted)) == (1, True)
    assert (uncommitted.take("other", 7), uncommitted.take("me", 8)) == (None, None)
    assert values_of(uncommitted.take("me", 7)) == {("a", 1): 10}
    assert (uncommitted.take("me", 7), uncommitted.nbytes, bool(uncommitted)) == (None, 0, False)


def test_the_same_call_again_takes_the_place_of_the_first(uncommitted):
    uncommitted.add("me", 7, write({1: 10}))
    uncommitted.add("me", 7, write({1: 11, 2: 12}))
    assert (uncommitted.nbytes, values_of(uncommitted.take("me", 7))) == (2, {("a", 1): 11, ("a", 2): 12})


def test_the_end_of_a_session_gives_its_published_writes_in_order_and_drops_the_others(uncommitted):
    for call in (1, 2, 3):
        uncommitted.add("me", call, write({call: call}))
    uncommitted.add("other", 1, write({9: 9}))
    found = uncommitted.end("me", [3, 1, 99])
    assert [values_of(each) for each in found] == [{("a", 3): 3}, {("a", 1): 1}]
    assert (uncommitted.nbytes, values_of(uncommitted.take("other", 1))) == (1, {("a", 9): 9})


def test_the_latest_thousand_ended_clients_are_remembered(uncommitted):
    for n in range(2000):
        uncommitted.end(f"c{n}", [])
    remembered = [n for n in range(2000) if uncommitted.has_ended(f"c{n}")]
    assert remembered == list(range(2000 - 1024, 2000))


def test_a_reader_that_misses_values_takes_the_writes_that_hold_one_of_them_and_no_others(uncommitted):
    uncommitted.add("me", 1, write({1: 10, 2: 20}))
    uncommitted.add("me", 2, write({2: 30}, "b"))
    uncommitted.add("other", 1, write({3: 40}))
    assert uncommitted.take_holding({"b": ints(1, 3), "c": ints(1)}) == []
    found = uncommitted.take_holding({"a": ints(2, 99), "b": ints()})
    assert [values_of(each) for each in found] == [{("a", 1): 10, ("a", 2): 20}]
    assert uncommitted.nbytes == 2


def test_cleared_samples_are_forgotten_and_a_write_of_nothing_else_with_them(uncommitted):
    uncommitted.add("me", 1, write({1: 10, 2: 20, 3: 30}))
    uncommitted.add("other", 1, write({2: 40}))
    uncommitted.delete(ints(2, 9))
    assert (uncommitted.nbytes, uncommitted.take("other", 1)) == (2, None)
    assert values_of(uncommitted.take("me", 1)) == {("a", 1): 10, ("a", 3): 30}


FIELDS = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1
)


@given(fields=FIELDS, gone=st.lists(st.integers(0, 9)), runs=st.booleans())
def test_a_write_without_some_samples_has_all_others_and_none_of_these(fields, gone, runs):
    """Columns may fill any positions of a write, in any order."""
    indexes = ints(7, 3, 5, 1, 0, 9)
    parts = [
        (name, slice(0, len(at)) if runs else ints(*at), wire(*[10 * n + ord(name) - 96 for n in range(len(at))]))
        for name, at in fields.items()
    ]
    whole = UncommittedWrite(indexes, parts)
    expected = {key: value for key, value in values_of(whole).items() if key[1] not in gone}
    assert values_of(whole.without(ints(*gone))) == expected


# ---- in a unit ----


@pytest.fixture
def unit() -> ArenaUnit:
    return ArenaUnit()


@pytest.fixture
def me(unit) -> ArenaClient:
    return ArenaClient(unit, "me")


@pytest.fixture
def other(unit) -> ArenaClient:
    return ArenaClient(unit, "other")


WAYS = {
    "arena": lambda client, values: client.put(values, 300, commit=False),
    "frames": lambda client, values: client.put_frame(values, 300, commit=False),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def put(request):
    """An uncommitted write; gives its number."""
    return lambda client, values: request.param(client, values).id


def test_a_replaced_value_stays_until_the_commit(me, other, unit, put):
    me.put({1: 10, 2: 20}, 300)
    call = put(me, {2: 21})
    assert (other.values([1, 2]), unit.stats().values) == ({1: 10, 2: 20}, 2)
    assert me.commit(call) == [UnitReply("me", Done(me.calls))]
    assert (other.values([1, 2]), unit.stats().uncommitted_nbytes) == ({1: 10, 2: 21}, 0)


def test_a_cancelled_write_leaves_what_was_there_and_no_memory(me, other, unit, put):
    me.put({1: 10}, 300)
    call = put(me, {1: 11, 2: 20})
    assert me.cancel(call) == []
    me.commit(call)
    assert (other.values([1]), of_arena(unit), unit.stats().values) == ({1: 10}, (1, 0, 0), 1)
    refused(other.one(Read(other.number(), indexes_of([2]), ["a"])), "sample 2", "StorageKeyNotFoundError")


def test_a_client_cancels_and_commits_its_own_writes_alone(me, other, unit, put):
    call = put(me, {1: 10})
    other.cancel(call)
    other.commit(call)
    assert (unit.stats().uncommitted_nbytes, unit.stats().values) == (300, 0)


def test_a_read_of_a_published_value_does_not_wait_for_its_commit(me, other, unit, put):
    call = put(me, {1: 10, 2: 20})
    assert other.values([2]) == {2: 20}
    me.commit(call)
    assert (other.values([1, 2]), unit.stats().uncommitted_nbytes) == ({1: 10, 2: 20}, 0)


def test_a_read_that_misses_something_commits_no_write_that_lacks_it(me, other, unit, put):
    me.put({1: 10}, 300)
    call = put(me, {1: 11})
    refused(other.one(Read(other.number(), indexes_of([1, 2]), ["a"])), "sample 2", "StorageKeyNotFoundError")
    assert (other.values([1]), unit.stats().uncommitted_nbytes) == ({1: 10}, 300)
    me.cancel(call)


def test_of_two_writes_onto_one_sample_the_one_committed_last_counts(me, other, put):
    first, second = put(me, {1: 10}), put(other, {1: 20})
    other.commit(second)
    me.commit(first)
    assert me.values([1]) == {1: 10}


def test_a_commit_brings_no_sample_back_that_was_deleted_meanwhile(me, other, unit, put):
    call = put(me, {1: 10, 2: 20, 3: 30})
    other.delete(2)
    me.commit(call)
    assert (other.values([1, 3]), unit.stats().values) == ({1: 10, 3: 30}, 2)
    other.delete(1, 3)
    assert (of_arena(unit), unit.stats().held_nbytes) == ((0, 0, 0), 0)


def test_with_a_session_end_its_unpublished_writes_and_the_published_are_committed(me, other, unit, put):
    published, unpublished = put(me, {1: 10}), put(me, {2: 20})
    me.end()
    assert unit.stats().uncommitted_nbytes == 600, "the controller says which were published"
    end = EndSession(other.number(), "me", [published])
    assert other.ask(end) == [UnitReply("other", Done(end.id))]
    assert (other.values([1]), unit.stats().values, unit.stats().uncommitted_nbytes) == ({1: 10}, 1, 0)
    me.commit(unpublished)
    assert unit.stats().values == 1


def test_writes_that_come_after_the_end_of_their_session_are_refused(me, other, unit):
    lease, at = me.leased(1)
    other.ask(EndSession(other.number(), "me"))
    refused(me.one(me.written_at(at, lease, {1: 10}, PAGE)), "taken for dead")
    refused(me.one(me.lease(1)), "taken for dead")
    assert (of_arena(unit), unit.stats().uncommitted_nbytes) == ((0, 0, 0), 0)
