# SPDX-License-Identifier: Apache-2.0
"""StorageUnit: every request gets one answer; a write without room waits its turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transfer_queue.storage.pieces import Piece, dense_layout
from transfer_queue.storage.shm.field_blocks import STEP_NBYTES
from transfer_queue.storage.shm.messages import (
    Drop,
    Dropped,
    Failed,
    Read,
    Rows,
    Stats,
    TakeBack,
    Write,
    Written,
    decode_answer,
    encode,
    pack_indexes,
)
from transfer_queue.storage.shm.parts import Packer
from transfer_queue.storage.shm.unit import StorageUnit
from transfer_queue.transport.base import Envelope

KIB = 1024


class Asker:
    """Sends to one unit and notes the answers as (client, request id, answer)."""

    def __init__(self, unit: StorageUnit) -> None:
        self.unit = unit
        self.sent = 0

    def raw(self, header: bytes, frames: list = (), now: float = 0.0, client: str = "me") -> list:
        self.sent += 1
        views = [memoryview(frame).cast("B") for frame in frames]
        return told(self.unit.handle(Envelope(client, self.sent, b"r"), header, views, now))

    def write(
        self, index: int, kib: int, now: float = 0.0, wait_s: float = 10.0, client: str = "me", **more: Any
    ) -> list:
        piece = Piece(dense_layout("uint8", 1, (kib * KIB,)), 1, np.zeros(kib * KIB, np.uint8))
        return self.put([index], piece, now, wait_s, client, **more)

    def put(
        self, indexes, piece: Piece, now: float = 0.0, wait_s: float = 0.0, client: str = "me", **more: Any
    ) -> list:
        packer = Packer()
        packer.add("a", slice(0, piece.rows), piece)
        write = Write(pack_indexes(np.array(indexes)), packer.parts, packer.tables, wait_s, **more)
        return self.raw(encode(write), packer.frames, now, client)

    def drop(self, *indexes: int, now: float = 0.0) -> list:
        return self.raw(encode(Drop(pack_indexes(np.array(indexes)))), now=now)


def told(answers) -> list:
    return [(out.envelope.client, out.envelope.request_id, decode_answer(out.header)) for out in answers]


@pytest.fixture
def small() -> Asker:
    return Asker(StorageUnit("u0", capacity_bytes=100 * KIB))


def test_each_request_is_answered_once_with_its_own_envelope(small):
    assert small.write(1, 10) == [("me", 1, Written())]
    ((client, number, rows),) = small.raw(encode(Read(pack_indexes(np.array([1])), ["a"])))
    assert (client, number, type(rows), [part.field for part in rows.parts]) == ("me", 2, Rows, ["a"])
    assert small.drop(1, 2) == [("me", 3, Dropped(1))]


@pytest.mark.parametrize(
    ("header", "code", "fragment"),
    [
        (b"\xff\x00", "ProtocolError", "can't be decoded"),
        (encode(Write(b"123", [])), "ProtocolError", "whole number of int64"),
        (encode(Read(pack_indexes(np.array([4])), ["a"])), "StorageKeyNotFoundError", "field 'a' for sample 4"),
    ],
)
def test_a_bad_request_is_answered_and_the_unit_lives_on(small, header, code, fragment):
    ((_, number, failed),) = small.raw(header)
    assert (number, failed.code) == (1, code)
    assert fragment in failed.text
    assert small.write(1, 10) == [("me", 2, Written())]


def test_a_write_without_room_is_answered_by_the_drop_that_makes_room(small):
    small.write(1, 60)
    assert small.write(2, 60, now=1.0) == []
    assert small.unit.next_deadline() == 11.0
    assert small.drop(1, now=2.0) == [("me", 3, Dropped(1)), ("me", 2, Written())]
    assert small.unit.next_deadline() is None


def test_a_later_write_that_would_fit_does_not_overtake(small):
    small.write(1, 60)
    assert small.write(2, 60) == []
    assert small.write(3, 10) == []
    assert small.drop(1) == [("me", 4, Dropped(1)), ("me", 2, Written()), ("me", 3, Written())]


def test_a_write_that_waited_too_long_fails_with_numbers_and_lets_the_next_one_in(small):
    small.write(1, 60)
    small.write(2, 60, now=1.0, wait_s=4.0)
    small.write(3, 10, now=2.0)
    assert told(small.unit.expire(4.9)) == []
    (late, (_, number, answer)) = told(small.unit.expire(5.0))
    assert (late[:2], number, answer) == (("me", 2), 3, Written())
    assert late[2] == Failed(
        "StorageFullError",
        "Storage capacity exceeded: a put of 61440 bytes waited 4.0 s at storage unit 'u0', whose values take 61440 of "
        "102400 bytes. Clear consumed samples sooner, raise the capacity, or raise put_timeout_s.",
    )


def test_a_write_larger_than_the_unit_is_refused_at_once(small):
    ((_, _, failed),) = small.write(1, 101)
    assert (failed.code, failed.later) == ("StorageFullError", False)
    assert "can never fit storage unit 'u0' of 102400 bytes" in failed.text


def test_a_write_that_may_not_wait_fails_at_once(small):
    small.write(1, 60)
    ((_, _, failed),) = small.write(2, 60, wait_s=0.0)
    assert (failed.code, failed.later) == ("StorageFullError", True)


def test_an_overwrite_needs_room_only_for_what_it_adds(small):
    small.write(1, 60)
    assert small.write(1, 70) == [("me", 2, Written())]
    assert small.unit.stats().held_nbytes == 70 * KIB


def test_dead_rows_are_given_up_before_a_write_has_to_wait(small):
    piece = Piece(dense_layout("uint8", 1, (KIB,)), 90, np.zeros(90 * KIB, np.uint8))
    small.put(range(90), piece)
    small.drop(*range(0, 90, 3))
    assert small.unit.stats().held_nbytes == 90 * KIB
    assert small.write(100, 40) == [("me", 3, Written())]
    assert small.unit.stats().held_nbytes == 100 * KIB


def test_a_large_block_that_is_mostly_dead_is_moved_in_turns_of_its_own_with_requests_between():
    asker, kib = Asker(StorageUnit("u0")), 256
    numbers = np.repeat(np.arange(64, dtype=np.uint8), kib * KIB)
    asker.put(range(64), Piece(dense_layout("uint8", 1, (kib * KIB,)), 64, numbers))
    unit, kept, turns = asker.unit, [1, 30, *range(40, 64)], 0
    assert unit.next_deadline() is None
    asker.drop(*(index for index in range(64) if index not in kept))
    while (deadline := unit.next_deadline()) is not None:
        assert deadline <= 0.0, "at once"
        before = unit.stats().held_nbytes
        assert list(unit.expire(0.0)) == []
        assert unit.stats().held_nbytes - before <= STEP_NBYTES
        ((_, _, rows),) = asker.raw(encode(Read(pack_indexes(np.array(kept)), ["a"])))
        assert isinstance(rows, Rows)
        turns += 1
    assert turns >= len(kept) * kib * KIB / STEP_NBYTES
    assert unit.stats().held_nbytes == unit.stats().live_nbytes == len(kept) * kib * KIB


@pytest.fixture
def filled() -> Asker:
    """Full but for the dead rows of a large block: too few of them for it to be moved by itself."""
    asker, nbytes = Asker(StorageUnit("u0", capacity_bytes=64 * 256 * KIB)), 256 * KIB
    asker.put(range(64), Piece(dense_layout("uint8", 1, (nbytes,)), 64, np.zeros(64 * nbytes, np.uint8)))
    asker.drop(*range(16))
    assert asker.unit.next_deadline() is None
    return asker


def test_a_write_waits_while_dead_rows_of_a_large_block_are_given_up_in_turns(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    turns, answers = 0, []
    while not answers:
        assert filled.unit.next_deadline() == -np.inf
        ((_, _, dropped),) = filled.drop(1000)
        assert isinstance(dropped, Dropped)
        answers = told(filled.unit.expire(1.0))
        turns += 1
    assert answers == [("me", 3, Written())]
    assert turns >= 48 * 256 * KIB / STEP_NBYTES
    assert filled.unit.stats().held_nbytes == (48 * 256 + 2048) * KIB


def test_a_write_that_may_not_wait_has_them_given_up_at_once(filled):
    assert filled.write(100, 2048, wait_s=0.0) == [("me", 3, Written())]
    assert filled.unit.stats().held_nbytes == (48 * 256 + 2048) * KIB


def test_a_write_that_may_not_wait_any_longer_has_the_rest_given_up_at_once(filled):
    assert filled.write(100, 2048, wait_s=10.0) == []
    assert told(filled.unit.expire(1.0)) == []
    assert told(filled.unit.expire(10.0)) == [("me", 3, Written())]
    assert filled.unit.stats().held_nbytes == (48 * 256 + 2048) * KIB


def test_parked_writes_of_a_client_that_is_gone_are_forgotten(small):
    small.write(1, 60)
    small.write(2, 60, client="dead")
    small.write(3, 10)
    assert told(small.unit.client_gone("dead", 1.0)) == [("me", 3, Written())]
    assert small.drop(1, 2, 3) == [("me", 4, Dropped(2))]


GIVE_UPS = {
    "drop": lambda asker, attempts: asker.raw(encode(Drop(pack_indexes(np.array([99])), None, attempts))),
    "take back": lambda asker, attempts: asker.raw(encode(TakeBack("", 1, None, given_up=attempts))),
    "write": lambda asker, attempts: asker.write(99, 1, given_up=attempts),
}


@pytest.fixture(params=GIVE_UPS.values(), ids=GIVE_UPS)
def give_up(request):
    return request.param


def test_a_write_that_was_given_up_before_it_came_is_refused_once_and_no_other_client_s(small, give_up):
    assert len(give_up(small, [7, 9])) == 1
    ((_, _, failed),) = small.write(1, 10, attempt=7)
    assert (failed.code, "gave up before it came" in failed.text) == ("ProtocolError", True)
    assert small.write(2, 10, attempt=7, client="other")[0][2] == Written()
    assert small.write(3, 10, attempt=8)[0][2] == Written()
    ((_, _, missing),) = small.raw(encode(Read(pack_indexes(np.array([1])), ["a"])))
    assert missing.code == "StorageKeyNotFoundError"


def test_a_write_that_was_given_up_while_it_waits_is_forgotten_and_lets_in_the_next(small, give_up):
    small.write(1, 60)
    assert small.write(2, 60, attempt=7) == []
    assert small.write(3, 10, attempt=7, client="other") == []
    answers = give_up(small, [7])
    assert [(client, number) for client, number, _ in answers if client == "other"] == [("other", 3)]
    assert (small.unit.stats().parked, small.drop(2)[0][2]) == (0, Dropped(0))


def test_of_writes_that_were_given_up_the_latest_thousand_are_remembered(small):
    for attempt in range(1, 2001):
        small.raw(encode(Drop(pack_indexes(np.array([99])), None, [attempt])))
    refused = [
        attempt for attempt in range(1, 2001) if not isinstance(small.write(1, 1, attempt=attempt)[0][2], Written)
    ]
    assert refused == list(range(977, 2001))


def test_stats_tell_what_is_held_and_what_waits(small):
    small.write(1, 60)
    small.write(2, 60)
    ((_, _, stats),) = small.raw(encode(Stats()))
    assert (stats.unit, stats.samples, stats.values, stats.blocks) == ("u0", 1, 1, 1)
    assert (stats.live_nbytes, stats.held_nbytes, stats.capacity_bytes) == (60 * KIB, 60 * KIB, 100 * KIB)
    assert (stats.parked, stats.parked_nbytes) == (1, 60 * KIB)
