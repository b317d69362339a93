# SPDX-License-Identifier: Apache-2.0
"""A state that is read in slices is that of the moment of its freeze; one that is restored in slices is whole."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from control_kit import (
    ACTOR,
    INT,
    ROLLOUT,
    ack,
    ask,
    batch,
    cancel,
    chores,
    clear,
    clear_consumed,
    fetch,
    indexes,
    put,
    refused,
    register,
    reserve,
    seal,
    send,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import protocol as p
from transfer_queue.control import saved as control_saved
from transfer_queue.control import snapshot
from transfer_queue.control import state as control_state
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.saved import SavedQueue, decode, encoded_parts, joined, merge, split
from transfer_queue.control.snapshot import Snapshot
from transfer_queue.control.state import PlaneConfig
from transfer_queue.errors import CheckpointError

SAVER = "saver"
PARTITIONS = ["p", "q"]
KEYS = [f"key {number}" for number in range(12)]


@pytest.fixture(autouse=True, scope="module")
def small_slices() -> Any:
    """Slices of four rows and two batches, so that small queues have many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (control_saved, snapshot):
            patch.setattr(module, "ROWS", 4)
            patch.setattr(module, "BATCHES", 2)
        patch.setattr(control_saved, "_PARTITION", 1)
        yield


def at_once(plane: ControlPlane, now: float = 0.0) -> SavedQueue:
    """The whole state as it is now."""
    taken = Snapshot(plane.state, now)
    parts = [taken.part(number) for number in range(taken.num_parts)]
    taken.close()
    return decode(joined(parts))


class Clients:
    """Draws something that clients do."""

    def __init__(self, plane: ControlPlane, data: st.DataObject) -> None:
        self.plane, self.draw = plane, data.draw
        self.unit = self.join()
        self.verbs = [
            self.put, self.put_by_key, self.tag, self.clear, self.clear_partition, self.fetch, self.ack, self.ragged,
            self.reset, self.reserve, self.insert, self.seal, self.forget, self.lose,
            lambda name: clear_consumed(self.plane),
        ]  # fmt: skip

    def act(self, most: int, least: int = 0) -> None:
        for _ in range(self.draw(st.integers(least, most))):
            self.draw(st.sampled_from(self.verbs))(self.draw(st.sampled_from(PARTITIONS)))
            while self.plane.next_deadline() == -math.inf:
                self.plane.expire(0.0)

    def some(self) -> list[int]:
        return self.draw(st.lists(st.integers(0, 40), max_size=6, unique=True))

    def publish(self, name: str, reply: Any) -> None:
        if isinstance(reply, p.Reserved):  # else the partition is sealed
            unit = self.draw(st.sampled_from([0, self.unit]))
            x = msgspec.structs.replace(INT, units=[(unit, len(reply.indexes) // 8)] if unit else None)
            send(self.plane, ROLLOUT, p.Publish, name, reply.indexes, {"x": x}, completes=reply.id)

    def join(self) -> int:
        """A storage unit. Returns its number."""
        return int(ask(self.plane, "unit", p.JoinUnit, "unit", "host", ["tcp://unit:1"]).value)

    def lose(self, name: str) -> None:
        """The storage unit ends, and another one joins."""
        self.plane.client_gone("unit", 0.0)
        self.unit = self.join()

    def put(self, name: str) -> None:
        self.publish(name, ask(self.plane, ROLLOUT, p.Reserve, name, self.draw(st.integers(1, 9))))

    def put_by_key(self, name: str) -> None:
        keys = self.draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
        self.publish(name, ask(self.plane, ROLLOUT, p.ResolveKeys, name, keys, True, True))

    def tag(self, name: str) -> None:
        tags = {index: {"v": self.draw(st.integers(0, 3))} for index in self.some()}
        ask(self.plane, ROLLOUT, p.SetTags, {name: tags}, self.draw(st.booleans()))

    def clear(self, name: str) -> None:
        clear(self.plane, self.some(), partition=name)

    def clear_partition(self, name: str) -> None:
        ask(self.plane, ACTOR, p.ClearPartition, name)

    def fetch(self, name: str) -> None:
        ask(self.plane, ACTOR, p.Fetch, name, "train", ["x"], self.draw(st.integers(1, 4)))

    def ack(self, name: str) -> None:
        for consumer in self.consumers(name):
            ack(self.plane, *[token for _, token, _ in consumer.ledger.entries()][:2], partition=name)

    def consumers(self, name: str) -> list[Any]:
        partition = self.plane.state.partitions.get(name)
        return [] if partition is None else list(partition.consumers.values())

    def ragged(self, name: str) -> None:
        """Samples get a field that has a shape for each, or are refused."""
        some = self.some()
        shapes = b"".join(index.to_bytes(4, "little") for index in some)
        spec = p.FieldSpec("int64", None, True, False, shapes)
        send(self.plane, ROLLOUT, p.Publish, name, p.pack_indexes(some), {"j": spec})

    def reset(self, name: str) -> None:
        ask(self.plane, ACTOR, p.ResetConsumption, name)

    def reserve(self, name: str) -> None:
        ask(self.plane, ROLLOUT, p.Reserve, name, self.draw(st.integers(1, 5)))

    def insert(self, name: str) -> None:
        ask(self.plane, ROLLOUT, p.Insert, name, 2, ["later"])

    def seal(self, name: str) -> None:
        if self.draw(st.integers(0, 5)) == 5:
            seal(self.plane, name)

    def forget(self, name: str) -> None:
        ask(self.plane, ROLLOUT, p.ForgetTask, "train")


@settings(max_examples=120, deadline=None, print_blob=True)
@given(data=st.data())
def test_a_state_read_in_slices_is_that_of_its_moment_whatever_happens_between_them(data):
    plane = ControlPlane(PlaneConfig(preallocate=data.draw(st.sampled_from([1, 6]))))
    clients = Clients(plane, data)
    clients.act(12, least=2)
    expected = at_once(plane)
    frozen = ask(plane, SAVER, p.Freeze)
    parts = [frozen.state]
    for number in range(1, frozen.num_parts):
        clients.act(4)
        parts.append(ask(plane, SAVER, p.ReadFrozen, frozen.id, number).state)
    assert decode(joined(parts)) == expected
    ask(plane, SAVER, p.Thaw, frozen.id)
    plane.check_invariants()


@pytest.mark.parametrize("how", ["some", "all", "the partition"])
def test_keys_and_tags_of_samples_that_are_cleared_between_slices_are_still_told(plane, monkeypatch, how):
    monkeypatch.setattr(control_state, "PIECE", 2)  # what is gone is freed in slices
    reply = ask(plane, ROLLOUT, p.ResolveKeys, "p", KEYS, True, True)
    samples = indexes(reply)
    tags = {index: {"v": index} for index in samples}
    send(plane, ROLLOUT, p.Publish, "p", reply.indexes, {"x": INT}, tags, completes=reply.id)
    expected = at_once(plane)
    frozen = ask(plane, SAVER, p.Freeze)
    if how == "the partition":
        ask(plane, ACTOR, p.ClearPartition, "p")
    else:
        clear(plane, samples if how == "all" else samples[5:])
    assert plane.next_deadline() is None, "a freeze may still read what is gone"
    others = [ask(plane, SAVER, p.ReadFrozen, frozen.id, part).state for part in range(1, frozen.num_parts)]
    assert decode(joined([frozen.state, *others])) == expected
    assert len(expected.partitions[0].tags) == len(expected.partitions[0].keys) == len(KEYS)
    ask(plane, SAVER, p.Thaw, frozen.id)
    while plane.next_deadline() is not None:
        plane.expire(0.0)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(data=st.data())
def test_what_is_restored_in_slices_is_what_was_saved(data):
    plane = ControlPlane(PlaneConfig())
    Clients(plane, data).act(15, least=2)
    saved = at_once(plane)
    assert merge(split(saved)) == saved, "cut and joined again"
    other = ControlPlane(PlaneConfig())
    begun = restore_parts(other, parts := [msgspec.msgpack.encode(each) for each in split(saved)])
    assert isinstance(ask(other, SAVER, p.Restore, parts[-1], 0, begun), p.Cleared)
    other.check_invariants()
    assert lasting(at_once(other)) == lasting(saved)


def lasting(saved: SavedQueue) -> SavedQueue:
    return msgspec.structs.replace(saved, incarnations=0)


def restore_parts(plane: ControlPlane, parts: list[bytes], shift: int = 0) -> int:
    """All but the last one. Returns the number of the call that began it, 0 without any."""
    begun = 0
    for number, part in enumerate(parts[:-1]):
        call = next(CALLS)
        begun = begun or call
        for _ in range(2):  # once more, as after a lost answer
            (to,) = plane.handle(SAVER, p.RestorePart(call, begun, number, part, shift), 0.0)
            assert to.reply == p.Done(call)
    return begun


CALLS = iter(range(10**6, 10**7))


def parts_of(plane: ControlPlane) -> list[bytes]:
    return [msgspec.msgpack.encode(each) for each in split(at_once(plane))]


def test_a_restore_that_is_cancelled_or_whose_client_ends_leaves_the_queue_as_it_was(plane, make_plane):
    register(plane)
    put(plane, 20)
    parts, other = parts_of(plane), make_plane()
    put(other, 2, partition="q")
    before = at_once(other)
    begun = restore_parts(other, parts, 10)
    assert cancel(other, SAVER, p.Done(begun))[0] == "undone"
    refused(ask(other, SAVER, p.Restore, parts[-1], 10, begun), "CheckpointError", "no restore under way")
    begun = restore_parts(other, parts, 10)
    other.client_gone(SAVER, 0.0)
    refused(ask(other, SAVER, p.Restore, parts[-1], 10, begun), "CheckpointError", "no restore under way")
    assert at_once(other) == before
    assert chores(other) == []


def test_a_part_that_is_refused_ends_the_restore(plane, make_plane):
    put(plane, 20)
    parts, other = parts_of(plane), make_plane()
    begun = restore_parts(other, parts)
    refused(ask(other, SAVER, p.RestorePart, begun, 0, parts[0]), "CheckpointError", "comes after")
    refused(ask(other, SAVER, p.Restore, parts[0], 0, begun), "CheckpointError", "contradicts itself")
    refused(ask(other, SAVER, p.Restore, parts[-1], 0, begun), "CheckpointError", "no restore under way")
    assert ask(other, ACTOR, p.ListPartitions).names == []


def test_indexes_that_come_into_use_between_two_parts_are_refused(plane, make_plane):
    put(plane, 20)
    parts, other = parts_of(plane), make_plane()
    begun = restore_parts(other, parts)
    mine = reserve(other, 1, partition="q")
    refused(ask(other, SAVER, p.Restore, parts[-1], 0, begun), "CheckpointError", "in use here")
    assert mine == [0]


def test_what_was_staged_for_a_restore_is_taken_by_its_parts(plane, make_plane):
    put(plane, 20)
    clear(plane, [3, 17])
    saved, other = at_once(plane), make_plane()
    put(other, 1, partition="q")
    staged = ask(other, SAVER, p.Stage, p.pack_indexes(range(20)))
    begun = restore_parts(other, parts := parts_of(plane), staged.value)
    assert indexes(ask(other, SAVER, p.Restore, parts[-1], staged.value, begun)) == [0]
    assert chores(other) == [4, 18], "nobody has these"
    assert (batch(other, 4), len(saved.partitions)) == ([1, 2, 3, 5], 1)


def test_a_part_that_no_freeze_has_is_refused(plane):
    put(plane, 9)
    frozen = ask(plane, SAVER, p.Freeze)
    refused(ask(plane, SAVER, p.ReadFrozen, frozen.id, frozen.num_parts), "CheckpointError", "comes after part 0")
    again = ask(plane, SAVER, p.ReadFrozen, frozen.id, 0)
    assert (again.state, again.num_parts) == (frozen.state, 3)
    ask(plane, SAVER, p.Thaw, frozen.id)
    refused(ask(plane, SAVER, p.ReadFrozen, frozen.id, 1), "CheckpointError", "no freeze under way")


@pytest.mark.parametrize("how", ["read", "thaw", "end"])
def test_a_frozen_state_keeps_nothing_aside_once_it_is_read(plane, how):
    ask(plane, ROLLOUT, p.ResolveKeys, "p", KEYS, True)
    frozen = ask(plane, SAVER, p.Freeze)
    partition = plane.state.partitions["p"]
    assert (len(partition.keys._watches), len(partition.tags._watches)) == (1, 1)
    if how == "read":
        for part in range(1, frozen.num_parts):
            ask(plane, SAVER, p.ReadFrozen, frozen.id, part)
    elif how == "thaw":
        ask(plane, SAVER, p.Thaw, frozen.id)
    else:
        plane.client_gone(SAVER, 0.0)
    assert (partition.keys._watches, partition.tags._watches, plane.state.snapshots) == ([], [], set())


def test_columns_of_different_lengths_are_refused_before_anything_is_cut(plane):
    put(plane, 20)
    fetch(plane, 2, 0, 0)
    plain = msgspec.msgpack.decode(joined(parts_of(plane)))
    plain["partitions"][0]["state"] += b"\x03"
    with pytest.raises(CheckpointError, match="differ in length"):
        encoded_parts(msgspec.msgpack.encode(plain), [])


def test_a_state_that_is_restored_says_where_its_values_were_stored_now_not_where_they_lay(plane):
    ask(plane, "unit", p.JoinUnit, "unit", "host", ["tcp://unit:1"])
    x, y = (msgspec.structs.replace(INT, units=units) for units in ([(1, 9)], None))
    reserved = ask(plane, ROLLOUT, p.Reserve, "p", 9)
    ask(plane, ROLLOUT, p.Publish, "p", reserved.indexes, {"x": x, "y": y}, completes=reserved.id)
    stored = [
        ("y", np.array([0, 1, 2, 3, 8]), np.array([2, 2, 0, 3, 3], np.int32)),
        ("y", np.array([100]), np.array([7], np.int32)),
    ]
    parts = [decode(part) for part in encoded_parts(joined(parts_of(plane)), stored)]
    assert len(parts) > 1
    found = {field.name: field.units for field in merge(parts).partitions[0].fields}
    assert found == {"x": None, "y": np.array([2, 2, 0, 3, 0, 0, 0, 0, 3], "<i4").tobytes()}
