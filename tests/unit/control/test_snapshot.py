# SPDX-License-Identifier: Apache-2.0
"""A plane that was saved and restored answers as the one it was saved from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from control_checks import CLIENTS, GRACE_S
from control_kit import (
    ACTOR,
    CRITIC,
    FLOAT,
    INT,
    ROLLOUT,
    SAVER,
    ack,
    ask,
    batch,
    batches,
    cancel,
    chores,
    clear,
    corrupted,
    fetch,
    indexes,
    load,
    new_plane,
    park,
    publish,
    put,
    refused,
    register,
    reserve,
    save,
    seal,
    send,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_plane_machine import HEALTH, PlaneMachine

from transfer_queue import BaseSampler, RankAwareSampler
from transfer_queue import protocol as p

GAP = 2**32
"""A restore leaves out so many indexes."""


def lasting(state: bytes) -> dict[str, Any]:
    """What is saved, but for how often something was made or restored."""
    return msgspec.msgpack.decode(state) | {"incarnations": 0, "next_index": 0, "next_lease": 1}


class RestoredMachine(PlaneMachine):
    """The machine of the plane, whose plane is now and then replaced by one restored from its saved state."""

    @rule()
    def restart(self) -> None:
        for client in CLIENTS:
            self.client_gone(client, died=False)
        state = self.frozen()
        self.plane = new_plane(capacity=self.capacity, producer_grace_s=GRACE_S)
        (answer,) = self.plane.handle("anna", p.Restore(1, state), self.now)
        assert answer.reply == p.Cleared(1, b"")
        self.plane.check_invariants()
        assert lasting(self.frozen()) == lasting(state), "nothing was lost on the way"
        self.producers.clear()  # who produces what isn't saved: processes are others then

    def frozen(self) -> bytes:
        reply = self.ask("anna", p.Freeze)
        assert self.ask("anna", p.Thaw, reply.id).indexes == b""
        state: bytes = reply.state
        return state


@pytest.mark.timeout(600)
class TestRestoredMachine(RestoredMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=60, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestRestoredMachineForLong(RestoredMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=1000, stateful_step_count=120, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )


# ---- what is restored ----


def test_batches_in_flight_come_again_and_their_tokens_settle_them(plane, make_plane):
    register(plane, dp_size=2)
    put(plane, 12)
    first, second = fetch(plane, 2, 0, 0), fetch(plane, 2, 1, 1)
    ack(plane, first.token)
    restored = make_plane()
    assert indexes(load(restored, save(plane))) == []
    assert msgspec.structs.replace(fetch(restored, 2, 1, 1), id=0) == msgspec.structs.replace(second, id=0)
    refused(fetch(restored, 2, 0, 0), "InvalidRequestError", "settled")
    assert ack(restored, second.token) == 1
    assert batch(restored, 2, 0, 2) == batch(plane, 2, 0, 2)


def test_fields_shapes_tags_and_keys_are_as_they_were(plane, make_plane):
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u", "v", "w"], True, True))
    shapes = p.FieldSpec("int64", None, True, False, b"".join(n.to_bytes(4, "little") for n in (1, 2, 3)))
    tags = {samples[0]: {"a": [1, None]}, samples[2]: {"b": 2.5}}
    specs = {"x": INT, "r": FLOAT, "j": shapes, "o": p.FieldSpec(None, None, False, True)}
    send(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), specs, tags)
    ask(plane, ROLLOUT, p.Insert, "p", 1, ["later"])
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["under way"], True, True)
    restored = make_plane()
    load(restored, save(plane))
    for verb, args in (
        (p.Describe, ("p", None, p.pack_indexes(samples))), (p.Describe, ("p",)), (p.ListKeys, ("p",)),
        (p.FieldStatus, ("p", ["x", "later"])), (p.KeysOf, ("p", p.pack_indexes(samples))),
        (p.ListPartitions, ()),
    ):  # fmt: skip
        request = verb(7, *args)
        assert restored.handle(ACTOR, request, 0.0) == plane.handle(ACTOR, request, 0.0), verb
    assert indexes(ask(restored, ROLLOUT, p.ResolveKeys, "p", ["under way"])) == []
    refused(publish(restored, put(restored, 1, partition="q"), "x")[0].reply, "SampleClearedError")


def test_the_end_of_a_stream_and_its_tail_are_as_they_were(plane, make_plane):
    register(plane, dp_size=2, tail="drop")
    put(plane, 5)
    fetch(plane, 2, 0, 0)
    seal(plane)
    dropped = fetch(plane, 2, 0, 1)
    restored = make_plane()
    load(restored, save(plane))
    assert (fetch(restored, 2, 1, 1).reason, fetch(restored, 2, 1, 1).dropped) == (dropped.reason, 1)
    refused(ask(restored, ROLLOUT, p.Reserve, "p", 1), "InvalidRequestError", "sealed after 5 samples")


def test_indexes_are_never_handed_out_again_also_not_by_another_server_that_restores_the_same(plane, make_plane):
    put(plane, 3)
    state = save(plane)
    after = [put(plane, 4), put(plane, 5, partition="later")]
    for server in (0, 7):
        restored = make_plane(server=server)
        load(restored, state)
        after += [put(restored, 2), put(restored, 1, partition="q")]
        refused(publish(restored, after[0], "x")[0].reply, "SampleClearedError")
    everywhere = [index for indexes in after for index in indexes]
    assert len(set(everywhere)) == len(everywhere)


def test_preallocated_samples_that_a_writer_had_taken_are_there_again(make_plane):
    plane = make_plane(preallocate=6)
    put(plane, 2)
    reserve(plane, 3)
    restored = make_plane(preallocate=6)
    load(restored, save(plane))
    status = ask(restored, ACTOR, p.ConsumptionStatus, "p", "train")
    assert p.unpack_indexes(status.indexes).tolist() == [0, 1, *range(GAP + 6, GAP + 10)]
    assert reserve(restored, 5) == list(range(GAP + 6, GAP + 11))


def test_samplers_remember_what_they_did(make_plane):
    plane = make_plane(sampler=RankAwareSampler())
    put(plane, 8)
    group = {"data_replica_group": 0, "data_replica_world_size": 2}
    leader = fetch(plane, 2, sampler_args={**group, "data_replica_rank": 0})
    restored = make_plane(sampler=RankAwareSampler())
    load(restored, save(plane))
    assert indexes(fetch(restored, 2, sampler_args={**group, "data_replica_rank": 1})) == indexes(leader)


def test_a_task_draws_with_the_sampler_that_it_was_registered_with(plane, make_plane):
    spec = {"class": "GRPOGroupNSampler", "args": [], "kwargs": {"n_samples_per_prompt": 3}}
    register(plane, sampler=spec, dp_size=2)
    restored = make_plane()
    register(restored, "other", dp_size=4)
    load(restored, save(plane))
    refused(fetch(restored, 4, 0, 0), "SamplerError", "multiple of n_samples_per_prompt")
    refused(fetch(restored, 4, 0, 0, task="other", dp_size=2), "InvalidRequestError", "[2, 4]")


class Forgetful(BaseSampler):
    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return [], []

    def save_checkpoint(self) -> dict[str, Any]:
        return {"what": object()}


def test_a_sampler_that_remembers_what_no_file_can_hold_is_named(make_plane):
    plane = make_plane(sampler=Forgetful())
    refused(ask(plane, SAVER, p.Freeze), "CheckpointError", "save_checkpoint() must return plain data")
    put(plane, 1)
    assert clear(plane, [0]) == [0]


# ---- into a queue that holds something ----


def test_a_restored_queue_has_only_what_was_saved(plane, make_plane):
    put(plane, 3)
    other = make_plane()
    put(other, 2, partition="q")
    assert indexes(load(other, save(plane))) == [0, 1]
    assert ask(other, ACTOR, p.ListPartitions).names == ["p"]


def test_samples_get_other_indexes_where_theirs_were_in_use(plane, make_plane):
    put(plane, 3)
    given = fetch(plane, 2, 0, 0)
    other = make_plane()
    put(other, 2, partition="q")
    load(other, save(plane))
    assert batch(other, 2, 0, 0) == [2, 3]
    assert ack(other, given.token) == 1
    refused(ask(other, ACTOR, p.Describe, "p", None, p.pack_indexes([0])), "SampleClearedError")
    assert put(other, 1) == [GAP + 5]


def test_a_sampler_that_remembers_indexes_keeps_the_checkpoint_out_of_a_used_queue(make_plane):
    plane = make_plane(sampler=RankAwareSampler())
    put(plane, 4)
    fetch(plane, 2, sampler_args={"data_replica_group": 0, "data_replica_rank": 0, "data_replica_world_size": 2})
    other = make_plane(sampler=RankAwareSampler())
    put(other, 2, partition="q")
    refused(load(other, save(plane)), "CheckpointError", "RankAwareSampler remembers samples", "new queue")
    assert batch(other, 2, 0, 0, partition="q") == [0, 1]


def test_a_waiting_fetch_is_answered_by_the_restore_that_decides_it(plane, make_plane):
    put(plane, 2)
    other = make_plane()
    park(other, 2, 0, 0)
    park(other, 2, 0, 0, partition="q", client=CRITIC)
    state = save(plane)
    assert batches(other.handle(SAVER, p.Restore(1, state), 0.0)) == [(ACTOR, [0, 1])]
    assert len(ask(other, CRITIC, p.GetStats).value["waiting"]) == 1


def test_a_writer_that_reserved_before_the_restore_is_refused_and_its_values_are_dropped(plane, make_plane):
    put(plane, 2)
    other = make_plane()
    mine = reserve(other, 3)
    load(other, save(plane))
    refused(publish(other, mine)[0].reply, "SampleClearedError")
    other.client_gone(ROLLOUT, 0.0)
    assert chores(other) == mine


def test_a_checkpoint_larger_than_the_queue_is_refused(plane, make_plane):
    put(plane, 3)
    small = make_plane(capacity=2)
    put(small, 1, partition="q")
    refused(ask(small, SAVER, p.Stage, p.pack_indexes([0, 1, 2])), "StorageFullError", "3 samples", "takes 2")
    refused(ask(small, SAVER, p.Restore, save(plane), 8), "StorageFullError", "3 samples", "takes 2")
    assert ask(small, ACTOR, p.ListPartitions).names == ["q"]


def test_indexes_in_use_are_refused_unless_others_were_set_aside(plane, make_plane):
    put(plane, 3)
    state, other = save(plane), make_plane()
    put(other, 1, partition="q")
    refused(ask(other, SAVER, p.Restore, state), "CheckpointError", "in use here")
    assert batch(other, 1, partition="q") == [0]


def test_what_was_stored_for_a_restore_is_deleted_when_its_client_ends_or_cancels(plane):
    assert ask(plane, SAVER, p.Stage, p.pack_indexes([4, 6])).value == 0
    staged = ask(plane, CRITIC, p.Stage, p.pack_indexes([4, 6]))
    assert staged.value == 3
    assert put(plane, 1) == [10]
    plane.received(CRITIC, [staged.id])
    plane.client_gone(SAVER, 0.0)
    assert chores(plane) == [4, 6]
    assert cancel(plane, CRITIC, staged)[0] == "undone"
    assert chores(plane) == [7, 9]
    plane.client_gone(CRITIC, 0.0)
    assert chores(plane) == []


def test_what_was_staged_and_not_restored_is_deleted(plane):
    put(plane, 2)
    state = save(plane)
    ask(plane, SAVER, p.Stage, p.pack_indexes([50, 51]))
    shift = ask(plane, SAVER, p.Stage, p.pack_indexes([0, 1])).value
    restored = ask(plane, SAVER, p.Restore, state, shift)
    assert (indexes(restored), chores(plane)) == ([0, 1], [50, 51])
    plane.received(SAVER, [restored.id])
    plane.client_gone(SAVER, 0.0)
    assert chores(plane) == []
    assert batch(plane, 2) == [52, 53]


@pytest.mark.parametrize("wrong", [[-1, 3], [2**62], [2**63 - 1]])
def test_indexes_that_no_queue_hands_out_are_not_staged(plane, wrong):
    refused(ask(plane, SAVER, p.Stage, p.pack_indexes(wrong)), "CheckpointError", "out of range")
    assert put(plane, 1) == [0]


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(format=3),
        lambda plain: plain.pop("partitions"),
        lambda plain: plain.update(next_index=1),
        lambda plain: plain["partitions"][0].update(index=p.pack_indexes([1, 0, 2])),
        lambda plain: plain["partitions"][0].update(state=b"\x03\x03"),
        lambda plain: plain["partitions"][0].update(state=b"\x03\x03\x77"),
        lambda plain: plain["partitions"][0].update(key_indexes=p.pack_indexes([0, 1])),
        lambda plain: plain["partitions"][0].update(tagged=p.pack_indexes([99]), tags=[b"\x80"]),
        lambda plain: plain["partitions"][0].update(tagged=p.pack_indexes([0]), tags=[b"\xc1"]),
        lambda plain: plain["partitions"][0]["consumers"][0]["ledger"]["ranks"][0].update(starts=[5]),
        lambda plain: plain["partitions"][0]["consumers"][0]["ledger"]["entries"][0].update(owned=7),
        lambda plain: plain["partitions"].append(plain["partitions"][0] | {"name": "again"}),
        lambda plain: plain["partitions"].append(plain["partitions"][0] | {"index": b"", "state": b""}),
        lambda plain: plain["partitions"][0].update(missing_free=-1),
    ],
)
def test_a_state_that_contradicts_itself_is_refused_and_nothing_changes(plane, make_plane, change):
    put(plane, 3)
    fetch(plane, 2, 0, 0)
    bad, other = corrupted(save(plane), change), make_plane()
    put(other, 2, partition="q")
    refused(ask(other, SAVER, p.Restore, bad, 100), "CheckpointError")
    assert ask(other, ACTOR, p.ListPartitions).names == ["q"]
    assert batch(other, 2, partition="q") == [0, 1]


def test_bytes_that_are_no_state_are_refused(plane):
    for bad in (b"", b"\x00", b"\xff" * 40, msgspec.msgpack.encode({"format": "1"})):
        refused(ask(plane, SAVER, p.Restore, bad), "CheckpointError", "none of ours, or damaged")


# ---- damaged ----


def everything_saved() -> bytes:
    plane = new_plane(sampler=RankAwareSampler(), preallocate=4)
    register(plane, sampler="SequentialSampler", dp_size=2, tail="pad")
    samples = put(plane, 9, "x", "y", lengths=[1, 2, 3])
    shapes = p.FieldSpec("int64", None, True, False, bytes(8))
    send(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples[:2]), {"j": shapes})
    ask(plane, ROLLOUT, p.ResolveKeys, "q", ["u", "v"], True)
    given = fetch(plane, 2, 0, 0)
    fetch(plane, 2, 1, 1)
    ack(plane, given.token)
    fetch(plane, 1, sampler_args={"data_replica_group": 0, "data_replica_rank": 0, "data_replica_world_size": 2})
    seal(plane)
    return save(plane)


STATE = everything_saved()


@settings(max_examples=150, deadline=None, print_blob=True)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_holds_together(data):
    bad = bytearray(STATE)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    other = new_plane(sampler=RankAwareSampler(), preallocate=4)
    put(other, 2, partition="before")
    reply = ask(other, SAVER, p.Restore, bytes(bad[: data.draw(st.sampled_from([len(bad), len(bad) // 2]))]), 100)
    assert isinstance(reply, (p.Cleared, p.Failed))
    other.check_invariants()
    if isinstance(reply, p.Failed):
        assert ask(other, ACTOR, p.ListPartitions).names == ["before"]
