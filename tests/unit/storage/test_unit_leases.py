# SPDX-License-Identifier: Apache-2.0
"""StorageUnit with an arena: leases are given in order, carved by their write, and never lost."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_queue.storage.simple.messages import (
    Dropped,
    Hold,
    Lease,
    Leased,
    Part,
    Present,
    Write,
    Written,
    pack_indexes,
)

from tests.unit.storage.arena_kit import PAGE, Guest, indexes_of, of_arena, refused, row_layout, told, unit_of_pages
from transfer_queue.storage.pieces import ragged_layout


@pytest.fixture
def unit():
    return unit_of_pages(capacity())


def capacity() -> int:
    return 10


@pytest.fixture
def me(unit) -> Guest:
    return Guest(unit, 1)


@pytest.fixture
def other(unit) -> Guest:
    return Guest(unit, 2)


# ---- leases wait for room ----


def test_a_lease_is_answered_at_once_where_there_is_room_and_counts_as_taken(me, unit):
    leased = me.one(me.lease(4))
    assert (leased.offset % PAGE, of_arena(unit)) == (0, (4, 4, 0))


def test_leases_without_room_are_let_in_by_drops_in_the_order_they_came(me, other, unit):
    me.put({1: 1, 2: 2}, 3 * PAGE)
    me.put({3: 3}, 3 * PAGE)
    assert me.ask(me.lease(4)) == []
    assert other.ask(other.lease(1)) == [], "one page is free, but somebody came before"
    assert (unit.stats().parked, unit.stats().parked_nbytes) == (2, 5 * PAGE)
    (dropped, first, second) = me.drop(1, 2, 3)
    assert (dropped[2], first[:2], second[:2]) == (Dropped(3), ("client 1", 5), ("client 2", 1))
    assert first[2].offset != second[2].offset
    assert of_arena(unit) == (5, 5, 0)


def test_a_lease_that_was_let_go_lets_in_the_next(me, other, unit):
    lease = me.lease(8)
    me.one(lease)
    assert other.ask(other.lease(8)) == []
    ((name, _, leased),) = me.let_go(lease.hold)
    assert (name, leased.offset >= 0, of_arena(unit)) == ("client 2", True, (8, 8, 0))


def test_a_lease_that_waited_too_long_fails_and_lets_the_next_one_in(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    me.ask(me.lease(8, wait_s=5.0))
    other.ask(other.lease(2))
    assert told(unit.expire(4.9)) == []
    late, let_in = told(unit.expire(5.0))
    refused(late[2], "Storage capacity exceeded", "StorageFullError")
    assert (let_in[0], let_in[2].offset >= 0) == ("client 2", True)


def test_a_lease_that_can_never_fit_is_refused_at_once(me, unit):
    refused(me.one(me.lease(11)), "can never fit", "StorageFullError")
    assert of_arena(unit) == (0, 0, 0)


def test_who_gives_up_while_waiting_is_never_granted_and_holds_up_nobody(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    lease = me.lease(8)
    me.ask(lease)
    other.ask(other.lease(2))
    ((name, _, leased),) = me.let_go(lease.hold)
    assert (name, leased.offset >= 0) == ("client 2", True)
    me.drop(1)
    assert (unit.stats().parked, of_arena(unit)) == (0, (2, 2, 0))


def test_who_gave_up_before_the_unit_heard_the_question_gets_nothing(me, unit):
    lease = me.lease(2)
    me.let_go(lease.hold)
    assert (me.one(lease), of_arena(unit)) == (Leased(-1), (0, 0, 0))


def test_a_lease_for_nobody_attached_or_of_no_bytes_is_not_given(me, unit):
    assert me.one(Lease(Hold(77, 1), PAGE, b"", ["a"])) == Leased(-1)
    for nbytes in (0, -PAGE):
        refused(me.one(Lease(me.hold(), nbytes, b"", ["a"])), "ask for at least one")
    assert of_arena(unit) == (0, 0, 0)


def test_where_the_arena_has_no_such_range_the_answer_says_so(unit):
    large = Guest(unit_of_pages(None, arena_pages=8), 1)
    assert large.one(large.lease(9)) == Leased(-1)
    assert large.one(large.lease(8)).offset == 0


# ---- a write cuts its parts out of its lease ----


def test_a_lease_is_carved_by_its_write_and_the_rest_of_it_is_free_again(me, unit):
    lease = me.lease(9)
    at = me.one(lease).offset
    me.view(at, 9 * PAGE)[:] = 0
    me.view(at, 10)[:] = 5
    me.view(at + 4 * PAGE, PAGE + 1)[:] = 6
    parts = [
        Part("b", row_layout(PAGE + 1), 1, offset=at + 4 * PAGE, nbytes=PAGE + 1),
        Part("a", row_layout(10), 1, offset=at, nbytes=10),
    ]
    assert me.one(Write(indexes_of([7]), parts, lease=lease.hold)) == Written()
    assert (of_arena(unit), unit.stats().held_nbytes) == ((3, 0, 0), PAGE + 11)
    assert me.values([7]) == {7: 5}
    me.drop(7)
    assert of_arena(unit) == (0, 0, 0)


def part(offset: int, nbytes: int, rows: int = 1, **more) -> Part:
    return Part("a", row_layout(nbytes), rows, offset=offset, nbytes=nbytes * rows, **more)


BAD_PARTS = {
    "beyond the end": lambda at: [part(at + PAGE, 3 * PAGE + 1)],
    "before the beginning": lambda at: [part(at - PAGE, PAGE)],
    "far away": lambda at: [part(at + (1 << 50), PAGE)],
    "overlapping": lambda at: [part(at, 2 * PAGE), part(at + PAGE, PAGE)],
    "overlapping within a page": lambda at: [part(at, 10), part(at + 16, 10)],
    "the same twice": lambda at: [part(at, PAGE), part(at, PAGE)],
    "not on a page": lambda at: [part(at + 8, PAGE)],
    "of no bytes": lambda at: [Part("a", row_layout(0), 1, offset=at, nbytes=0)],
    "of fewer than no bytes": lambda at: [Part("a", row_layout(8), 1, offset=at, nbytes=-PAGE), part(at, PAGE)],
    "of another size than its rows": lambda at: [Part("a", row_layout(8), 3, offset=at, nbytes=8)],
    "of rows that the write does not name": lambda at: [part(at, 8, rows=5)],
    "of no rows": lambda at: [Part("a", row_layout(8), 0, offset=at, nbytes=8)],
    "of rows out of order": lambda at: [part(at, PAGE, picks=0)],
    "whose shapes are missing": lambda at: [Part("a", ragged_layout("uint8", 1, 1), 1, offset=at, nbytes=8)],
    "at positions of no table": lambda at: [part(at, 8, positions=3)],
}


@pytest.mark.parametrize("parts", BAD_PARTS.values(), ids=BAD_PARTS)
def test_a_write_with_a_bad_part_is_refused_and_nothing_leaks(me, other, unit, parts):
    before = other.put({100: 1})
    lease = me.lease(4)
    at = me.one(lease).offset
    tables = [pack_indexes(np.zeros(1, np.int64))]
    refused(me.one(Write(indexes_of([1, 2]), parts(at), tables, lease=lease.hold)), "")
    me.let_go(lease.hold)
    assert (before, of_arena(unit), unit.stats().values) == (Written(), (1, 0, 0), 1)
    assert (me.put({1: 3, 2: 4}), me.values([1, 2, 100])) == (Written(), {1: 3, 2: 4, 100: 1})


FOREIGN = {
    "never given": lambda me, other: Hold(1, 99),
    "another client's number": lambda me, other: Hold(1, 1),
    "of nobody": lambda me, other: Hold(99, 1),
}


@pytest.mark.parametrize("hold", FOREIGN.values(), ids=FOREIGN)
def test_a_write_that_names_no_lease_of_its_own_is_refused_and_takes_nothing_of_others(me, other, unit, hold):
    lease = other.lease(2)
    at = other.one(lease).offset
    refused(me.one(me.written_at(at, hold(me, other), {1: 1}, PAGE)), "never given")
    refused(me.one(Write(indexes_of([1]), [part(at, PAGE)])), "not mapped here")
    assert of_arena(unit) == (2, 2, 0)
    assert other.one(other.written_at(at, lease.hold, {2: 2}, PAGE)) == Written()


def test_a_lease_is_good_for_one_write(me, unit):
    lease = me.lease(2)
    at = me.one(lease).offset
    assert me.one(me.written_at(at, lease.hold, {1: 1}, PAGE)) == Written()
    refused(me.one(me.written_at(at + PAGE, lease.hold, {2: 2}, PAGE)), "never given")
    assert of_arena(unit) == (1, 0, 0)


def test_what_a_refused_write_leased_is_free_again_without_a_word(me, unit):
    me.put({1: 1})
    assert me.put({1: 2}, absent=True, number=1) == Present()
    assert (of_arena(unit), me.values([1])) == ((1, 0, 0), {1: 1})


def test_an_overwrite_frees_what_it_replaces(me, unit):
    me.put({1: 1, 2: 2}, 2 * PAGE)
    me.put({1: 3, 2: 4}, 2 * PAGE)
    assert (of_arena(unit), me.values([1, 2])) == ((4, 0, 0), {1: 3, 2: 4})


# ---- a write by lease may leave room ----


def test_a_write_that_replaces_more_than_it_stores_lets_in_who_waits(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    lease = me.lease(1, [1])
    at = me.one(lease).offset
    assert other.ask(other.lease(5)) == []
    written, let_in = me.ask(me.written_at(at, lease.hold, {1: 2}, PAGE))
    assert (written[2], let_in[0], of_arena(unit)) == (Written(), "client 2", (6, 5, 0))


def test_a_write_that_uses_less_than_its_lease_lets_in_who_waits(me, other, unit):
    lease = me.lease(9)
    at = me.one(lease).offset
    assert other.ask(other.lease(5)) == []
    written, let_in = me.ask(me.written_at(at, lease.hold, {1: 2}, PAGE))
    assert (written[2], let_in[0], of_arena(unit)) == (Written(), "client 2", (6, 5, 0))


def test_a_write_that_comes_to_nothing_lets_in_who_waits(me, other, unit):
    me.put({1: 1})
    lease = me.lease(8)
    at = me.one(lease).offset
    assert other.ask(other.lease(5)) == []
    present, let_in = me.ask(me.written_at(at, lease.hold, {1: 2}, PAGE, absent=True))
    assert (present[2], let_in[0], of_arena(unit)) == (Present(), "client 2", (6, 5, 0))


def test_a_write_that_is_refused_lets_in_who_waits(me, other, unit):
    lease = me.lease(9)
    at = me.one(lease).offset
    assert other.ask(other.lease(5)) == []
    failed, let_in = me.ask(Write(indexes_of([1]), [part(at + 1, PAGE)], lease=lease.hold))
    refused(failed[2], "not within what is left of its lease")
    assert (let_in[0], of_arena(unit)) == ("client 2", (5, 5, 0))


# ---- leases ahead ----


def put_with_ahead(guest: Guest, values: dict[int, int], ahead_pages: int, now: float = 0.0) -> tuple[Hold, int]:
    hold = guest.hold()
    return hold, guest.put(values, now=now, ahead=hold, ahead_nbytes=ahead_pages * PAGE).ahead


def test_memory_is_leased_ahead_where_there_is_room_and_a_write_may_use_it(me, unit):
    hold, at = put_with_ahead(me, {1: 1}, 3)
    assert of_arena(unit) == (4, 3, 0)
    me.begin(hold)
    assert me.one(me.written_at(at, hold, {2: 2}, 2 * PAGE)) == Written()
    assert (of_arena(unit), me.values([1]), me.values([2])) == ((3, 0, 0), {1: 1}, {2: 2})


def test_memory_is_not_leased_ahead_where_there_is_no_room(me, unit):
    assert put_with_ahead(me, {1: 1, 2: 2}, 9)[1] == -1
    assert of_arena(unit) == (2, 0, 0)
    small = Guest(unit_of_pages(None, arena_pages=4), 1)
    assert put_with_ahead(small, {1: 1}, 4)[1] == -1


def test_memory_is_not_leased_ahead_while_somebody_waits(me, other, unit):
    me.put({1: 1}, 5 * PAGE)
    lease = me.lease(1)
    at = me.one(lease).offset
    other.ask(other.lease(6))
    ahead = me.hold()
    write = me.written_at(at, lease.hold, {2: 2}, PAGE, ahead=ahead, ahead_nbytes=PAGE)
    assert (me.one(write), of_arena(unit)) == (Written(-1), (6, 0, 0))


def test_memory_is_not_leased_ahead_for_who_let_go_of_it_or_left(me, other, unit):
    hold = me.hold()
    me.let_go(hold)
    assert me.put({1: 1}, ahead=hold, ahead_nbytes=PAGE) == Written(-1)
    other.die()
    assert me.put({2: 2}, ahead=Hold(2, 1), ahead_nbytes=PAGE) == Written(-1)
    assert of_arena(unit) == (2, 0, 0)


def test_a_lease_ahead_that_nobody_used_goes_to_who_waits_and_its_late_write_is_refused(me, other, unit):
    hold, at = put_with_ahead(me, {1: 1}, 8, now=100.0)
    assert other.ask(other.lease(8), now=100.0) == []
    answers, looks = [], 0
    while not answers:
        now = unit.next_deadline()
        assert 101.0 < now < 105.0
        answers, looks = told(unit.expire(now)), looks + 1
    ((name, _, leased),) = answers
    assert (name, leased.offset >= 0, looks) == ("client 2", True, 2)
    me.begin(hold)
    refused(me.one(me.written_at(at, hold, {2: 2}, PAGE), now=103.0), "never given")
    assert of_arena(unit) == (9, 8, 0)


def test_a_lease_ahead_that_was_begun_does_not_expire(me, unit):
    hold, at = put_with_ahead(me, {1: 1}, 2, now=100.0)
    unit.expire(unit.next_deadline())
    me.begin(hold, now=102.2)
    for now in (102.5, 110.0):
        unit.expire(now)
    assert me.one(me.written_at(at, hold, {2: 2}, PAGE)) == Written()


# ---- the end of a client ----


def test_with_a_client_go_its_leases_and_what_it_waits_for_and_the_next_is_let_in(me, other, unit):
    put_with_ahead(me, {1: 1}, 3)
    me.one(me.lease(4))
    me.ask(me.lease(5))
    other.ask(other.lease(6))
    ((name, _, leased),) = me.die()
    assert (name, leased.offset >= 0) == ("client 2", True)
    assert (of_arena(unit), unit.stats().parked, unit.stats().attached) == ((7, 6, 0), 0, 1)


def test_who_has_left_is_answered_in_frames_and_writes_in_frames(me, unit):
    me.put({1: 1})
    pin = me.hold()
    me.die()
    assert me.one(me.lease(1)) == Leased(-1)
    answer, (piece,) = me.read([1], pin)
    assert (answer.pinned, piece.data.tobytes(), of_arena(unit)) == (False, b"\x01" * PAGE, (1, 0, 0))
    assert me.put_frame({2: 2}, 10) == Written()
