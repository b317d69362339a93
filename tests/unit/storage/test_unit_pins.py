# SPDX-License-Identifier: Apache-2.0
"""StorageUnit with an arena: what a reader pinned stays as it is, and is recycled as soon as nothing refers to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.storage.arena_kit import PAGE, ArenaClient, ArenaUnit, bytes_of, is_written, of_arena


@pytest.fixture
def unit() -> ArenaUnit:
    return ArenaUnit()


@pytest.fixture
def me(unit) -> ArenaClient:
    return ArenaClient(unit, "me")


@pytest.fixture
def writer(unit) -> ArenaClient:
    return ArenaClient(unit, "writer")


def pinned(client: ArenaClient, indexes: list[int]) -> tuple[int, list[Any]]:
    """(call, what it pinned)"""
    answer, wires = client.read(indexes)
    assert answer.pinned
    return answer.id, wires


def row(value: int, nbytes: int = PAGE) -> bytes:
    return bytes([value]) * nbytes


CHANGES = {
    "cleared": (lambda writer: writer.delete(1, 2, 3, 4), 4),
    "overwritten": (lambda writer: writer.put({1: 91, 2: 92, 3: 93, 4: 94}), 4),
    "compacted": (lambda writer: writer.delete(1, 2, 3), 4),
    "partly overwritten": (lambda writer: writer.put({2: 92, 3: 93}), 4),
}


@pytest.mark.parametrize(("change", "freed_pages"), CHANGES.values(), ids=CHANGES)
def test_pinned_bytes_stay_while_the_sample_changes_and_are_recycled_after(me, writer, unit, change, freed_pages):
    writer.put({1: 1, 2: 2, 3: 3, 4: 4})
    pin, (wire,) = pinned(me, [1, 2, 3, 4])
    change(writer)
    for n in range(10):  # whatever is free gets used
        writer.put({100 + n: 200}, 3 * PAGE)
    assert bytes_of(wire) == b"".join(map(row, (1, 2, 3, 4)))
    before = of_arena(unit)
    me.release(pin)
    assert of_arena(unit) == (before[0] - freed_pages, 0, 0)


def test_a_pin_counts_nothing_while_the_block_is_stored_anyway(me, writer, unit):
    writer.put({1: 1, 2: 2})
    pin, _ = pinned(me, [2])
    assert of_arena(unit) == (2, 0, 1)
    me.release(pin)
    assert of_arena(unit) == (2, 0, 0)


def test_rows_are_pinned_where_they_lie_in_any_order_and_repeated(me, writer, unit):
    writer.put({n: n for n in range(8)}, 100)
    for order in ([0, 1, 2], [7, 3, 3, 0], [5], list(range(7, -1, -1))):
        pin, (wire,) = pinned(me, order)
        assert bytes_of(wire) == b"".join(row(n, 100) for n in order)
        me.release(pin)
    assert of_arena(unit) == (1, 0, 0)


def test_two_readers_hold_the_same_block_each_on_its_own(me, writer, unit):
    writer.put({1: 1})
    mine, (wire,) = pinned(me, [1])
    theirs, _ = pinned(writer, [1])
    writer.delete(1)
    writer.release(theirs)
    assert (of_arena(unit), bytes_of(wire)) == ((1, 0, 1), row(1))
    me.release(mine)
    assert of_arena(unit) == (0, 0, 0)


def test_pins_end_with_their_session(me, writer, unit):
    writer.put({1: 1})
    pinned(me, [1])
    pinned(me, [1])
    writer.delete(1)
    assert of_arena(unit) == (1, 0, 2)
    me.end()
    assert of_arena(unit) == (0, 0, 0)


def test_a_read_that_was_cancelled_pins_nothing_any_more(me, writer, unit):
    writer.put({1: 1})
    pin, _ = pinned(me, [1])
    assert (me.cancel(pin), of_arena(unit)) == ([], (1, 0, 0))


def test_a_client_without_a_mapping_is_answered_in_frames(me, writer, unit):
    writer.put({1: 1})
    answer, (wire,) = me.read([1], mapped=False)
    assert (answer.pinned, bytes_of(wire), of_arena(unit)) == (False, row(1), (1, 0, 0))


def test_a_read_that_fails_pins_nothing(me, writer, unit):
    writer.put({1: 1})
    assert me.refusal_of_read([1, 2]) == "StorageKeyNotFoundError"
    assert of_arena(unit) == (1, 0, 0)


def test_an_answer_in_frames_keeps_its_memory_until_it_is_sent(me, writer, unit):
    writer.put({1: 1})
    answer = me.unsent_read([1])
    writer.delete(1)
    writer.put({2: 2})
    assert (bytes(memoryview(answer.frames[0])), of_arena(unit)) == (row(1), (2, 0, 0))
    del answer
    assert of_arena(unit) == (1, 0, 0)


class UnitMachine(RuleBasedStateMachine):
    """Two clients lease, write, cancel, read, delete and end in any order; no memory changes under its user."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ArenaUnit(None, arena_pages=128)
        self.clients = {name: ArenaClient(self.unit, name) for name in ("c1", "c2")}
        self.stored: dict[int, int] = {}
        self.leases: list[tuple[str, int, int, int, int]] = []  # client, call, offset, pages, what fills it
        self.written: list[tuple[str, int, dict[int, int]]] = []  # client, call, values: not committed yet
        self.pins: list[tuple[str, int, list[Any], list[bytes]]] = []
        self.filler = 0
        self.next_client = 3

    numbers = st.integers(0, 1)
    indexes = st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True)

    def client(self, number: int) -> ArenaClient:
        return list(self.clients.values())[number]

    @rule(number=numbers, pages=st.integers(1, 6))
    def lease(self, number: int, pages: int) -> None:
        client = self.client(number)
        lease = client.lease(pages)
        answer = client.one(lease)
        if answer.offset >= 0:
            self.filler = self.filler % 250 + 1
            client.view(answer.offset, pages * PAGE)[:] = self.filler
            self.leases.append((client.name, lease.id, answer.offset, pages, self.filler))

    @rule(data=st.data(), indexes=indexes, nbytes=st.sampled_from([10, 700, PAGE, PAGE + 1]), commit=st.booleans())
    @precondition(lambda self: self.leases)
    def write(self, data: st.DataObject, indexes: list[int], nbytes: int, commit: bool) -> None:
        name, lease, offset, pages, value = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        nbytes = min(nbytes, pages * PAGE)
        values = dict.fromkeys(indexes[: pages * PAGE // nbytes], value)
        write = self.clients[name].written_at(offset, lease, values, nbytes)
        assert is_written(self.clients[name].one(write))
        if commit:
            self.clients[name].commit(write.id)
            self.stored.update(values)
        else:
            self.written.append((name, write.id, values))

    @rule(data=st.data())
    @precondition(lambda self: self.written)
    def commit(self, data: st.DataObject) -> None:
        name, call, values = self.written.pop(data.draw(st.integers(0, len(self.written) - 1)))
        self.clients[name].commit(call)
        self.stored.update(values)

    @rule(data=st.data())
    @precondition(lambda self: self.written)
    def abort(self, data: st.DataObject) -> None:
        name, call, _ = self.written.pop(data.draw(st.integers(0, len(self.written) - 1)))
        self.clients[name].cancel(call)

    @rule(data=st.data())
    @precondition(lambda self: self.leases)
    def release_lease(self, data: st.DataObject) -> None:
        name, call, *_ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.clients[name].release(call)

    @rule(number=numbers, data=st.data())
    @precondition(lambda self: self.stored)
    def read(self, number: int, data: st.DataObject) -> None:
        client, wanted = self.client(number), data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1))
        answer, wires = client.read(wanted)
        pinned = wires if answer.pinned else []
        self.pins.append((client.name, answer.id, pinned, [bytes_of(wire) for wire in wires]))

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def release_pin(self, data: st.DataObject) -> None:
        name, call, *_ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.clients[name].release(call)

    @rule(number=numbers, indexes=indexes)
    def delete(self, number: int, indexes: list[int]) -> None:
        self.client(number).delete(*indexes)
        for index in indexes:
            self.stored.pop(index, None)
            for *_, values in self.written:
                values.pop(index, None)

    @rule(number=numbers, published=st.integers(0, 3))
    def end(self, number: int, published: int) -> None:
        client = self.client(number)
        own = [(call, values) for name, call, values in self.written if name == client.name]
        client.end()
        client.end_session(client.name, [call for call, _ in own[:published]])
        for _, values in own[:published]:
            self.stored.update(values)
        self.written = [write for write in self.written if write[0] != client.name]
        del self.clients[client.name]
        self.leases = [lease for lease in self.leases if lease[0] != client.name]
        self.pins = [pin for pin in self.pins if pin[0] != client.name]
        name = f"c{self.next_client}"
        self.clients[name] = ArenaClient(self.unit, name)
        self.next_client += 1

    @invariant()
    def leases_and_pins_are_as_their_owners_left_them(self) -> None:
        for name, _, offset, pages, value in self.leases:
            assert (self.clients[name].view(offset, pages * PAGE) == value).all()
        for *_, wires, before in self.pins:
            assert [bytes_of(wire) for wire in wires] == before[: len(wires)]

    @invariant()
    def what_is_committed_can_be_read(self) -> None:
        assert self.client(0).values(sorted(self.stored)) == dict(sorted(self.stored.items()))

    @invariant()
    def the_numbers_agree(self) -> None:
        pages = sum(lease[3] for lease in self.leases)
        stats = self.unit.stats()
        assert (stats.leased_nbytes, stats.values) == (pages * PAGE, len(self.stored))
        assert stats.pins == sum(1 for *_, wires, _ in self.pins if wires)
        assert (stats.uncommitted_nbytes > 0) >= any(values for *_, values in self.written)

    def teardown(self) -> None:
        for client in self.clients.values():
            client.end()
            client.end_session(client.name)
        ArenaClient(self.unit, "last").delete(*range(8))
        assert (of_arena(self.unit), self.unit.stats().uncommitted_nbytes) == ((0, 0, 0), 0)


UnitMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, print_blob=True)
TestNoMemoryChangesUnderItsUser = UnitMachine.TestCase
