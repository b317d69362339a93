# SPDX-License-Identifier: Apache-2.0
"""Writers at a full queue: they wait for room in turn, and get it from a clear, a seal or a cancel."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    REWARDER,
    ROLLOUT,
    ask,
    batch,
    clear,
    fetch,
    fields,
    indexes,
    publish,
    put,
    refused,
    reserve,
    seal,
    send,
)

from transfer_queue import protocol as p


def test_a_put_that_can_never_fit_is_refused_at_once(make_plane):
    reply = ask(make_plane(capacity=4), ROLLOUT, p.Reserve, "p", 5)
    refused(reply, "StorageFullError", "Storage capacity exceeded", "5 samples", "4 at most", "total_storage_size")


def test_a_put_waits_for_room_and_gets_it_from_a_clear(make_plane):
    plane = make_plane(capacity=3)
    samples = put(plane, 3)
    assert ask(plane, REWARDER, p.Reserve, "q", 2, wait_s=5.0) is None
    (own,) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[:1]))
    assert isinstance(own.reply, p.Cleared)
    (_, woken) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[1:]))
    assert (woken.client, indexes(woken.reply)) == (REWARDER, [3, 4])


def test_parked_writers_are_served_first_come_first_served(make_plane):
    plane = make_plane(capacity=3)
    samples = put(plane, 3)
    for name in ("first", "second"):
        assert ask(plane, name, p.Reserve, "p", 1) is None
    for name in ("first", "second"):
        replies = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes([samples.pop()]))
        assert [to.client for to in replies[1:]] == [name]


def test_a_large_put_that_waits_holds_up_no_small_ones_and_is_not_starved_by_them(make_plane):
    plane = make_plane(capacity=4)
    samples = put(plane, 3)
    assert ask(plane, "large", p.Reserve, "p", 2) is None
    small = [ask(plane, "small", p.Reserve, "p", 1)]
    assert ask(plane, "small", p.Reserve, "p", 1) is None
    small += [to.reply for to in send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[:1]))[1:]]
    assert [indexes(reply) for reply in small] == [[3], [4]]
    assert ask(plane, "small", p.Reserve, "p", 1) is None
    assert len(send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[1:2]))) == 1, "kept for the large one"
    replies = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[2:]))
    assert [to.client for to in replies[1:]] == ["large"]


def test_a_writer_that_waited_in_vain_is_told_what_to_do_and_makes_way(make_plane):
    plane = make_plane(capacity=3)
    put(plane, 2)
    assert ask(plane, "large", p.Reserve, "p", 2, wait_s=1.0, now=10.0) is None
    assert ask(plane, "larger", p.Reserve, "p", 3, wait_s=9.0, now=10.0) is None
    assert plane.next_deadline() == 11.0
    (told,) = plane.expire(11.0)
    texts = ("Storage capacity exceeded", "2 samples", "'p'", "waited 1.0 s", "1 of 3 are free", "put_timeout_s")
    refused(told.reply, "StorageFullError", *texts)
    (_, woken) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes([0, 1]))
    assert (woken.client, plane.state.waits.count) == ("larger", 0)


def test_who_waited_for_room_in_vain_is_told_which_tasks_hold_it_up(make_plane):
    plane = make_plane(capacity=6)
    put(plane, 4)
    fetch(plane, 3, 0, 0, task="train")
    batch(plane, 1, task="eval")
    put(plane, 2, partition="unread")
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1, wait_s=0.0), "StorageFullError")
    assert plane.held_up_by() == (
        " In the queue, task 'eval' has not consumed 3 samples, task 'train' has not consumed 1 sample, "
        "task 'train' has not acknowledged 3 samples, no task reads 2 samples."
    )


def test_who_waited_for_room_in_vain_is_told_how_many_samples_nothing_but_a_clear_keeps(make_plane):
    plane = make_plane(capacity=6)
    put(plane, 6)
    token = fetch(plane, 4, 0, 0, task="train").token
    fetch(plane, 2, 0, 1, task="train")
    ask(plane, ACTOR, p.Ack, "p", "train", [token])
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1, wait_s=0.0), "StorageFullError")
    assert plane.held_up_by() == (
        " In the queue, task 'train' has not acknowledged 2 samples, at least 4 samples are consumed and not cleared "
        "(clear_consumed, clear_partition). Let the trainer acknowledge sooner (checkpoints more often, or ack='step')."
    )


def test_a_writer_that_waits_is_refused_at_once_when_the_last_promised_sample_seals_the_partition(make_plane):
    plane = make_plane(capacity=4)
    put(plane, 3, partition="q")
    (last,) = reserve(plane, 1)
    send(plane, ACTOR, p.CreatePartition, "p", 1)
    assert ask(plane, REWARDER, p.Reserve, "p", 2, wait_s=50.0) is None
    (_, late) = publish(plane, [last])
    assert late.client == REWARDER
    refused(late.reply, "InvalidRequestError", "sealed after 1 samples", "2 more")


def test_a_writer_that_waits_for_a_partition_that_is_sealed_meanwhile_is_told_at_once(make_plane):
    plane = make_plane(capacity=1)
    put(plane, 1, partition="q")
    assert ask(plane, "first", p.Reserve, "q", 1) is None
    assert ask(plane, "second", p.Reserve, "p", 1) is None
    (_, told) = seal(plane)
    assert told.client == "second"
    refused(told.reply, "InvalidRequestError", "sealed")


@pytest.mark.parametrize("verb", [p.Reserve, p.Insert])
def test_so_many_samples_at_once_that_they_must_be_a_mistake_are_refused(plane, verb):
    for _ in range(2):
        refused(ask(plane, ROLLOUT, verb, "p", 2**31 - 1), "InvalidRequestError", "at most 16777216 samples at once")
    assert put(plane, 1) == [0]


def test_a_writer_with_no_time_to_wait_is_refused_by_the_request_itself(make_plane):
    plane = make_plane(capacity=1)
    put(plane, 1)
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1, wait_s=0.0), "StorageFullError", "waited 0.0 s")


def test_capacity_counts_reservations_and_samples_of_all_partitions_but_not_preallocated_ones(make_plane):
    plane = make_plane(capacity=4, preallocate=8)
    reserve(plane, 1, "p")
    put(plane, 3, partition="q")
    refused(ask(plane, ROLLOUT, p.Reserve, "r", 1, wait_s=0.0), "StorageFullError", "0 of 4 are free")
    ask(plane, ACTOR, p.ClearPartition, "q")
    reserve(plane, 3, "r")


def test_new_fields_of_known_samples_need_no_room(make_plane):
    plane = make_plane(capacity=1)
    samples = put(plane, 1)
    publish(plane, samples, "y")
    assert indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["nobody"], wait_s=0.0)) == []


def test_insert_and_new_keys_wait_for_room_too(make_plane):
    plane = make_plane(capacity=1)
    samples = put(plane, 1)
    assert ask(plane, "one", p.Insert, "p", 1, ["x"]) is None
    assert ask(plane, "two", p.ResolveKeys, "p", ["k"], create=True) is None
    (_, one) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples))
    assert (one.client, indexes(one.reply)) == ("one", [1])
    (_, two) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes([1]))
    assert (two.client, two.reply.keys) == ("two", ["k"])


def test_what_needs_no_room_waits_behind_nobody_who_does(make_plane):
    plane = make_plane(capacity=2)
    known = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u", "v"], True))
    packed = p.pack_indexes(known)
    assert ask(plane, REWARDER, p.Reserve, "p", 1) is None
    assert indexes(ask(plane, ACTOR, p.ResolveKeys, "p", ["u"])) == known[:1]
    assert indexes(ask(plane, ACTOR, p.ResolveKeys, "p", ["nobody"])) == []
    assert indexes(ask(plane, ACTOR, p.ResolveKeys, "p", ["v", "u"], True, True, fields("x"))) == known[::-1]
    assert ask(plane, ACTOR, p.CheckFields, "p", packed, fields("x")).value == {}
    assert isinstance(publish(plane, known)[0].reply, p.Published)
    assert ask(plane, ACTOR, p.ResolveKeys, "p", ["u", "new"], True) is None, "one new key needs room"
    assert clear(plane, known) == known


def test_a_seal_ends_the_wait_of_a_writer_as_soon_as_its_turn_comes(make_plane):
    plane = make_plane(capacity=1)
    put(plane, 1)
    assert ask(plane, "late", p.Reserve, "p", 1) is None
    (_, late) = seal(plane)
    refused(late.reply, "InvalidRequestError", "sealed")
