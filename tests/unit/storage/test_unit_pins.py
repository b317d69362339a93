# SPDX-License-Identifier: Apache-2.0
"""StorageUnit with an arena: what a reader pinned stays as it is, and is recycled as soon as nobody needs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transfer_queue.storage.simple.messages import Hold, Leased, Read, Written, encode
from transfer_queue.storage.simple.unit import StorageUnit

from tests.unit.storage.arena_kit import PAGE, Guest, of_arena, unit_of_pages
from transfer_queue.storage.pieces import Piece
from transfer_queue.transport.base import Envelope


@pytest.fixture
def unit() -> StorageUnit:
    return unit_of_pages()


@pytest.fixture
def me(unit) -> Guest:
    return Guest(unit, 1)


@pytest.fixture
def writer(unit) -> Guest:
    return Guest(unit, 2)


def bytes_of(piece: Piece) -> bytes:
    rows = np.arange(piece.rows) if piece.picks is None else piece.picks
    return piece.data.reshape(-1, piece.layout.row_nbytes)[rows].tobytes()


def pinned(guest: Guest, indexes: list[int]) -> tuple[Hold, list[Piece]]:
    pin = guest.hold()
    answer, pieces = guest.read(indexes, pin)
    assert answer.pinned
    return pin, pieces


def row(value: int, nbytes: int = PAGE) -> bytes:
    return bytes([value]) * nbytes


CHANGES = {
    "cleared": (lambda writer: writer.drop(1, 2, 3, 4), 4),
    "overwritten": (lambda writer: writer.put({1: 91, 2: 92, 3: 93, 4: 94}), 4),
    "compacted": (lambda writer: writer.drop(1, 2, 3), 4),
    "partly overwritten": (lambda writer: writer.put({2: 92, 3: 93}), 0),
}


@pytest.mark.parametrize(("change", "freed_pages"), CHANGES.values(), ids=CHANGES)
def test_pinned_bytes_stay_while_the_sample_changes_and_are_recycled_after(me, writer, unit, change, freed_pages):
    writer.put({1: 1, 2: 2, 3: 3, 4: 4})
    pin, (piece,) = pinned(me, [1, 2, 3, 4])
    change(writer)
    for n in range(10):  # whatever is free gets used
        writer.put({100 + n: 200}, 3 * PAGE)
    assert bytes_of(piece) == b"".join(map(row, (1, 2, 3, 4)))
    before = of_arena(unit)
    me.let_go(pin)
    assert of_arena(unit) == (before[0] - freed_pages, 0, 0)


def test_a_pin_counts_nothing_while_the_block_is_stored_anyway(me, writer, unit):
    writer.put({1: 1, 2: 2})
    pin, _ = pinned(me, [2])
    assert of_arena(unit) == (2, 0, 1)
    me.let_go(pin)
    assert of_arena(unit) == (2, 0, 0)


def test_rows_are_pinned_where_they_lie_in_any_order_and_repeated(me, writer, unit):
    writer.put({n: n for n in range(8)}, 100)
    for order in ([0, 1, 2], [7, 3, 3, 0], [5], list(range(7, -1, -1))):
        pin, (piece,) = pinned(me, order)
        assert bytes_of(piece) == b"".join(row(n, 100) for n in order)
        me.let_go(pin)
    assert of_arena(unit) == (1, 0, 0)


def test_two_readers_hold_the_same_block_each_on_its_own(me, writer, unit):
    writer.put({1: 1})
    mine, (piece,) = pinned(me, [1])
    theirs, _ = pinned(writer, [1])
    writer.drop(1)
    writer.let_go(theirs)
    assert (of_arena(unit), bytes_of(piece)) == ((1, 0, 1), row(1))
    me.let_go(mine)
    assert of_arena(unit) == (0, 0, 0)


def test_pins_of_a_client_fall_with_it(me, writer, unit):
    writer.put({1: 1})
    pinned(me, [1])
    pinned(me, [1])
    writer.drop(1)
    assert of_arena(unit) == (1, 0, 2)
    me.die()
    assert of_arena(unit) == (0, 0, 0)


def test_a_pin_that_was_let_go_before_the_read_is_answered_in_frames(me, writer, unit):
    writer.put({1: 1})
    pin = me.hold()
    me.let_go(pin)
    answer, (piece,) = me.read([1], pin)
    assert (answer.pinned, bytes_of(piece), of_arena(unit)) == (False, row(1), (1, 0, 0))


def test_a_read_that_fails_pins_nothing(me, writer, unit):
    writer.put({1: 1})
    assert me.one(Read(np.array([1, 2], np.int64).tobytes(), ["a"], me.hold())).code == "StorageKeyNotFoundError"
    assert of_arena(unit) == (1, 0, 0)


def test_an_answer_in_frames_keeps_its_memory_until_it_is_sent(me, writer, unit):
    writer.put({1: 1})
    request = encode(Read(np.array([1], np.int64).tobytes(), ["a"]))
    (answer,) = unit.handle(Envelope("me", 1, b""), request, [], 0.0)
    writer.drop(1)
    writer.put({2: 2})
    assert (bytes(memoryview(answer.frames[0])), of_arena(unit)) == (row(1), (2, 0, 0))
    del answer
    assert of_arena(unit) == (1, 0, 0)


class UnitMachine(RuleBasedStateMachine):
    """Two clients lease, write, give up, read, drop and die in any order; nobody's bytes change under him."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = unit_of_pages(None, arena_pages=128)
        self.guests = {n: Guest(self.unit, n) for n in (1, 2)}
        self.stored: dict[int, int] = {}
        self.leases: list[tuple[int, Hold, int, int, int]] = []  # guest, hold, offset, pages, what fills it
        self.pins: list[tuple[int, Hold, list[Piece], list[bytes]]] = []
        self.filler = 0
        self.next_guest = 3

    guests_numbers = st.integers(0, 1)
    indexes = st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True)

    def guest(self, number: int) -> Guest:
        return sorted(self.guests.items())[number][1]

    @rule(who=guests_numbers, pages=st.integers(1, 6))
    def lease(self, who: int, pages: int) -> None:
        guest = self.guest(who)
        lease = guest.lease(pages)
        answer = guest.one(lease)
        assert isinstance(answer, Leased)
        if answer.offset >= 0:
            self.filler = self.filler % 250 + 1
            guest.view(answer.offset, pages * PAGE)[:] = self.filler
            self.leases.append((guest.number, lease.hold, answer.offset, pages, self.filler))

    @rule(data=st.data(), indexes=indexes, nbytes=st.sampled_from([10, 700, PAGE, PAGE + 1]))
    @precondition(lambda self: self.leases)
    def write(self, data: st.DataObject, indexes: list[int], nbytes: int) -> None:
        number, hold, offset, pages, value = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        nbytes = min(nbytes, pages * PAGE)
        rows = indexes[: pages * PAGE // nbytes]
        write = self.guests[number].written_at(offset, hold, dict.fromkeys(rows, value), nbytes)
        assert self.guests[number].one(write) == Written()
        self.stored.update(dict.fromkeys(rows, value))

    @rule(data=st.data())
    @precondition(lambda self: self.leases)
    def give_up(self, data: st.DataObject) -> None:
        number, hold, *_ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.guests[number].let_go(hold)

    @rule(who=guests_numbers, data=st.data())
    @precondition(lambda self: self.stored)
    def read(self, who: int, data: st.DataObject) -> None:
        guest, wanted = self.guest(who), data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1))
        pin = guest.hold()
        answer, pieces = guest.read(wanted, pin)
        self.pins.append((guest.number, pin, pieces if answer.pinned else [], [bytes_of(piece) for piece in pieces]))

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def let_go(self, data: st.DataObject) -> None:
        number, pin, *_ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.guests[number].let_go(pin)

    @rule(who=guests_numbers, indexes=indexes)
    def drop(self, who: int, indexes: list[int]) -> None:
        self.guest(who).drop(*indexes)
        for index in indexes:
            self.stored.pop(index, None)

    @rule(who=guests_numbers)
    def die(self, who: int) -> None:
        guest = self.guest(who)
        guest.die()
        del self.guests[guest.number]
        self.leases = [lease for lease in self.leases if lease[0] != guest.number]
        self.pins = [pin for pin in self.pins if pin[0] != guest.number]
        self.guests[self.next_guest] = Guest(self.unit, self.next_guest)
        self.next_guest += 1

    @invariant()
    def leases_and_pins_are_as_their_owners_left_them(self) -> None:
        for number, _, offset, pages, value in self.leases:
            assert (self.guests[number].view(offset, pages * PAGE) == value).all()
        for *_, pieces, before in self.pins:
            assert [bytes_of(piece) for piece in pieces] == before[: len(pieces)]

    @invariant()
    def what_is_stored_can_be_read(self) -> None:
        assert self.guest(0).values(sorted(self.stored)) == dict(sorted(self.stored.items()))

    @invariant()
    def the_books_agree(self) -> None:
        pages = sum(lease[3] for lease in self.leases)
        stats = self.unit.stats()
        assert (stats.leased_nbytes, stats.values) == (pages * PAGE, len(self.stored))
        assert stats.pins == sum(1 for *_, pieces, _ in self.pins if pieces)

    def teardown(self) -> None:
        for guest in self.guests.values():
            guest.die()
        Guest(self.unit, 99).drop(*range(8))
        assert of_arena(self.unit) == (0, 0, 0)


UnitMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, print_blob=True)
TestNobodysMemoryChangesUnderHim = UnitMachine.TestCase
