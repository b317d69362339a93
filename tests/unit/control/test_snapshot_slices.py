# SPDX-License-Identifier: Apache-2.0
"""A state that is read in slices is that of the moment of its freeze; one that is restored in slices is whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from control_kit import (
    ACTOR,
    INT,
    ROLLOUT,
    SAVER,
    ask,
    batch,
    cancel,
    chores,
    clear,
    clear_consumed,
    fetch,
    indexes,
    new_plane,
    put,
    refused,
    register,
    reserve,
    rest,
    seal,
    send,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slices_kit import parts_of, recut, rest_of, restore_parts, small_slices, whole

from transfer_queue import protocol as p

PARTITIONS = ["p", "q"]
KEYS = [f"key {number}" for number in range(12)]


@pytest.fixture(autouse=True, scope="module")
def in_small_slices():
    with small_slices():
        yield


def sections(parts: list[bytes]) -> list[dict[str, Any]]:
    return [section for part in parts for section in msgspec.msgpack.decode(part)["partitions"]]


def lasting(part: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(part) | {"incarnations": 0, "next_index": 0, "next_lease": 1}


class Clients:
    """Draws something that clients do."""

    def __init__(self, plane: Any, data: st.DataObject) -> None:
        self.plane, self.draw = plane, data.draw
        self.unit = self.join()
        self.calls: list[int] = []
        self.tokens: list[tuple[str, str, str]] = []
        self.reserved: list[tuple[str, p.Reserved]] = []
        self.verbs = [
            self.put, self.put_by_key, self.tag, self.clear, self.clear_partition, self.fetch, self.ack, self.ragged,
            self.reset, self.reserve, self.insert, self.seal, self.forget, self.lose, self.fetch_of_rank, self.create,
            self.cancel, self.end, self.load, self.publish_reserved, lambda name: clear_consumed(self.plane),
        ]  # fmt: skip

    def act(self, most: int, least: int = 0) -> None:
        for _ in range(self.draw(st.integers(least, most))):
            self.draw(st.sampled_from(self.verbs))(self.draw(st.sampled_from(PARTITIONS)))
            rest(self.plane)

    def some(self) -> list[int]:
        return self.draw(st.lists(st.integers(0, 40), max_size=6, unique=True))

    def publish(self, name: str, reply: Any) -> None:
        if isinstance(reply, p.Reserved):  # else the partition is sealed
            unit = self.draw(st.sampled_from([0, self.unit]))
            x = msgspec.structs.replace(INT, units=[(unit, len(reply.indexes) // 8)] if unit else None)
            uncommitted = self.draw(st.booleans())
            args = (name, reply.indexes, {"x": x})
            self.call(ROLLOUT, p.Publish, *args, completes=reply.id, uncommitted=uncommitted)

    def join(self) -> int:
        """A storage unit. Returns its number."""
        return int(ask(self.plane, "unit", p.JoinUnit, "unit", "host", ["tcp://unit:1"]).value)

    def lose(self, name: str) -> None:
        """The storage unit ends, and another one joins."""
        self.plane.client_gone("unit", 0.0)
        self.unit = self.join()

    def put(self, name: str) -> None:
        self.publish(name, self.call(ROLLOUT, p.Reserve, name, self.draw(st.integers(1, 9))))

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
        self.call(ACTOR, p.Fetch, name, "train", ["x"], self.draw(st.integers(1, 2)))

    def fetch_of_rank(self, name: str) -> None:
        """One that may draw a round, replay a batch, or end a pass."""
        rank, at, start = (self.draw(st.sampled_from(some)) for some in ([0, 1], [None, 0, 1, 2], [None, 0, 1]))
        args = {"finite": self.draw(st.booleans()), "pass_start": start, "dp_size": 2}
        self.call(ACTOR, p.Fetch, name, "ranks", ["x"], 1, rank, at, **args)

    def call(self, client: str, verb: Any, *args: Any, **kwargs: Any) -> Any:
        reply = ask(self.plane, client, verb, *args, **kwargs)
        self.calls.append(reply.id)
        if isinstance(reply, p.Batch):
            self.tokens.append((*args[:2], reply.token))
        return reply

    def cancel(self, name: str) -> None:
        """A call whose answer was not received, and which is undone, or not."""
        if self.calls:
            call = self.calls.pop(self.draw(st.integers(0, len(self.calls) - 1)))
            for client in (ACTOR, ROLLOUT):
                ask(self.plane, client, p.Cancel, call)

    def end(self, name: str) -> None:
        self.plane.client_gone(self.draw(st.sampled_from([ACTOR, ROLLOUT])), 0.0)

    def create(self, name: str) -> None:
        fields = self.draw(st.sampled_from([{}, {"x": p.DeclaredField("int64")}, {"z": p.DeclaredField("int64")}]))
        ask(self.plane, ROLLOUT, p.CreatePartition, name, self.draw(st.sampled_from([None, 30])), fields)

    def load(self, name: str) -> None:
        """The queue as it is, with other indexes."""
        parts = parts_of(self.plane)
        shift = ask(self.plane, SAVER, p.Stage, b"".join(each["index"] for each in sections(parts))).value
        begun = restore_parts(self.plane, parts, shift)
        assert isinstance(ask(self.plane, SAVER, p.Restore, parts[-1], shift, begun), p.Cleared)

    def ack(self, name: str) -> None:
        """Some are of a partition that is gone, or of a batch that was given back."""
        for partition, task, token in self.tokens[:2]:
            ask(self.plane, ACTOR, p.Ack, partition, task, [token])
        del self.tokens[:2]

    def ragged(self, name: str) -> None:
        """Samples get a field that has a shape for each, or are refused."""
        some = self.some()
        shapes = b"".join(index.to_bytes(4, "little") for index in some)
        spec = p.FieldSpec("int64", None, True, False, shapes)
        send(self.plane, ROLLOUT, p.Publish, name, p.pack_indexes(some), {"j": spec})

    def reset(self, name: str) -> None:
        ask(self.plane, ACTOR, p.ResetConsumption, name)

    def reserve(self, name: str) -> None:
        reply = self.call(ROLLOUT, p.Reserve, name, self.draw(st.integers(1, 5)))
        if isinstance(reply, p.Reserved):
            self.reserved.append((name, reply))

    def publish_reserved(self, name: str) -> None:
        if self.reserved:
            self.publish(*self.reserved.pop())

    def insert(self, name: str) -> None:
        self.call(ROLLOUT, p.Insert, name, 2, ["later"])

    def seal(self, name: str) -> None:
        if self.draw(st.integers(0, 5)) == 5:
            seal(self.plane, name)

    def forget(self, name: str) -> None:
        ask(self.plane, ROLLOUT, p.ForgetTask, "train")


@settings(max_examples=120, deadline=None, print_blob=True)
@given(data=st.data())
def test_a_state_read_in_slices_is_that_of_its_moment_whatever_happens_between_them(data):
    plane = new_plane(preallocate=data.draw(st.sampled_from([1, 6])))
    clients = Clients(plane, data)
    clients.act(12, least=2)
    expected = parts_of(plane)
    first = frozen = ask(plane, SAVER, p.Freeze)
    parts = [frozen.state]
    while len(parts) < frozen.num_parts:
        clients.act(4)
        frozen = ask(plane, SAVER, p.ReadFrozen, first.id, len(parts))
        parts.append(frozen.state)
    assert parts == expected
    ask(plane, SAVER, p.Thaw, first.id)
    plane.check_invariants()


@pytest.mark.parametrize("how", ["some", "all", "the partition"])
def test_keys_and_tags_of_samples_that_are_cleared_between_slices_are_still_told(plane, how):
    reply = ask(plane, ROLLOUT, p.ResolveKeys, "p", KEYS, True, True)
    samples = indexes(reply)
    tags = {index: {"v": index} for index in samples}
    send(plane, ROLLOUT, p.Publish, "p", reply.indexes, {"x": INT}, tags, completes=reply.id)
    expected = parts_of(plane)
    frozen = ask(plane, SAVER, p.Freeze)
    if how == "the partition":
        ask(plane, ACTOR, p.ClearPartition, "p")
    else:
        clear(plane, samples if how == "all" else samples[5:])
    assert plane.next_deadline() is None, "a freeze may still read what is gone"
    assert [frozen.state, *rest_of(plane, frozen)] == expected
    assert [sum(len(each[what]) for each in sections(expected)) for what in ("tags", "keys")] == [len(KEYS)] * 2
    ask(plane, SAVER, p.Thaw, frozen.id)
    while plane.next_deadline() is not None:
        plane.expire(0.0)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(data=st.data(), saved_whole=st.booleans())
def test_what_is_restored_in_slices_is_what_was_saved(data, saved_whole):
    plane = new_plane(preallocate=data.draw(st.sampled_from([1, 6])))
    Clients(plane, data).act(15, least=2)
    other = new_plane()
    parts = recut(whole(plane)) if saved_whole else parts_of(plane)
    begun = restore_parts(other, parts)
    assert isinstance(ask(other, SAVER, p.Restore, parts[-1], 0, begun), p.Cleared)
    other.check_invariants()
    if not any(each["missing_free"] for each in sections([whole(plane)])):
        assert lasting(whole(other)) == lasting(whole(plane))


def test_a_restore_while_partitions_are_made_gives_its_batches_tokens_that_none_of_them_has(plane, make_plane):
    put(plane, 20)
    parts, tokens = parts_of(plane), set()
    for makes in (False, True):
        other = make_plane()
        begun = restore_parts(other, parts)
        if makes:
            ask(other, ACTOR, p.CreatePartition, "q", 1)
            ask(other, ACTOR, p.CreatePartition, "r", 1)
        assert isinstance(ask(other, SAVER, p.Restore, parts[-1], 0, begun), p.Cleared)
        tokens.add(fetch(other, 2, 0, 0).token)
        other.check_invariants()
    assert len(tokens) == 2


def test_a_restore_that_is_cancelled_or_whose_client_ends_leaves_the_queue_as_it_was(plane, make_plane):
    register(plane)
    put(plane, 20)
    parts, other = parts_of(plane), make_plane()
    put(other, 2, partition="q")
    before = parts_of(other)
    begun = restore_parts(other, parts, 10)
    assert cancel(other, SAVER, p.Done(begun))[0] == "undone"
    refused(ask(other, SAVER, p.Restore, parts[-1], 10, begun), "CheckpointError", "no restore under way")
    begun = restore_parts(other, parts, 10)
    other.client_gone(SAVER, 0.0)
    refused(ask(other, SAVER, p.Restore, parts[-1], 10, begun), "CheckpointError", "no restore under way")
    assert parts_of(other) == before
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
    other = make_plane()
    put(other, 1, partition="q")
    staged = ask(other, SAVER, p.Stage, p.pack_indexes(range(20)))
    begun = restore_parts(other, parts := parts_of(plane), staged.value)
    assert indexes(ask(other, SAVER, p.Restore, parts[-1], staged.value, begun)) == [0]
    assert chores(other) == [4, 18], "nobody has these"
    assert batch(other, 4) == [1, 2, 3, 5]


def test_a_part_that_no_freeze_has_is_refused(plane):
    put(plane, 9)
    frozen = ask(plane, SAVER, p.Freeze)
    refused(ask(plane, SAVER, p.ReadFrozen, frozen.id, frozen.num_parts), "CheckpointError", "comes after part 0")
    again = ask(plane, SAVER, p.ReadFrozen, frozen.id, 0)
    assert (again.state, again.num_parts) == (frozen.state, frozen.num_parts)
    ask(plane, SAVER, p.Thaw, frozen.id)
    refused(ask(plane, SAVER, p.ReadFrozen, frozen.id, 1), "CheckpointError", "no freeze under way")
