# SPDX-License-Identifier: Apache-2.0
"""Verbs that change nothing, keys and tags, and the machine's own manners: one answer for each request."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    INT,
    REWARDER,
    ROLLOUT,
    ask,
    batch,
    batches,
    clear,
    indexes,
    park,
    publish,
    put,
    refused,
    register,
    reserve,
    seal,
    send,
)

from tests.local_plane import tags_of
from transfer_queue import protocol as p


def resolve(plane, *keys, partition="p", **kwargs):
    reply = ask(plane, ROLLOUT, p.ResolveKeys, partition, list(keys), **kwargs)
    assert isinstance(reply, p.Batch), reply
    return dict(zip(reply.keys, indexes(reply), strict=True))


def tags(plane, values, merge=False):
    return ask(plane, ROLLOUT, p.SetTags, values, merge)


# ---- status ----


def test_status_calls_know_nothing_of_an_unknown_partition_or_field(plane):
    put(plane, 1, "x")
    unknown = [
        ask(plane, ACTOR, p.ConsumptionStatus, "nowhere", "train"),
        ask(plane, ACTOR, p.FieldStatus, "nowhere", ["x"]),
        ask(plane, ACTOR, p.FieldStatus, "p", ["x", "y"]),
        ask(plane, ACTOR, p.FieldStatus, "p", []),
    ]
    assert unknown == [p.Status(reply.id, known=False) for reply in unknown]


def test_production_status_has_a_column_per_field_in_order_of_registration(plane):
    samples = put(plane, 3, "x", "y")
    publish(plane, samples[1:2], "a")
    reply = ask(plane, ACTOR, p.FieldStatus, "p", ["a", "x"])
    assert (indexes(reply), list(reply.status), reply.columns) == ([0, 1, 2], [1, 0, 1, 1, 1, 0], 2)


def test_consumption_status_is_zeros_for_a_task_never_seen_and_ones_for_what_it_got(plane):
    put(plane, 3)
    batch(plane, 2)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [1, 1, 0]
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "other").status) == [0, 0, 0]


def summary(plane, verb, *args):
    return ask(plane, ACTOR, verb, *args, summary=True).value


def test_the_summary_of_consumption_is_yes_once_every_sample_there_is_was_consumed(plane):
    assert not summary(plane, p.ConsumptionStatus, "p", "train")
    ask(plane, ACTOR, p.CreatePartition, "p")
    assert not summary(plane, p.ConsumptionStatus, "p", "train")
    put(plane, 3)
    batch(plane, 2)
    assert not summary(plane, p.ConsumptionStatus, "p", "train")
    reserve(plane, 1)
    batch(plane, 1)
    assert summary(plane, p.ConsumptionStatus, "p", "train")
    assert not summary(plane, p.ConsumptionStatus, "p", "other")


def test_the_summary_of_production_is_yes_once_every_sample_there_is_has_all_fields(plane):
    assert not summary(plane, p.FieldStatus, "p", ["x"])
    samples = put(plane, 3, "x", "y")
    put(plane, 1, "x")
    asked = (["x"], ["x", "y"], ["x", "unknown"], [])
    assert [summary(plane, p.FieldStatus, "p", names) for names in asked] == [True, False, False, False]
    publish(plane, [samples[-1] + 1], "y")
    reserve(plane, 1)
    clear(plane, samples[:1])
    assert summary(plane, p.FieldStatus, "p", ["x", "y"])


def test_preallocated_samples_are_neither_produced_nor_consumed(make_plane):
    plane = make_plane(preallocate=3)
    put(plane, 2)
    batch(plane, 2)
    asked = [(p.ConsumptionStatus, "p", "train"), (p.FieldStatus, "p", ["x"])]
    assert [summary(plane, *each) for each in asked] == [False, False]
    (last,) = reserve(plane, 1)
    assert [summary(plane, *each) for each in asked] == [False, False]
    publish(plane, [last])
    assert [summary(plane, *each) for each in asked] == [False, True]
    batch(plane, 1)
    assert summary(plane, p.ConsumptionStatus, "p", "train")


# ---- describe ----


def test_describe_tells_of_all_samples_and_consumes_none(plane):
    put(plane, 1, "x", "y")
    put(plane, 1, "x")
    batch(plane, 1)
    every = ask(plane, ACTOR, p.Describe, "p", ["x", "y", "unknown"])
    assert (indexes(every), list(every.status), every.fields) == ([0, 1], [0, 0], {"x": INT, "y": INT})
    common = ask(plane, ACTOR, p.Describe, "p")
    assert (indexes(common), list(common.status), common.fields) == ([0, 1], [1, 1], {"x": INT})
    assert batch(plane, 1) == [1]


def test_describe_of_an_unknown_partition_or_sample_is_refused(plane):
    put(plane, 1)
    refused(ask(plane, ACTOR, p.Describe, "nowhere"), "UnknownPartitionError", "'nowhere' not found", "'p'")
    refused(ask(plane, ACTOR, p.Describe, "p", None, p.pack_indexes([5])), "SampleClearedError", "[5]")


# ---- keys ----


def test_new_keys_get_samples_in_the_order_given_and_known_ones_keep_theirs(plane):
    assert resolve(plane, "b", "a", create=True) == {"b": 0, "a": 1}
    assert resolve(plane, "c", "a", "c", create=True) == {"c": 2, "a": 1}
    assert resolve(plane, "a", "nobody") == {"a": 1}
    assert resolve(plane, "a", partition="nowhere") == {}


def test_a_held_key_is_listed_once_it_is_published(plane):
    samples = list(resolve(plane, "k", create=True, hold=True).values())
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {}}
    publish(plane, samples, tags={samples[0]: {"v": 1}})
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {"k": {"v": 1}}}
    assert batch(plane, 1) == samples


def test_keys_are_known_both_ways_until_their_sample_is_cleared(plane):
    found = resolve(plane, "k", "l", create=True)
    put(plane, 1)
    wanted = p.pack_indexes([*found.values(), 2, 99])
    assert ask(plane, ACTOR, p.KeysOf, "p", wanted).names == ["k", "l", None, None]
    clear(plane, [found["k"]])
    assert ask(plane, ACTOR, p.KeysOf, "p", wanted).names == [None, "l", None, None]
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {"l": {}}}
    assert resolve(plane, "k", create=True) == {"k": 3}
    refused(ask(plane, ACTOR, p.KeysOf, "nowhere", b""), "UnknownPartitionError", "'nowhere'")


def test_keys_are_listed_in_order_of_insertion_and_unknown_partitions_not_at_all(plane):
    resolve(plane, "z", "a", create=True)
    resolve(plane, "m", partition="q", create=True)
    assert [list(ask(plane, ACTOR, p.ListKeys, name).keys[name]) for name in "pq"] == [["z", "a"], ["m"]]
    assert ask(plane, ACTOR, p.ListKeys, "nowhere").keys == {}


def test_a_key_of_a_sealed_partition_is_found_but_none_is_made(plane):
    resolve(plane, "k", create=True)
    seal(plane)
    assert resolve(plane, "k", create=True) == {"k": 0}
    reply = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["new"], create=True)
    refused(reply, "InvalidRequestError", "sealed")


def test_new_keys_that_fill_a_partition_answer_those_who_wait_for_its_end(plane):
    register(plane, dp_size=2)
    ask(plane, ROLLOUT, p.CreatePartition, "p", 1)
    park(plane, 1, 0, 0)
    replies = send(plane, ROLLOUT, p.ResolveKeys, "p", ["k"], True)
    assert [type(to.reply) for to in replies] == [p.Batch, p.Ended]


# ---- tags ----


def test_tags_replace_or_merge_and_unknown_places_are_ignored(plane):
    put(plane, 2)
    tags(plane, {"p": {0: {"a": 1, "b": 1}, 99: {"a": 1}}, "nowhere": {0: {"a": 1}}})
    tags(plane, {"p": {0: {"b": 2}, 1: {"c": 3}}}, merge=True)
    assert tags_of(ask(plane, ACTOR, p.Describe, "p")) == {0: {"a": 1, "b": 2}, 1: {"c": 3}}
    tags(plane, {"p": {0: {"z": 0}, 1: {}}})
    assert tags_of(ask(plane, ACTOR, p.Describe, "p")) == {0: {"z": 0}}


# ---- statistics ----


def test_statistics_tell_who_waits_and_what_each_task_has(make_plane):
    plane = make_plane(capacity=4)
    ask(plane, ROLLOUT, p.CreatePartition, "p", 9)
    put(plane, 3)
    reserve(plane, 1)
    batch(plane, 1, 0, 0)
    park(plane, 5, now=10.0)
    assert ask(plane, REWARDER, p.Reserve, "q", 1, now=11.0) is None
    stats = ask(plane, CRITIC, p.GetStats, now=12.0).value
    task = {
        "ready": {"x": 2}, "consumed": 1, "done_total": 1, "in_flight": 1, "in_flight_samples": 1, "drawn": 1,
        "dp_sizes": [1], "settled": 0, "ended": None, "dropped": 0, "asked_s_ago": 2.0,
    }  # fmt: skip
    assert stats["capacity"] == 4
    assert stats["partitions"] == {
        "p": {
            "samples": 3, "published": 3, "put_total": 3, "held": 1, "sealed": False, "num_samples": 9, "keys": 0,
            "fields": ["x"], "produced": {"x": 3}, "tasks": {"train": task}, "abandoned": None, "lost": {},
        }
    }  # fmt: skip
    assert [(each["client"], each["waited_s"], each["writer"]) for each in stats["waiting"]] == [
        (ACTOR, 2.0, False), (REWARDER, 1.0, True),
    ]  # fmt: skip


def stats(plane, now=0.0):
    return ask(plane, ACTOR, p.GetStats, now=now).value


def test_statistics_say_what_those_who_wait_lack(make_plane):
    plane = make_plane(capacity=6)
    put(plane, 2, "x", "y")
    put(plane, 2, "x")
    send(plane, ACTOR, p.Fetch, "p", "train", ["x", "y"], 3, wait_s=9.0, now=1.0)
    send(plane, CRITIC, p.Fetch, "nowhere", "score", ["x"], 2, wait_s=9.0, now=2.0)
    send(plane, ROLLOUT, p.Reserve, "p", 3, wait_s=9.0, now=3.0)
    assert stats(plane, now=4.0)["waiting"] == [
        {"partition": "p", "task": "train", "client": ACTOR, "waited_s": 3.0, "writer": False, "fields": ["x", "y"],
         "wanted": 3, "ready": 2, "lacking": {"y": 2}, "unmatched": 0, "in_hand": {}},
        {"partition": "nowhere", "task": "score", "client": CRITIC, "waited_s": 2.0, "writer": False, "fields": ["x"],
         "wanted": 2, "ready": 0, "lacking": {}, "unmatched": 0, "in_hand": {}},
        {"partition": "p", "task": None, "client": ROLLOUT, "waited_s": 1.0, "writer": True, "wanted": 3},
    ]  # fmt: skip
    plane.client_gone(ROLLOUT, 4.0)


def test_a_wait_counts_from_the_first_of_its_requests(plane):
    send(plane, ACTOR, p.Fetch, "p", "train", ["x"], 2, wait_s=0.5, waited_s=9.5, now=10.0)
    assert [each["waited_s"] for each in stats(plane, now=10.25)["waiting"]] == [9.75]


def test_statistics_name_a_field_whose_producers_have_all_died(plane):
    put(plane, 1, "x")
    assert stats(plane)["partitions"]["p"]["abandoned"] is None
    plane.client_gone(ROLLOUT, 1.0)
    assert stats(plane, now=100.0)["partitions"]["p"]["abandoned"] == "x"


# ---- manners ----


@pytest.mark.parametrize(
    "request_",
    [
        p.CreatePartition(7, "p", -1),
        p.Reserve(7, "p", 0),
        p.Reserve(7, "p", 1, {"declared": p.FieldSpec("float16", (1,))}),
        p.Insert(7, "p", -2),
        p.CheckFields(7, "nowhere", b"", {}),
        p.Cancel(7, 3),
        p.Put(7, p.Reserve(7, "p", 1)),
        p.Publish(7, "p", b"odd", {}),
        p.Publish(7, "p", p.pack_indexes([]), {"x": INT}),
        p.Publish(7, "p", p.pack_indexes([0, 77]), {"new": INT}, {0: {"v": 1}}),
        p.Fetch(7, "p", "t", [], 1),
        p.Fetch(7, "p", "t", ["x"], 0, wait_s=9.0),
        p.Ack(7, "p", "t", ["?"]),
        p.Describe(7, "nowhere"),
        p.ConsumptionStatus(7, "p", "t"),
        p.FieldStatus(7, "p", ["x"]),
        p.ResetConsumption(7, "nowhere"),
        p.SetTags(7, {"nowhere": {0: {"v": 1}}}),
        p.ClearSamples(7, "p", p.pack_indexes([77])),
        p.ClearSamples(7, "p", b"odd"),
        p.ClearPartition(7, "nowhere"),
        p.ListPartitions(7),
        p.ResolveKeys(7, "nowhere", ["k"]),
        p.KeysOf(7, "nowhere", b""),
        p.ListKeys(7, "nowhere"),
        p.GetStats(7),
        p.ForgetTask(7, "nobody"),
        p.ExpectProducers(7),
        p.NoteExit(7, "rollout-0", "killed"),
        p.JoinUnit(7, "nowhere", "host", []),
        p.ListUnits(7),
    ],
    ids=lambda request: type(request).__name__,
)
def test_refused_and_reading_requests_get_one_answer_and_change_nothing(plane, request_):
    put(plane, 2, "x", lengths=[1, 2])
    ask(plane, ROLLOUT, p.CreatePartition, "p", None, {"declared": p.DeclaredField("int64")})
    before = fingerprint(plane)
    (to,) = plane.handle(CRITIC, request_, 1.0)
    assert (to.client, to.reply.id) == (CRITIC, 7)
    assert fingerprint(plane) == before
    assert plane.next_deadline() is None


def fingerprint(plane):
    state = plane.state
    every = ask(plane, ACTOR, p.Describe, "p")
    stats = ask(plane, ACTOR, p.GetStats).value
    del stats["clients"], stats["producers"]
    for partition in stats["partitions"].values():
        partition.pop("tasks")
    return (
        stats, every.indexes, every.fields, every.tags, ask(plane, ACTOR, p.ListKeys, "p").keys,
        state.allocator.next_index, state.allocator.num_used, state.partitions["p"].table.size, state.tasks.by_name,
    )  # fmt: skip


OF_THE_FRONT = {p.Put, p.Hello, p.Goodbye, p.Cancel, p.EvictClient}


@pytest.mark.parametrize("verb", sorted(set(p.AnyRequest.__args__) - OF_THE_FRONT, key=lambda verb: verb.__name__))
def test_the_plane_knows_every_request_of_the_protocol(plane, verb):
    assert verb in plane.verbs


def test_a_cancelled_request_is_neither_carried_out_nor_answered_and_makes_way(plane):
    large = p.Fetch(1001, "p", "train", ["x"], 3, wait_s=9.0)
    assert plane.handle(ACTOR, large, 0.0) == []
    park(plane, 1, client="small")
    put(plane, 2)
    assert ask(plane, CRITIC, p.Cancel, 1001).value == "kept"
    own, served = plane.handle(ACTOR, p.Cancel(1002, 1001), 0.0)
    assert (own.client, own.reply) == (ACTOR, p.Done(1002, "removed"))
    assert batches([served]) == [("small", [0])]
    assert plane.next_deadline() is None


def test_a_cancelled_put_reserves_nothing(make_plane):
    plane = make_plane(capacity=1)
    samples = put(plane, 1)
    assert plane.handle(REWARDER, p.Reserve(1001, "p", 1), 0.0) == []
    plane.handle(REWARDER, p.Cancel(1002, 1001), 0.0)
    assert len(send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples))) == 1
    assert plane.state.allocator.num_used == 0
