# SPDX-License-Identifier: Apache-2.0
"""StorageUnit: writes onto known samples may be refused where a value is, taken back until settled, and forsaken."""

from __future__ import annotations

import pytest
from transfer_queue.storage.simple.messages import (
    Dropped,
    Forsake,
    Forsaken,
    Leased,
    OpenWrite,
    Present,
    Read,
    TakeBack,
    Written,
)
from transfer_queue.storage.simple.unit import StorageUnit

from tests.unit.storage.arena_kit import PAGE, Guest, indexes_of, of_arena, refused, unit_of_pages


@pytest.fixture
def unit() -> StorageUnit:
    return unit_of_pages()


@pytest.fixture
def me(unit) -> Guest:
    return Guest(unit, 1, "me")


@pytest.fixture
def other(unit) -> Guest:
    return Guest(unit, 2, "other")


PATHS = {
    "arena": lambda guest, values, **more: guest.put(values, 300, **more),
    "frames": lambda guest, values, **more: guest.put_frame(values, 300, **more),
}


@pytest.fixture(params=PATHS.values(), ids=PATHS)
def put(request):
    return request.param


def take_back(guest: Guest, number: int, indexes=None, client: str = ""):
    return guest.one(TakeBack(client, number, None if indexes is None else indexes_of(indexes)))


def test_a_write_for_where_nothing_is_stores_all_or_nothing(me, unit, put):
    assert put(me, {1: 1, 2: 2}, number=1, absent=True) == Written()
    assert put(me, {2: 5, 3: 5}, number=2, absent=True) == Present()
    assert (me.values([1, 2]), unit.stats().values) == ({1: 1, 2: 2}, 2)


def test_what_was_refused_as_present_is_not_open(me, put):
    put(me, {1: 1})
    assert put(me, {1: 5}, number=7, absent=True) == Present()
    assert take_back(me, 7) == Dropped(0)
    assert me.values([1]) == {1: 1}


def test_a_taken_back_write_is_gone_and_what_was_there_besides_stays(me, unit, put):
    put(me, {1: 1, 2: 2})
    put(me, {3: 3, 4: 4}, number=1)
    assert take_back(me, 1) == Dropped(2)
    assert (me.values([1, 2]), unit.stats().values) == ({1: 1, 2: 2}, 2)
    assert take_back(me, 1) == Dropped(0), "once"


def test_only_what_nobody_replaced_since_is_taken_back(me, other, put):
    put(me, {1: 1, 2: 2, 3: 3}, number=1)
    put(other, {2: 20})
    put(me, {3: 30}, number=2)
    assert take_back(me, 1) == Dropped(1)
    assert me.values([2, 3]) == {2: 20, 3: 30}


def test_a_value_that_was_cleared_and_put_anew_is_not_taken_back(me, other, put):
    put(me, {1: 1}, number=1)
    other.drop(1)
    put(other, {1: 9})
    assert take_back(me, 1) == Dropped(0)
    assert me.values([1]) == {1: 9}


def test_a_value_that_replaced_another_is_not_taken_back(me, other, unit, put):
    put(other, {2: 20, 3: 30})
    put(me, {1: 1, 2: 2, 3: 3, 4: 4}, number=1)
    put(other, {4: 40})
    assert take_back(me, 1) == Dropped(1)
    assert (me.values([2, 3, 4]), unit.stats().values) == ({2: 2, 3: 3, 4: 40}, 3)


def test_a_part_can_be_taken_back_first_and_the_rest_later(me, put):
    put(me, {1: 1, 2: 2, 3: 3}, number=1)
    assert take_back(me, 1, [2, 99]) == Dropped(1)
    assert me.values([1, 3]) == {1: 1, 3: 3}
    assert take_back(me, 1) == Dropped(2)


def test_only_what_the_write_stored_is_taken_back_whatever_indexes_are_named(me, other, put):
    put(other, {5: 5}, number=1)
    put(me, {1: 1}, number=1)
    assert take_back(me, 1, [1, 5]) == Dropped(1)
    assert me.values([5]) == {5: 5}


def test_taking_back_finds_its_values_after_their_block_was_compacted(me, other, unit, put):
    put(me, {n: n for n in range(8)}, number=1)
    put(other, {0: 100, 1: 101})
    other.drop(2, 3, 4)
    assert unit.stats().held_nbytes == 5 * 300, "the dead rows are gone"
    assert take_back(me, 1) == Dropped(3)
    assert me.values([0, 1]) == {0: 100, 1: 101}


def test_taking_back_finds_its_values_after_small_blocks_were_merged(me, other, unit, put):
    put(me, {500: 5, 501: 6}, number=1)
    for n in range(40):
        put(other, {n: n})
    assert unit.stats().blocks < 20
    put(other, {501: 60})
    assert take_back(me, 1) == Dropped(1)
    assert me.values([501, *range(40)]) == {501: 60, **{n: n for n in range(40)}}


def test_a_settled_write_can_not_be_taken_back(me, put):
    put(me, {1: 1}, number=1)
    put(me, {2: 2}, number=2)
    put(me, {3: 3}, settled=[1])
    assert (take_back(me, 1), take_back(me, 2)) == (Dropped(0), Dropped(1))
    assert me.values([1, 3]) == {1: 1, 3: 3}


def test_a_client_takes_back_its_own_writes_and_others_only_by_naming_their_client(me, other, put):
    put(me, {1: 1}, number=1)
    put(other, {2: 2}, number=1)
    assert (take_back(other, 1), take_back(other, 1)) == (Dropped(1), Dropped(0))
    assert take_back(other, 1, client="me") == Dropped(1)


def test_forsaking_a_client_tells_what_it_left_open_and_refuses_whatever_comes_from_it(me, other, unit, put):
    put(me, {1: 1, 2: 2}, number=1)
    put(me, {3: 3}, number=2)
    put(me, {4: 4}, number=3, settled=[2])
    lease = me.lease(2)
    at = me.one(lease).offset
    left = other.one(Forsake("me"))
    assert left == Forsaken([OpenWrite(1, indexes_of([1, 2]), ["a"]), OpenWrite(3, indexes_of([4]), ["a"])])
    refused(me.one(me.written_at(at, lease.hold, {1: 9}, 10)), "taken for dead")
    refused(me.one(me.lease(1)), "taken for dead")
    refused(me.one(Read(indexes_of([1]), ["a"])), "taken for dead")
    assert other.values([1, 2, 3, 4]) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert take_back(other, 1, [1], "me") == Dropped(1)
    assert take_back(other, 3, None, "me") == Dropped(1)
    assert other.values([2, 3]) == {2: 2, 3: 3}
    me.die()
    assert of_arena(unit)[1:] == (0, 0)


def test_forsaking_a_client_forgets_what_it_waits_for_and_lets_in_the_next():
    unit = unit_of_pages(4)
    me, other = Guest(unit, 1, "me"), Guest(unit, 2, "other")
    other.put({1: 1}, 3 * PAGE)
    me.ask(me.lease(4))
    other.ask(other.lease(1))
    forsaken, let_in = other.ask(Forsake("me"))
    assert (forsaken[2], let_in[0], type(let_in[2])) == (Forsaken([]), "other", Leased)


def test_a_client_that_nobody_knows_can_be_forsaken(me, put):
    assert me.one(Forsake("stranger")) == Forsaken([])
    assert put(me, {1: 1}, number=1) == Written()
