# SPDX-License-Identifier: Apache-2.0
"""Writers: reserve, publish, cancel, pre-allocated samples, and writers that die."""

from __future__ import annotations

import numpy as np
import pytest
from control_kit import (
    ACTOR,
    FLOAT,
    INT,
    REWARDER,
    ROLLOUT,
    ask,
    batch,
    batches,
    cancel,
    chores,
    clear,
    fetch,
    fields,
    indexes,
    park,
    publish,
    put,
    refused,
    reserve,
    seal,
)

from tests.local_plane import tags_of
from transfer_queue import protocol as p


def status(plane, partition="p"):
    return indexes(ask(plane, ACTOR, p.ConsumptionStatus, partition, "train"))


def test_indexes_ascend_over_all_partitions_and_are_never_reused(plane):
    assert reserve(plane, 2, "p") == [0, 1]
    assert reserve(plane, 1, "q") == [2]
    clear(plane, [0, 1])
    ask(plane, ACTOR, p.ClearPartition, "q")
    assert reserve(plane, 2, "p") == [3, 4]


def test_nothing_is_visible_before_its_publish(plane):
    reserve(plane, 2)
    assert status(plane) == []
    assert isinstance(fetch(plane, 1), p.NotReady)
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["held"] == 2


def test_a_sample_is_ready_only_when_every_field_asked_for_is_there(plane):
    samples = put(plane, 2, "x")
    assert isinstance(fetch(plane, 1, names=("x", "y")), p.NotReady)
    publish(plane, samples[1:], "y", client=REWARDER)
    assert batch(plane, 1, names=("x", "y")) == [1]


def test_a_parked_fetch_is_answered_by_the_publish_that_completes_it(plane):
    samples = reserve(plane, 2)
    park(plane, 2)
    assert batches(publish(plane, samples[:1], completes=0)) == []
    assert batches(publish(plane, samples[1:])) == [(ACTOR, [0, 1])]
    assert plane.next_deadline() is None


def test_a_second_publish_of_a_field_replaces_it(plane):
    samples = put(plane, 1, "x")
    reply = ask(
        plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), {"x": p.FieldSpec("int64", (9,))}, describe=True
    )
    spec = p.FieldSpec("int64", None, True, False, bytes([9, 0, 0, 0]))
    assert reply.fields == {"x": spec}
    assert status(plane) == samples


def test_a_sample_named_twice_in_a_publish_counts_once(plane):
    samples = reserve(plane, 1)
    publish(plane, samples * 3)
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["published"] == 1
    assert batch(plane, 1) == samples


def test_tags_of_a_publish_merge_into_those_the_samples_have(plane):
    samples = put(plane, 1, lengths=[7])
    publish(plane, samples, tags={0: {"reward": 1.0}, 99: {"ignored": True}})
    assert tags_of(fetch(plane, 1)) == {0: {"total_lengths": 7, "reward": 1.0}}


@pytest.mark.parametrize("count", [0, -1])
def test_a_put_of_no_samples_is_refused(plane, count):
    refused(ask(plane, ROLLOUT, p.Reserve, "p", count), "InvalidRequestError", "at least one sample", str(count))
    assert ask(plane, ACTOR, p.ListPartitions).names == []


def declare(plane, name="p", **declared):
    return ask(plane, ROLLOUT, p.CreatePartition, name, None, declared)


def test_a_dtype_that_was_not_declared_is_refused_before_anything_is_reserved_or_visible(plane):
    declare(plane, x=p.DeclaredField("int64", (None,)))
    samples = put(plane, 1, "x")
    texts = ("field 'x'", "'p'", "dtype int64", "dtype float32")
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1, {"x": FLOAT}), "SchemaConflictError", *texts)
    refused(
        ask(plane, ROLLOUT, p.CheckFields, "p", p.pack_indexes(samples), {"x": FLOAT}), "SchemaConflictError", *texts
    )
    held = reserve(plane, 1)
    reply = ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(held), {"y": INT, "x": FLOAT}, {held[0]: {"v": 1}})
    refused(reply, "SchemaConflictError", *texts)
    assert status(plane) == samples
    assert not ask(plane, ACTOR, p.FieldStatus, "p", ["y"]).known


def test_the_shapes_of_a_declared_field_are_checked_when_samples_are_reserved(plane):
    declare(plane, x=p.DeclaredField("int64", (None, 2)))
    rows = p.FieldSpec("int64", None, True, row_shapes=np.array([[1, 2], [2, 3]], "<i4").tobytes())
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 2, {"x": rows}), "SchemaConflictError", "field 'x'")
    keyed = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["a", "b"], True, True, {"x": rows})
    refused(keyed, "SchemaConflictError", "field 'x'")
    assert status(plane) == []


def test_a_declaration_that_samples_contradict_is_refused_and_the_partition_is_as_it_was(plane):
    put(plane, 1, "x")
    refused(declare(plane, x=p.DeclaredField("float32")), "SchemaConflictError", "'x'", "dtype float32")
    assert declare(plane, y=p.DeclaredField("float32")).value is False
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1, {"y": INT}), "SchemaConflictError")


def test_a_write_is_told_that_samples_of_its_field_have_several_dtypes(plane):
    samples = put(plane, 1, "x")
    assert ask(plane, ROLLOUT, p.Reserve, "p", 1, {"x": FLOAT}).dtypes == {"x": ["int64", "float32"]}
    assert ask(plane, ROLLOUT, p.CheckFields, "p", p.pack_indexes(samples), {"x": FLOAT, "y": INT}).value == {
        "x": ["int64", "float32"]
    }


def test_objects_and_tensors_in_one_declared_field_are_a_conflict_that_names_both(plane):
    declare(plane, x=p.DeclaredField("int64"))
    samples = put(plane, 1, "x")
    objects = {"x": p.FieldSpec(None, None, is_non_tensor=True)}
    reply = ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), objects)
    refused(reply, "SchemaConflictError", "dtype int64", "plain objects")


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (p.FieldSpec("int64", None, True, False, b"\1\0\0\0" * 3), "12 bytes of row shapes for 2 rows"),
        (p.FieldSpec("int64", (2**40,)), "sizes go from 0 to"),
        (p.FieldSpec("int64", (-1,)), "sizes go from 0 to"),
    ],
)
def test_shapes_that_cannot_be_those_of_the_rows_leave_nothing_visible(plane, spec, part):
    held = reserve(plane, 2)
    reply = ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(held), {"x": INT, "y": spec}, {0: {"v": 1}})
    refused(reply, "InvalidRequestError", "field 'y'", part)
    assert status(plane) == []
    assert tags_of(ask(plane, ACTOR, p.Describe, "p", [], p.pack_indexes(held))) == {}


def test_tags_for_an_impossible_index_leave_nothing_visible(plane):
    held = reserve(plane, 1)
    reply = ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(held), fields("x"), {2**70: {"v": 1}})
    assert isinstance(reply, p.Failed)
    assert status(plane) == []


def test_a_publish_into_an_unknown_partition_names_those_that_exist(plane):
    put(plane, 1, partition="known")
    reply = ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes([0]), fields("x"))
    refused(reply, "UnknownPartitionError", "'p'", "'known'")


def test_a_publish_of_cleared_samples_is_refused_whole(plane):
    samples = reserve(plane, 3)
    clear(plane, samples[:1])
    (own,) = publish(plane, samples)
    refused(own.reply, "SampleClearedError", "1 of 3 samples", "[0]", "'p'")
    assert status(plane) == []


def test_check_fields_says_that_samples_were_cleared(plane):
    samples = put(plane, 2)
    clear(plane, samples[:1])
    reply = ask(plane, ROLLOUT, p.CheckFields, "p", p.pack_indexes(samples), fields("y"))
    refused(reply, "SampleClearedError", "[0]")
    assert ask(plane, ROLLOUT, p.CheckFields, "p", p.pack_indexes(samples[1:]), fields("y")).value == {}


# ---- cancel ----


def test_a_cancelled_reservation_is_given_back_and_its_values_are_a_chore(plane):
    own = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    other, live = reserve(plane, 1, client=REWARDER), put(plane, 1)
    assert cancel(plane, ROLLOUT, own) == ("undone", [])
    assert chores(plane) == indexes(own)
    publish(plane, other, client=REWARDER)
    assert status(plane) == other + live
    assert cancel(plane, ROLLOUT, own) == ("kept", [])


def test_a_call_of_another_client_is_not_cancelled(plane):
    own = ask(plane, ROLLOUT, p.Reserve, "p", 1)
    assert cancel(plane, REWARDER, own) == ("kept", [])
    assert isinstance(publish(plane, indexes(own), completes=own.id)[0].reply, p.Published)


def test_what_was_cleared_meanwhile_is_a_chore_again_for_values_may_have_come_later(plane):
    own = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    clear(plane, [0])
    cancel(plane, ROLLOUT, own)
    assert chores(plane) == [0, 1]
    own = ask(plane, ROLLOUT, p.Reserve, "q", 1)
    ask(plane, ACTOR, p.ClearPartition, "q")
    put(plane, 1, partition="q")
    cancel(plane, ROLLOUT, own)
    assert chores(plane) == [2]
    assert batch(plane, 1, partition="q") == [3]


def test_a_cancelled_write_ends_a_sealed_stream_that_waited_for_it(plane):
    held = ask(plane, ROLLOUT, p.Reserve, "p", 1)
    seal(plane)
    park(plane, 1)
    done, (told,) = cancel(plane, ROLLOUT, held)
    assert (done, type(told.reply)) == ("undone", p.Ended)


def test_tags_and_keys_of_a_cancelled_sample_are_forgotten(plane):
    reply = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["k"], create=True, hold=True)
    ask(plane, ROLLOUT, p.SetTags, {"p": {indexes(reply)[0]: {"v": 1}}})
    cancel(plane, ROLLOUT, reply)
    partition = plane.state.partitions["p"]
    assert (partition.tags, len(partition.keys)) == ({}, 0)


def test_cancelled_reservations_do_not_pile_up(plane):
    for _ in range(500):
        cancel(plane, ROLLOUT, ask(plane, ROLLOUT, p.Reserve, "p", 3))
    assert plane.state.partitions["p"].table.size < 200
    assert plane.calls.clients() == []


def test_what_a_publish_leaves_of_the_reservation_that_it_completes_is_given_back(plane):
    own = ask(plane, ROLLOUT, p.Reserve, "p", 4)
    publish(plane, [1, 2], completes=own.id)
    assert (status(plane), chores(plane)) == ([1, 2], [0, 3])
    seal(plane)
    assert batch(plane, 3) == [1, 2]


def test_a_published_write_cannot_be_undone(plane):
    own = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    publish(plane, indexes(own), completes=own.id)
    assert cancel(plane, ROLLOUT, own)[0] == "kept"
    plane.client_gone(ROLLOUT, 1.0)
    assert (status(plane), chores(plane)) == ([0, 1], [])


# ---- sealed partitions ----


def test_a_sealed_partition_takes_no_new_samples_but_more_fields(plane):
    samples = put(plane, 2)
    seal(plane)
    reply = ask(plane, ROLLOUT, p.Reserve, "p", 3)
    refused(reply, "InvalidRequestError", "'p' is sealed after 2 samples, 3 more were put", "another partition")
    publish(plane, samples, "y")
    assert batch(plane, 2, names=("x", "y")) == samples


def test_a_put_into_a_sealed_partition_is_refused_at_once_even_while_the_queue_is_full(make_plane):
    plane = make_plane(capacity=2)
    put(plane, 2)
    seal(plane)
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1), "InvalidRequestError", "sealed")


def test_writes_under_way_may_still_publish_after_the_seal(plane):
    samples = reserve(plane, 2)
    seal(plane)
    publish(plane, samples)
    assert batch(plane, 2) == samples


# ---- pre-allocated samples ----


def test_preallocated_samples_count_from_the_first_put_on_and_are_taken_lowest_first(make_plane):
    plane = make_plane(preallocate=4)
    assert put(plane, 1) == [0]
    assert status(plane) == [0, 1, 2, 3]
    assert put(plane, 2) == [1, 2]
    assert put(plane, 3) == [3, 4, 5]
    assert status(plane) == [0, 1, 2, 3, 4, 5]


def test_preallocated_samples_cannot_be_published_without_being_reserved(make_plane):
    plane = make_plane(preallocate=4)
    put(plane, 1)
    (own,) = publish(plane, [1])
    refused(own.reply, "InvalidRequestError", "pre-allocated")


def test_a_cancelled_put_leaves_as_many_preallocated_samples_under_new_indexes(make_plane):
    plane = make_plane(preallocate=3)
    cancel(plane, ROLLOUT, ask(plane, ROLLOUT, p.Reserve, "p", 2))
    assert status(plane) == [2, 3, 4]
    assert put(plane, 3) == [2, 3, 4]


def test_preallocation_happens_once_in_a_partitions_life(make_plane):
    plane = make_plane(preallocate=3)
    for _ in range(60):
        clear(plane, put(plane, 3))
    assert len(status(plane)) == 0


def test_a_seal_drops_preallocated_samples_that_nobody_took(make_plane):
    plane = make_plane(preallocate=4)
    put(plane, 3)
    seal(plane)
    assert status(plane) == [0, 1, 2]


# ---- insert ----


def test_inserted_samples_count_at_once_and_show_the_fields_asked_for_as_placeholders(plane):
    reply = ask(plane, ROLLOUT, p.Insert, "p", 2, ["x", "y"])
    assert (indexes(reply), reply.status) == ([0, 1], bytes(2))
    assert reply.fields == {"x": p.FieldSpec(None, None), "y": p.FieldSpec(None, None)}
    assert status(plane) == [0, 1]
    assert ask(plane, ACTOR, p.FieldStatus, "p", ["y", "x"]).status == bytes(4)


# ---- writers that die ----


def test_a_producer_killed_in_a_put_leaves_nothing_visible_and_its_values_are_a_chore(plane):
    reserve(plane, 2)
    kept = put(plane, 1)
    assert plane.client_gone(ROLLOUT, now=1.0) == []
    assert chores(plane) == [0, 1]
    assert chores(plane) == []
    assert status(plane) == kept
    (late,) = publish(plane, [0])
    refused(late.reply, "SampleClearedError", "[0]")


def test_the_death_of_a_parked_writer_lets_the_next_one_in(make_plane):
    plane = make_plane(capacity=4)
    put(plane, 2)
    assert ask(plane, "large", p.Reserve, "p", 3) is None
    put(plane, 1, client="small")
    assert ask(plane, "next", p.Reserve, "p", 4) is None
    assert ask(plane, "small", p.Insert, "p", 1) is not None
    clear(plane, [0, 1])
    assert ask(plane, "small", p.Reserve, "p", 2) is None, "together with the others it would overtake more than 3"
    (woken,) = plane.client_gone("large", now=1.0)
    assert woken.client == "small"


def test_reservations_of_a_dead_writer_make_room(make_plane):
    plane = make_plane(capacity=2)
    reserve(plane, 2)
    assert ask(plane, REWARDER, p.Reserve, "p", 2) is None
    (woken,) = plane.client_gone(ROLLOUT, now=1.0)
    assert (woken.client, indexes(woken.reply)) == (REWARDER, [2, 3])


def test_what_a_writer_held_when_it_was_cleared_is_a_chore_once_the_writer_is_dead(plane):
    first, second = reserve(plane, 2), reserve(plane, 1, partition="q")
    clear(plane, first[:1])
    ask(plane, ACTOR, p.ClearPartition, "q")
    ask(plane, ACTOR, p.ClearPartition, "p")
    plane.client_gone(ROLLOUT, now=1.0)
    assert sorted(chores(plane)) == first + second


def test_a_client_that_never_wrote_may_vanish_unnoticed(plane):
    put(plane, 1)
    assert plane.client_gone("stranger", now=1.0) == []
    assert chores(plane) == []
