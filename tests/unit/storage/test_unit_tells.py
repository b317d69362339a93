# SPDX-License-Identifier: Apache-2.0
"""StorageUnit: what a write says to the controller is handed on once its values are kept, and only then."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_queue.storage.simple.arena import Arena
from transfer_queue.storage.simple.messages import (
    Drop,
    Dropped,
    Forsake,
    Forsaken,
    Hold,
    OpenWrite,
    Part,
    Present,
    TakeBack,
    Write,
    Written,
)
from transfer_queue.storage.simple.unit import StorageUnit, Tell, Told

from tests.unit.storage.arena_kit import PAGE, Guest, indexes_of, refused, row_layout, told


class Controller:
    """Notes who told it what; ``look``: is done meanwhile, and what it returns noted, too."""

    def __init__(self, answer: bytes = b"published", done: bool = True) -> None:
        self.answer = Told(answer, done)
        self.told: list[tuple[str, bytes]] = []
        self.look: Any = None
        self.seen: list[Any] = []

    def __call__(self, client: str, message: bytes) -> Told:
        self.told.append((client, message))
        if self.look is not None:
            self.seen.append(self.look())
        return self.answer


def unit_with(tell: Tell | None, pages: int | None = None) -> StorageUnit:
    return StorageUnit("u0", None if pages is None else pages * PAGE, Arena(256 * PAGE), 0, tell)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def unit(controller) -> StorageUnit:
    return unit_with(controller)


@pytest.fixture
def small(controller) -> StorageUnit:
    """With room for ten pages."""
    return unit_with(controller, 10)


PATHS = {
    "leased": lambda guest, values, **more: guest.put(values, 300, **more),
    "inline": lambda guest, values, **more: guest.put_frame(values, 300, **more),
}


@pytest.fixture(params=PATHS.values(), ids=PATHS)
def put(request):
    return request.param


def framed(values: dict[int, int], pages: int, **more: Any) -> tuple[Write, list[bytes]]:
    """A write of rows of so many pages and its frame."""
    parts = [Part("a", row_layout(pages * PAGE), len(values))]
    return Write(indexes_of(values), parts, wait_s=10.0, **more), [bytes(pages * PAGE * len(values))]


def only(answers: list) -> list[tuple[str, Any]]:
    """(client, answer) without the numbers of the requests."""
    return [(client, answer) for client, _, answer in answers]


# ---- told when kept ----


def test_the_controller_is_told_once_in_the_client_s_name_when_the_values_can_be_read(unit, controller, put):
    me, reader = Guest(unit, 1, "me"), Guest(unit, 2, "reader")
    controller.look = lambda: reader.values([3, 4])
    assert put(me, {3: 30, 4: 40}, then=b"publish 3 and 4") == Written(-1, b"published")
    assert (controller.told, controller.seen) == ([("me", b"publish 3 and 4")], [{3: 30, 4: 40}])


def test_a_write_that_has_nothing_to_say_tells_nothing(unit, controller, put):
    assert put(Guest(unit, 1), {1: 1}) == Written()
    assert controller.told == []


def test_a_unit_far_from_the_controller_keeps_the_values_and_leaves_it_untold(put):
    me = Guest(unit_with(None), 1)
    assert put(me, {1: 1}, then=b"publish") == Written(-1, b"")
    assert me.values([1]) == {1: 1}


def test_a_refusal_is_told_to_the_client_as_it_is_and_the_values_stay_until_they_are_dropped(put):
    controller = Controller(b"refused: cleared", done=False)
    me = Guest(unit_with(controller), 1, "me")
    assert put(me, {1: 1}, then=b"publish") == Written(-1, b"refused: cleared")
    assert (me.values([1]), only(me.drop(1))) == ({1: 1}, [("me", Dropped(1))])


def test_each_write_of_a_client_is_told_in_the_order_they_came(unit, controller, put):
    me, other = Guest(unit, 1, "me"), Guest(unit, 2, "other")
    for n, guest in enumerate((me, other, me)):
        put(guest, {n: n}, then=b"%d" % n)
    assert controller.told == [("me", b"0"), ("other", b"1"), ("me", b"2")]


# ---- not told when not kept ----


def test_a_write_for_where_nothing_is_is_not_told_where_something_is(unit, controller, put):
    me = Guest(unit, 1, "me")
    assert put(me, {1: 1}, number=1, absent=True, then=b"first") == Written(-1, b"published")
    assert put(me, {1: 5, 2: 5}, number=2, absent=True, then=b"second") == Present()
    assert controller.told == [("me", b"first")]


def test_a_write_that_is_refused_is_not_told(small, controller):
    me, other = Guest(small, 1, "me"), Guest(small, 2, "other")
    refused(me.one(*framed({1: 1}, 11, then=b"a")), "can never fit", "StorageFullError")
    refused(me.one(Write(b"123", [], then=b"b")), "whole number of int64")
    nowhere = Write(indexes_of([1]), [Part("a", row_layout(9), 1, offset=0, nbytes=9)], lease=Hold(1, 77), then=b"c")
    refused(me.one(nowhere), "never given")
    other.one(Forsake("me"))
    refused(me.one(*framed({1: 1}, 1, then=b"d")), "taken for dead")
    assert (controller.told, small.stats().values) == ([], 0)


def test_a_write_that_was_given_up_before_it_came_is_not_told(small, controller):
    me = Guest(small, 1, "me")
    me.one(Drop(indexes_of([99]), None, [7]))
    refused(me.one(*framed({1: 1}, 1, attempt=7, then=b"publish")), "gave up before it came")
    assert controller.told == []


# ---- writes that wait for room ----


@pytest.fixture
def waiting(small) -> tuple[Guest, Guest]:
    """A guest whose write of 8 pages waits, and the one that holds 8 of 10 of them."""
    me, other = Guest(small, 1, "me"), Guest(small, 2, "other")
    other.put({1: 1}, 8 * PAGE)
    write, frames = framed({2: 2}, 8, attempt=7, then=b"publish 2")
    assert me.ask(write, frames) == []
    return me, other


def test_a_write_that_waits_is_told_when_it_is_let_in_and_in_its_own_client_s_name(waiting, controller, small):
    _, other = waiting
    assert controller.told == []
    controller.look = lambda: small.stats().values
    assert only(other.drop(1)) == [("other", Dropped(1)), ("me", Written(-1, b"published"))]
    assert (controller.told, controller.seen) == ([("me", b"publish 2")], [1])
    other.drop(2)
    assert len(controller.told) == 1, "once"


def test_those_that_are_let_in_together_are_told_in_the_order_they_came(waiting, controller):
    me, other = waiting
    assert other.ask(*framed({3: 3}, 1, then=b"publish 3")) == []
    assert me.ask(*framed({4: 4}, 1, then=b"publish 4")) == []
    let_in = only(other.drop(1))[1:]
    assert let_in == [(client, Written(-1, b"published")) for client in ("me", "other", "me")]
    assert controller.told == [("me", b"publish 2"), ("other", b"publish 3"), ("me", b"publish 4")]


def test_a_lease_that_waits_tells_nothing_and_its_write_does(small, controller):
    me, other = Guest(small, 1, "me"), Guest(small, 2, "other")
    other.put({1: 1}, 8 * PAGE)
    lease = me.lease(8, [2])
    assert me.ask(lease) == []
    leased = other.drop(1)[1][2]
    assert controller.told == []
    written = me.one(me.written_at(leased.offset, lease.hold, {2: 2}, 8 * PAGE, then=b"publish 2"))
    assert (written, controller.told) == (Written(-1, b"published"), [("me", b"publish 2")])


ENDS = {
    "its time is over": lambda unit, me, other: unit.expire(10.0),
    "its client gave it up": lambda unit, me, other: me.ask(Drop(indexes_of([99]), None, [7])),
    "its client took it back": lambda unit, me, other: me.ask(TakeBack("", 1, None, [7])),
    "its client is gone": lambda unit, me, other: unit.client_gone("me", 1.0),
    "its client was taken for dead": lambda unit, me, other: other.ask(Forsake("me")),
    "its samples were cleared": lambda unit, me, other: other.drop(2),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_write_that_waited_in_vain_is_never_told(waiting, controller, small, end):
    me, other = waiting
    end(small, me, other)
    assert small.stats().parked == 0
    assert only(other.drop(1)) == [("other", Dropped(1))]
    assert (controller.told, small.stats().values) == ([], 0)


def test_one_that_finds_a_value_when_it_is_let_in_is_not_told(waiting, controller):
    me, other = waiting
    assert other.ask(*framed({2: 9}, 1, number=1, absent=True, then=b"too late")) == []
    dropped, written, present = only(me.drop(1))
    assert (dropped, written) == (("me", Dropped(1)), ("me", Written(-1, b"published")))
    assert (present, controller.told) == (("other", Present()), [("me", b"publish 2")])


# ---- what was published is not taken back ----


def test_what_the_controller_published_is_not_taken_back_by_a_client_that_missed_the_answer(unit, put):
    me = Guest(unit, 1, "me")
    put(me, {1: 1}, number=1, absent=True, then=b"publish")
    assert me.one(TakeBack("", 1)) == Dropped(0)
    assert me.values([1]) == {1: 1}


def test_what_the_controller_refused_can_be_taken_back(put):
    unit = unit_with(Controller(b"refused", done=False))
    me = Guest(unit, 1, "me")
    put(me, {1: 1}, number=1, absent=True, then=b"publish")
    assert (me.one(TakeBack("", 1)), unit.stats().values) == (Dropped(1), 0)


def test_a_client_that_died_left_open_what_was_not_published(unit, controller, put):
    me, other = Guest(unit, 1, "me"), Guest(unit, 2, "other")
    put(me, {1: 1}, number=1, then=b"publish")
    controller.answer = Told(b"refused", False)
    put(me, {2: 2}, number=2, then=b"publish")
    put(me, {3: 3}, number=3)
    left = [OpenWrite(2, indexes_of([2]), ["a"]), OpenWrite(3, indexes_of([3]), ["a"])]
    assert other.one(Forsake("me")) == Forsaken(left)


def test_one_that_was_let_in_and_published_is_not_taken_back_either(small):
    me, other = Guest(small, 1, "me"), Guest(small, 2, "other")
    other.put({1: 1}, 8 * PAGE)
    assert me.ask(*framed({2: 2}, 8, number=1, absent=True, attempt=7, then=b"publish 2")) == []
    other.drop(1)
    assert told(small.expire(99.0)) == []
    assert me.one(TakeBack("", 1, None, [7])) == Dropped(0)
    assert small.stats().values == 1
