# SPDX-License-Identifier: Apache-2.0
"""StorageUnit: every request gets one answer; a write without room waits its turn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.storage.unit_kit import Asker, answers
from transfer_queue import protocol as p

KIB = 1024
STEP_NBYTES = 2048 * KIB
"""Of one step of long work."""


@pytest.fixture
def small() -> Asker:
    return Asker(capacity_bytes=100 * KIB)


def test_each_request_is_answered_once_under_its_own_number(small):
    assert small.write(1, 10) == [("me", "written 1")]
    assert (small.has(1), small.calls) == (True, 2)
    assert small.delete(1, 2) == [("me", "done 3")]


def test_a_write_without_room_is_answered_by_the_delete_that_makes_room(small):
    small.write(1, 60)
    assert small.write(2, 60, now=1.0) == []
    assert small.unit.next_deadline() == 11.0
    assert small.delete(1, now=2.0) == [("me", "done 3"), ("me", "written 2")]
    assert small.unit.next_deadline() is None


def test_later_writes_that_fit_overtake_up_to_the_size_of_the_one_that_waits(small):
    small.write(1, 60)
    assert small.write(2, 50) == []
    assert small.write(3, 30) == [("me", "written 3")]
    small.delete(3)
    assert small.write(4, 30) == [], "60 KiB would have overtaken a write of 50"
    assert small.delete(1) == [("me", "done 6"), ("me", "written 2"), ("me", "written 5")]


def test_a_write_that_waited_too_long_fails_with_numbers_and_lets_the_next_one_in(small):
    small.write(1, 60)
    small.write(2, 50, now=1.0, wait_s=4.0)
    small.write(3, 30)
    small.delete(3)
    small.write(4, 30, now=2.0)
    text = (
        "Storage capacity exceeded: a put of me waited 4.0 s for room for 50 KiB: the values of storage unit 'u0' take "
        "60 KiB of 100 KiB. Clear consumed samples or partitions, raise memory, or raise put_timeout_s."
    )
    assert small.unit.expire(4.9) == []
    assert answers(small.unit.expire(5.0)) == [("me", p.Failed(2, "StorageFullError", text)), ("me", "written 5")]


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
    assert small.write(1, 70) == [("me", "written 2")]
    assert small.unit.stats().held_nbytes == 70 * KIB


def test_dead_rows_are_freed_before_a_write_has_to_wait(small):
    small.put(range(90), KIB)
    small.delete(*range(0, 90, 3))
    assert small.unit.stats().held_nbytes == 90 * KIB
    assert small.write(100, 40) == [("me", "written 3")]
    assert small.unit.stats().held_nbytes == 100 * KIB + 8  # and the size of a row, where rows differ


def test_a_large_block_that_is_mostly_dead_is_moved_in_turns_of_its_own_with_requests_between():
    asker, kib = Asker(), 256
    asker.in_short_turns()
    asker.put(range(64), kib * KIB)
    unit, kept, turns = asker.unit, [1, 30, *range(40, 64)], 0
    assert unit.next_deadline() is None
    asker.delete(*(index for index in range(64) if index not in kept))
    while (deadline := unit.next_deadline()) is not None:
        assert deadline <= 0.0, "at once"
        before = unit.stats().held_nbytes
        assert unit.expire(0.0) == []
        assert unit.stats().held_nbytes - before <= STEP_NBYTES
        assert asker.has(*kept)
        turns += 1
    assert turns >= len(kept) * kib * KIB / STEP_NBYTES
    assert unit.stats().held_nbytes == unit.stats().live_nbytes == len(kept) * kib * KIB


@pytest.fixture
def filled() -> Asker:
    """Full but for the dead rows of a large block: too few of them for it to be moved by itself."""
    asker = Asker(capacity_bytes=64 * 256 * KIB)
    asker.in_short_turns()
    asker.put(range(64), 256 * KIB)
    asker.delete(*range(16))
    assert asker.unit.next_deadline() is None
    return asker


def taken(unit: Any) -> tuple[int, int]:
    """(bytes of stored values, bytes of uncommitted writes)"""
    return unit.stats().held_nbytes, unit.stats().uncommitted_nbytes


def test_a_write_waits_while_dead_rows_of_a_large_block_are_freed_in_turns(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    turns, found = 0, []
    while not found:
        assert filled.unit.next_deadline() == -math.inf
        ((_, deleted),) = filled.delete(1000)
        assert deleted == f"done {filled.calls}"
        found = answers(filled.unit.expire(1.0))
        turns += 1
    assert found == [("me", "written 3")]
    assert turns >= 48 * 256 * KIB / STEP_NBYTES
    assert taken(filled.unit) == (48 * 256 * KIB, 2048 * KIB)


def test_for_a_write_that_may_not_wait_they_are_freed_at_once(filled):
    assert filled.write(100, 2048, wait_s=0.0) == [("me", "written 3")]
    assert filled.unit.stats().held_nbytes == (48 * 256 + 2048) * KIB


def test_for_a_write_that_may_not_wait_any_longer_the_rest_is_freed_at_once(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    assert filled.unit.expire(1.0) == []
    assert answers(filled.unit.expire(10.0)) == [("me", "written 3")]
    assert taken(filled.unit) == (48 * 256 * KIB, 2048 * KIB)


# ---- what ends a write that waits ----


def test_a_cancelled_write_waits_no_longer_and_lets_in_the_next(small):
    small.write(1, 60)
    assert small.write(2, 50) == []
    small.write(3, 30)
    small.delete(3)
    assert small.write(4, 30, client="other") == []
    assert answers(small.unit.cancel("other", 2, 1.0)) == [], "it is not a call of this client"
    assert answers(small.unit.cancel("me", 2, 1.0)) == [("other", "written 5")]
    assert (small.delete(2), small.unit.stats().parked) == ([("me", "done 6")], 0)


def test_with_a_session_end_its_writes_that_wait(small):
    small.write(1, 60)
    small.write(2, 60, client="gone")
    small.write(3, 60)
    assert answers(small.unit.client_gone("gone", 1.0)) == []
    assert small.delete(1, 2) == [("me", "done 4"), ("me", "written 3")]


def test_a_write_whose_samples_are_all_deleted_meanwhile_fails(small):
    small.write(1, 60)
    small.write(2, 60)
    (deleted, (client, failed)) = small.delete(2)
    assert (deleted, client, failed.id, failed.code) == (("me", "done 3"), "me", 2, "SampleClearedError")
    assert small.unit.stats().parked == 0


# ---- uncommitted writes ----


def test_an_uncommitted_write_takes_room_until_it_is_cancelled(small):
    small.write(1, 60, commit=False)
    assert small.unit.stats().uncommitted_nbytes == 60 * KIB
    assert small.write(2, 60) == []
    assert answers(small.unit.cancel("me", 1, 0.0)) == [("me", "written 2")]
    assert taken(small.unit) == (0, 60 * KIB)


def test_nothing_is_taken_from_a_client_whose_session_was_ended_by_the_controller(small):
    assert small.end_session("gone") == [("controller", "done 1")]
    ((_, failed),) = small.write(1, 10, client="gone")
    assert (failed.code, "client 'gone' has ended" in failed.text) == ("SessionEndedError", True)
    assert small.unit.stats().held_nbytes == 0


def test_the_end_of_a_session_lets_in_those_that_waited_for_its_uncommitted_writes(small):
    small.write(1, 60, client="gone", commit=False)
    assert small.write(2, 60) == []
    assert answers(small.unit.client_gone("gone", 0.0)) == [], "the controller says what becomes of them"
    assert small.end_session("gone") == [("controller", "done 3"), ("me", "written 2")]


def test_stats_say_what_is_held_and_what_waits(small):
    small.write(1, 60)
    small.write(2, 20, commit=False)
    small.write(3, 60)
    assert small.stats() == {
        "unit": "u0", "samples": 1, "values": 1, "live_nbytes": 60 * KIB, "held_nbytes": 60 * KIB, "blocks": 1,
        "capacity_bytes": 100 * KIB, "parked": 1, "parked_nbytes": 60 * KIB, "uncommitted_nbytes": 20 * KIB,
        "path": "undecided",
    }  # fmt: skip


# ---- samples that are cleared between a write's publish and its commit: it must not bring their values back ----

COMMITS = {
    "by the writer": lambda unit: unit.commit(1),
    "by the end of the writer's session": lambda unit: unit.end_session("me", 1),
    "by a reader": lambda unit: unit.has(3, published=[1]),
}


@pytest.mark.parametrize("commit", COMMITS.values(), ids=COMMITS)
def test_a_commit_stores_only_what_was_not_cleared_since(small, commit):
    small.put([1, 2, 3], KIB, commit=False)
    assert small.delete(1, 9) == [("me", "done 2")]
    assert small.delete(2) == [("me", "done 3")]
    commit(small)
    stats = small.unit.stats()
    assert (stats.samples, stats.live_nbytes, stats.uncommitted_nbytes) == (1, KIB, 0)


@pytest.mark.parametrize("clears", [[[1, 2, 3]], [[1], [3, 2]], [[1, 2], [2, 3]]])
def test_a_write_whose_samples_are_all_cleared_is_dropped_at_once(small, clears):
    small.put([1, 2, 3], KIB, commit=False)
    for indexes in clears:
        small.delete(*indexes)
    assert small.unit.stats().uncommitted_nbytes == 0
    small.commit(1)
    assert small.unit.stats().held_nbytes == 0
