# SPDX-License-Identifier: Apache-2.0
"""StorageUnit with an arena: leases wait for room, are cut up by their write, and are never lost."""

from __future__ import annotations

import pytest

from tests.unit.storage.arena_kit import PAGE, ArenaClient, ArenaUnit, is_lease, is_written, of_arena, refused


@pytest.fixture
def unit() -> ArenaUnit:
    return ArenaUnit(pages=10)


@pytest.fixture
def me(unit) -> ArenaClient:
    return ArenaClient(unit, "me")


@pytest.fixture
def other(unit) -> ArenaClient:
    return ArenaClient(unit, "other")


# ---- leases wait for room ----


def test_a_lease_is_answered_at_once_where_there_is_room_and_counts_as_taken(me, unit):
    leased = me.one(me.lease(4))
    assert (leased.offset % PAGE, of_arena(unit)) == (0, (4, 4, 0))


def test_the_same_call_again_gets_the_same_memory(me, unit):
    lease = me.lease(4)
    assert me.one(lease) == me.one(lease)
    assert of_arena(unit) == (4, 4, 0)


def test_leases_without_room_are_let_in_by_deletes_in_the_order_they_came(me, other, unit):
    me.put({1: 1, 2: 2}, 3 * PAGE)
    me.put({3: 3}, 3 * PAGE)
    large, small = me.lease(4), other.lease(4)
    assert (me.ask(large), other.ask(small)) == ([], [])
    assert (unit.stats().parked, unit.stats().parked_nbytes) == (2, 8 * PAGE)
    (deleted, first, second) = me.delete(1, 2, 3)
    assert (type(deleted.reply).__name__, is_lease(first, "me"), is_lease(second, "other")) == ("Done", True, True)
    assert first.reply.offset != second.reply.offset
    assert of_arena(unit) == (8, 8, 0)


def test_a_small_lease_overtakes_a_large_one_that_waits_but_not_again_and_again(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    assert me.ask(me.lease(3)) == []
    assert is_lease(other.ask(other.lease(2))[0], "other")
    other.release(1)
    assert other.ask(other.lease(2)) == [], "4 pages would have overtaken a lease of 3"


def test_a_lease_that_was_released_lets_in_the_next(me, other, unit):
    call, _ = me.leased(8)
    assert other.ask(other.lease(8)) == []
    (let_in,) = me.release(call)
    assert (is_lease(let_in, "other"), of_arena(unit)) == (True, (8, 8, 0))


def test_a_lease_that_waited_too_long_fails_and_lets_the_next_one_in(me, other, unit):
    me.put({1: 1}, 6 * PAGE)
    me.ask(me.lease(5, wait_s=5.0))
    overtaking, _ = other.leased(4)
    other.release(overtaking)
    assert other.ask(other.lease(3)) == [], "it would be the second to overtake"
    assert unit.expire(4.9) == []
    late, let_in = unit.expire(5.0)
    refused(late.reply, "Storage capacity exceeded", "StorageFullError")
    assert (late.client, is_lease(let_in, "other"), unit.stats().parked) == ("me", True, 0)


def test_a_lease_that_fails_at_once_lets_in_those_that_waited_behind_others_too_late(me, other, unit):
    me.put({1: 1}, 6 * PAGE)
    me.ask(me.lease(5, wait_s=5.0))
    other.release(other.leased(4)[0])
    other.ask(other.lease(3))
    hasty = me.lease(6, wait_s=0.0)
    late, refusal, let_in = me.ask(hasty, now=5.0)
    refused(late.reply, "Storage capacity exceeded", "StorageFullError")
    refused(refusal.reply, "Storage capacity exceeded", "StorageFullError")
    assert (refusal.reply.id, is_lease(let_in, "other"), unit.stats().parked) == (hasty.id, True, 0)


def test_a_lease_that_can_never_fit_is_refused_at_once(me, unit):
    refused(me.one(me.lease(11)), "can never fit", "StorageFullError")
    assert of_arena(unit) == (0, 0, 0)


def test_a_lease_that_was_cancelled_while_it_waited_is_never_given_and_holds_up_nobody(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    lease = me.lease(10)
    me.ask(lease)
    assert is_lease(other.ask(other.lease(2))[0], "other")
    assert other.ask(other.lease(9)) == []
    assert me.cancel(lease.id) == []
    me.delete(1)
    assert (unit.stats().parked, of_arena(unit)) == (1, (2, 2, 0))
    (let_in,) = other.release(1)
    assert is_lease(let_in, "other")


def test_a_lease_that_was_cancelled_after_its_answer_is_free_again(me, unit):
    call, _ = me.leased(4)
    assert (me.cancel(call), of_arena(unit)) == ([], (0, 0, 0))


def test_where_the_arena_has_no_such_range_the_answer_says_so():
    small = ArenaClient(ArenaUnit(None, arena_pages=8), "me")
    assert small.one(small.lease(9)).offset == -1
    assert small.one(small.lease(8)).offset == 0


def test_a_unit_without_an_arena_leases_nothing():
    plain = ArenaClient(ArenaUnit(), "me").of_a_unit_without_an_arena()
    assert plain.one(plain.lease(4)).offset == -1


# ---- a write cuts its parts out of its lease ----


def test_a_lease_is_cut_up_by_its_write_and_the_rest_of_it_is_free_again(me, unit):
    lease, at = me.leased(9)
    me.view(at, 9 * PAGE)[:] = 0
    me.view(at, 10)[:] = 5
    me.view(at + 4 * PAGE, PAGE + 1)[:] = 6
    me.commit(me.write_row(7, {"b": (at + 4 * PAGE, PAGE + 1), "a": (at, 10)}, lease))
    assert (of_arena(unit), unit.stats().held_nbytes) == ((3, 0, 0), PAGE + 11)
    assert me.values([7]) == {7: 5}
    me.delete(7)
    assert of_arena(unit) == (0, 0, 0)


@pytest.mark.parametrize("number", [99, 1], ids=["never given", "another client's number"])
def test_a_write_that_names_no_lease_of_its_own_is_refused_and_takes_nothing_of_others(me, other, unit, number):
    lease, at = other.leased(2)
    refused(me.one(me.written_at(at, number, {1: 1}, PAGE)), "which this client does not hold")
    refused(me.one(me.written_at(at, None, {1: 1}, PAGE)), "not mapped here")
    assert of_arena(unit) == (2, 2, 0)
    assert is_written(other.one(other.written_at(at, lease, {2: 2}, PAGE)))


def test_a_lease_is_good_for_one_write(me, unit):
    lease, at = me.leased(2)
    me.one(me.written_at(at, lease, {1: 1}, PAGE))
    refused(me.one(me.written_at(at + PAGE, lease, {2: 2}, PAGE)), "which this client does not hold")
    assert of_arena(unit) == (1, 0, 0)


def test_an_overwrite_frees_what_it_replaces(me, unit):
    me.put({1: 1, 2: 2}, 2 * PAGE)
    me.put({1: 3, 2: 4}, 2 * PAGE)
    assert (of_arena(unit), me.values([1, 2])) == ((4, 0, 0), {1: 3, 2: 4})


# ---- a write by lease may leave room ----


def test_a_replacing_write_makes_room_when_it_is_committed_and_not_before(me, other, unit):
    me.put({1: 1}, 8 * PAGE)
    lease = me.lease(1, [1])
    at = me.one(lease).offset
    assert other.ask(other.lease(5)) == []
    write = me.written_at(at, lease.id, {1: 2}, PAGE)
    assert is_written(me.one(write))
    _, let_in = me.commit(write.id)
    assert (is_lease(let_in, "other"), of_arena(unit)) == (True, (6, 5, 0))


def test_a_write_that_uses_less_than_its_lease_lets_in_the_next(me, other, unit):
    lease, at = me.leased(9)
    assert other.ask(other.lease(5)) == []
    written, let_in = me.ask(me.written_at(at, lease, {1: 2}, PAGE))
    assert (is_written(written.reply), is_lease(let_in, "other"), of_arena(unit)) == (True, True, (6, 5, 0))


def test_a_write_that_is_refused_lets_in_the_next(me, other, unit):
    lease, at = me.leased(9)
    assert other.ask(other.lease(5)) == []
    failed, let_in = me.ask(me.written_at(at + 1, lease, {1: 1}, PAGE))
    refused(failed.reply, "not within what is left of its lease")
    assert (is_lease(let_in, "other"), of_arena(unit)) == (True, (5, 5, 0))


def test_a_delete_fails_the_leases_that_wait_to_write_the_deleted_samples(me, other, unit):
    me.put({1: 1, 2: 2}, 5 * PAGE)
    lease = other.lease(6, [1])
    assert other.ask(lease) == []
    deleted, failed = me.delete(1)
    assert (type(deleted.reply).__name__, failed.client) == ("Done", "other")
    refused(failed.reply, "were cleared meanwhile", "SampleClearedError")
    assert unit.stats().parked == 0


# ---- the end of a session ----


def test_with_a_session_end_its_leases_and_what_it_waits_for_and_the_next_is_let_in(me, other, unit):
    me.leased(3)
    me.leased(4)
    me.ask(me.lease(8))
    assert other.ask(other.lease(6)) == []
    (let_in,) = me.end()
    assert (is_lease(let_in, "other"), of_arena(unit), unit.stats().parked) == (True, (6, 6, 0), 0)
    assert unit.holders() == {"other": (1, 0)}


def test_what_a_session_stored_stays_after_its_end(me, other, unit):
    me.put({1: 1})
    me.end()
    assert other.values([1]) == {1: 1}
    other.delete(1)
    assert unit.stats().values == 0
