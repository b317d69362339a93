# SPDX-License-Identifier: Apache-2.0
"""StorageUnit: every request gets one answer; a write without room waits its turn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from unit_kit import LoneUnit, UnitReply

from transfer_queue.calls import Turn
from transfer_queue.protocol import Done, Failed, Reply, Request, pack_indexes
from transfer_queue.storage.messages import (
    AskUnitStats,
    ColumnHeader,
    Columns,
    Commit,
    Delete,
    Deleted,
    EndSession,
    Packer,
    Read,
    Rows,
    UnitStats,
    Write,
    Written,
)
from transfer_queue.storage.unit.field_blocks import STEP_NBYTES
from transfer_queue.storage.wire import WireColumn, dense_layout, ragged_layout

KIB = 1024


class Asker:
    """Sends to one unit; its calls are numbered from 1. Answers are (client, answer)."""

    def __init__(self, unit: LoneUnit) -> None:
        self.unit = unit
        self.calls = 0

    def number(self) -> int:
        self.calls += 1
        return self.calls

    def ask(self, request: Request, frames: list = (), now: float = 0.0, client: str = "me") -> list[tuple[str, Reply]]:
        views = [memoryview(frame).cast("B") for frame in frames]
        return answers(self.unit.handle(client, request, views, now))

    def write(
        self, index: int, kib: int, now: float = 0.0, wait_s: float = 10.0, client: str = "me", commit: bool = True
    ) -> list:
        wire = WireColumn(dense_layout("uint8", 1, (kib * KIB,)), 1, np.zeros(kib * KIB, np.uint8))
        return self.put([index], wire, now, wait_s, client, commit)

    def put(
        self, indexes, wire: WireColumn, now: float = 0.0, wait_s: float = 0.0, client: str = "me", commit: bool = True
    ) -> list:
        packer = Packer()
        packer.add("a", slice(0, wire.rows), wire)
        columns = Columns(packer.headers, packer.tables)
        write = Write(self.number(), pack_indexes(np.array(indexes)), columns, wait_s)
        replies = self.ask(write, packer.frames, now, client)
        if commit and (client, Written(write.id)) in replies:
            _, *let_in = self.ask(Commit(0, [write.id]), now=now, client=client)
            replies += let_in
        return replies

    def read(self, *indexes: int) -> Reply:
        ((_, answer),) = self.ask(Read(self.number(), pack_indexes(np.array(indexes)), ["a"]))
        return answer

    def delete(self, *indexes: int, now: float = 0.0) -> list:
        return self.ask(Delete(self.number(), pack_indexes(np.array(indexes))), now=now)


def answers(replies: list[UnitReply]) -> list[tuple[str, Reply]]:
    return [(client, reply) for client, reply, _ in replies]


@pytest.fixture
def small() -> Asker:
    return Asker(LoneUnit("u0", capacity_bytes=100 * KIB))


def test_each_request_is_answered_once_under_its_own_number(small):
    assert small.write(1, 10) == [("me", Written(1))]
    rows = small.read(1)
    assert (type(rows), rows.id, [part.field for part in rows.headers]) == (Rows, 2, ["a"])
    assert small.delete(1, 2) == [("me", Deleted(3, 1))]


@pytest.mark.parametrize(
    ("request_", "code", "fragment"),
    [
        (Write(1, b"123", Columns([])), "ProtocolError", "indexes are 8 bytes each"),
        (Read(1, b"123", ["a"]), "ProtocolError", "indexes are 8 bytes each"),
        (Read(1, pack_indexes(np.array([4])), ["a"]), "StorageKeyNotFoundError", "field 'a' for sample 4"),
    ],
)
def test_a_bad_request_is_answered_and_the_unit_lives_on(small, request_, code, fragment):
    ((_, failed),) = small.ask(request_)
    assert (type(failed), failed.id, failed.code) == (Failed, 1, code)
    assert fragment in failed.text
    assert small.write(1, 10) == [("me", Written(1))]


def test_a_malformed_write_fails_in_its_own_turn_although_it_would_have_to_wait(small):
    small.write(0, 80)
    columns = Columns([ColumnHeader("a", ragged_layout("uint8", 1, 1), 1)])
    broken = Write(small.number(), pack_indexes(np.array([1])), columns, 10.0)
    half_of_a_length = np.zeros(4, np.uint8)
    ((client, failed),) = small.ask(broken, [np.zeros(60 * KIB, np.uint8), half_of_a_length], client="other")
    assert (client, type(failed), failed.id, failed.code) == ("other", Failed, broken.id, "ProtocolError")
    assert small.delete(0) == [("me", Deleted(small.calls, 1))]


def test_a_write_without_room_is_answered_by_the_delete_that_makes_room(small):
    small.write(1, 60)
    assert small.write(2, 60, now=1.0) == []
    assert small.unit.next_deadline() == 11.0
    assert small.delete(1, now=2.0) == [("me", Deleted(3, 1)), ("me", Written(2))]
    assert small.unit.next_deadline() is None


def test_later_writes_that_fit_overtake_up_to_the_size_of_the_one_that_waits(small):
    small.write(1, 60)
    assert small.write(2, 50) == []
    assert small.write(3, 30) == [("me", Written(3))]
    small.delete(3)
    assert small.write(4, 30) == [], "60 KiB would have overtaken a write of 50"
    assert small.delete(1) == [("me", Deleted(6, 1)), ("me", Written(2)), ("me", Written(5))]


def test_a_write_that_waited_too_long_fails_with_numbers_and_lets_the_next_one_in(small):
    small.write(1, 60)
    small.write(2, 50, now=1.0, wait_s=4.0)
    small.write(3, 30)
    small.delete(3)
    small.write(4, 30, now=2.0)
    assert small.unit.expire(4.9) == []
    assert answers(small.unit.expire(5.0)) == [
        (
            "me",
            Failed(
                2,
                "StorageFullError",
                "Storage capacity exceeded: a put of 51200 bytes waited 4.0 s at storage unit 'u0', whose values take "
                "61440 of 102400 bytes. Clear consumed samples sooner, raise the capacity, or raise put_timeout_s.",
            ),
        ),
        ("me", Written(5)),
    ]


def test_a_write_larger_than_the_unit_is_refused_at_once(small):
    ((_, failed),) = small.write(1, 101)
    assert failed.code == "StorageFullError"
    assert "can never fit storage unit 'u0' of 102400 bytes" in failed.text


def test_a_write_that_may_not_wait_fails_at_once(small):
    small.write(1, 60)
    ((_, failed),) = small.write(2, 60, wait_s=0.0)
    assert (failed.code, "waited 0.0 s" in failed.text, small.unit.stats().parked) == ("StorageFullError", True, 0)


def test_an_overwrite_needs_room_only_for_what_it_adds(small):
    small.write(1, 60)
    assert small.write(1, 70) == [("me", Written(2))]
    assert small.unit.stats().held_nbytes == 70 * KIB


def test_dead_rows_are_freed_before_a_write_has_to_wait(small):
    wire = WireColumn(dense_layout("uint8", 1, (KIB,)), 90, np.zeros(90 * KIB, np.uint8))
    small.put(range(90), wire)
    small.delete(*range(0, 90, 3))
    assert small.unit.stats().held_nbytes == 90 * KIB
    assert small.write(100, 40) == [("me", Written(3))]
    assert small.unit.stats().held_nbytes == 100 * KIB


def short_turns() -> Turn:
    """Each has time for one step of long work."""
    return Turn(itertools.count(step=1.0).__next__)


def test_a_large_block_that_is_mostly_dead_is_moved_in_turns_of_its_own_with_requests_between():
    asker, kib = Asker(LoneUnit("u0")), 256
    asker.unit.calls.turn = short_turns()
    numbers = np.repeat(np.arange(64, dtype=np.uint8), kib * KIB)
    asker.put(range(64), WireColumn(dense_layout("uint8", 1, (kib * KIB,)), 64, numbers))
    unit, kept, turns = asker.unit, [1, 30, *range(40, 64)], 0
    assert unit.next_deadline() is None
    asker.delete(*(index for index in range(64) if index not in kept))
    while (deadline := unit.next_deadline()) is not None:
        assert deadline <= 0.0, "at once"
        before = unit.stats().held_nbytes
        assert unit.expire(0.0) == []
        assert unit.stats().held_nbytes - before <= STEP_NBYTES
        assert isinstance(asker.read(*kept), Rows)
        turns += 1
    assert turns >= len(kept) * kib * KIB / STEP_NBYTES
    assert unit.stats().held_nbytes == unit.stats().live_nbytes == len(kept) * kib * KIB


@pytest.fixture
def filled() -> Asker:
    """Full but for the dead rows of a large block: too few of them for it to be moved by itself."""
    asker, nbytes = Asker(LoneUnit("u0", capacity_bytes=64 * 256 * KIB)), 256 * KIB
    asker.unit.calls.turn = short_turns()
    asker.put(range(64), WireColumn(dense_layout("uint8", 1, (nbytes,)), 64, np.zeros(64 * nbytes, np.uint8)))
    asker.delete(*range(16))
    assert asker.unit.next_deadline() is None
    return asker


def taken(unit: LoneUnit) -> tuple[int, int]:
    """(bytes of stored values, bytes of uncommitted writes)"""
    return unit.stats().held_nbytes, unit.stats().uncommitted_nbytes


def test_a_write_waits_while_dead_rows_of_a_large_block_are_freed_in_turns(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    turns, found = 0, []
    while not found:
        assert filled.unit.next_deadline() == -np.inf
        ((_, deleted),) = filled.delete(1000)
        assert isinstance(deleted, Deleted)
        found = answers(filled.unit.expire(1.0))
        turns += 1
    assert found == [("me", Written(3))]
    assert turns >= 48 * 256 * KIB / STEP_NBYTES
    assert taken(filled.unit) == (48 * 256 * KIB, 2048 * KIB)


def test_for_a_write_that_may_not_wait_they_are_freed_at_once(filled):
    assert filled.write(100, 2048, wait_s=0.0) == [("me", Written(3))]
    assert filled.unit.stats().held_nbytes == (48 * 256 + 2048) * KIB


def test_for_a_write_that_may_not_wait_any_longer_the_rest_is_freed_at_once(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    assert filled.unit.expire(1.0) == []
    assert answers(filled.unit.expire(10.0)) == [("me", Written(3))]
    assert taken(filled.unit) == (48 * 256 * KIB, 2048 * KIB)


# ---- what ends a write that waits ----


def test_a_cancelled_write_waits_no_longer_and_lets_in_the_next(small):
    small.write(1, 60)
    assert small.write(2, 50) == []
    small.write(3, 30)
    small.delete(3)
    assert small.write(4, 30, client="other") == []
    assert answers(small.unit.cancel("other", 2, 1.0)) == [], "it is not a call of this client"
    assert answers(small.unit.cancel("me", 2, 1.0)) == [("other", Written(5))]
    assert (small.delete(2), small.unit.stats().parked) == ([("me", Deleted(6, 0))], 0)


def test_with_a_session_end_its_writes_that_wait(small):
    small.write(1, 60)
    small.write(2, 60, client="gone")
    small.write(3, 60)
    assert answers(small.unit.client_gone("gone", 1.0)) == []
    assert small.delete(1, 2) == [("me", Deleted(4, 1)), ("me", Written(3))]


def test_a_write_whose_samples_are_all_deleted_meanwhile_fails(small):
    small.write(1, 60)
    small.write(2, 60)
    (deleted, (client, failed)) = small.delete(2)
    assert (deleted, client, failed.id, failed.code) == (("me", Deleted(3, 0)), "me", 2, "SampleClearedError")
    assert small.unit.stats().parked == 0


# ---- uncommitted writes ----


def test_an_uncommitted_write_takes_room_until_it_is_cancelled(small):
    small.write(1, 60, commit=False)
    assert small.unit.stats().uncommitted_nbytes == 60 * KIB
    assert small.write(2, 60) == []
    assert answers(small.unit.cancel("me", 1, 0.0)) == [("me", Written(2))]
    assert taken(small.unit) == (0, 60 * KIB)


def test_nothing_is_taken_from_a_client_whose_session_was_ended_by_the_controller(small):
    assert small.ask(EndSession(1, "gone"), client="controller") == [("controller", Done(1))]
    ((_, failed),) = small.write(1, 10, client="gone")
    assert (failed.code, "client 'gone' has ended" in failed.text) == ("SessionEndedError", True)
    assert small.unit.stats().held_nbytes == 0


def test_the_end_of_a_session_lets_in_those_that_waited_for_its_uncommitted_writes(small):
    small.write(1, 60, client="gone", commit=False)
    assert small.write(2, 60) == []
    assert answers(small.unit.client_gone("gone", 0.0)) == [], "the controller says what becomes of them"
    assert small.ask(EndSession(7, "gone"), client="controller") == [("controller", Done(7)), ("me", Written(2))]


def test_stats_say_what_is_held_and_what_waits(small):
    small.write(1, 60)
    small.write(2, 20, commit=False)
    small.write(3, 60)
    assert small.ask(AskUnitStats(9)) == [
        (
            "me",
            UnitStats(9, "u0", 1, 1, 60 * KIB, 60 * KIB, 1, 100 * KIB, 1, 60 * KIB, uncommitted_nbytes=20 * KIB),
        )
    ]
