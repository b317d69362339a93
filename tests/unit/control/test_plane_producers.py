# SPDX-License-Identifier: Apache-2.0
"""Producers that die: grace time, replacement, and an error in place of silence for those who wait."""

from __future__ import annotations

from control_kit import ACTOR, REWARDER, ROLLOUT, ask, batch, batches, fetch, park, publish, put, refused, reserve, seal

from transfer_queue import protocol as p


def grace(make_plane, seconds=5.0):
    return make_plane(producer_grace_s=seconds)


def test_a_consumer_whose_only_producer_died_is_told_after_the_grace_time(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 2, wait_s=600.0)
    assert plane.client_gone(ROLLOUT, now=10.0) == []
    assert plane.next_deadline() == 15.0
    assert plane.expire(14.9) == []
    ((client, reply),) = plane.expire(15.0)
    assert client == ACTOR
    refused(reply, "ProducersGoneError", "task 'train'", "partition 'p'", "field 'x'", "restart them")
    assert plane.next_deadline() is None


def test_a_replacement_within_the_grace_time_keeps_the_stream_alive(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 3, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=10.0)
    put(plane, 1, client="replacement", now=14.0)
    assert plane.expire(15.0) == []
    assert batches(publish(plane, reserve(plane, 1, client="replacement"), client="replacement", now=16.0)) != []


def test_a_replacement_that_leaves_on_purpose_ends_no_wait(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    plane.client_gone(ROLLOUT, now=1.0)
    put(plane, 1, client="replacement", now=2.0)
    plane.client_gone("replacement", now=3.0, died=False)
    assert isinstance(fetch(plane, 9, now=100.0), p.NotReady)


def test_what_is_ready_is_handed_out_though_the_producer_is_dead(make_plane):
    plane = grace(make_plane)
    put(plane, 3)
    plane.client_gone(ROLLOUT, now=1.0)
    assert batch(plane, 2, now=100.0) == [0, 1]
    refused(fetch(plane, 2, now=100.0), "ProducersGoneError", "field 'x'")


def test_a_producer_that_says_goodbye_is_not_dead(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 2)
    plane.client_gone(ROLLOUT, now=1.0, died=False)
    assert plane.expire(50.0) == []


def test_one_living_producer_of_a_field_is_enough(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, client="second")
    park(plane, 3, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    assert plane.expire(50.0) == []
    plane.client_gone("second", now=60.0)
    refused(plane.expire(65.0)[0].reply, "ProducersGoneError")


def test_the_dead_producer_of_another_field_or_partition_is_no_reason_to_give_up(make_plane):
    plane = grace(make_plane)
    samples = put(plane, 1, "x")
    publish(plane, samples, "rewards", client=REWARDER)
    put(plane, 1, partition="q", client=REWARDER)
    park(plane, 2, names=("x",))
    park(plane, 2, names=("x", "rewards"), task="judge")
    plane.client_gone(REWARDER, now=1.0)
    (told,) = plane.expire(6.0)
    refused(told.reply, "ProducersGoneError", "task 'judge'", "field 'rewards'")


def test_two_deaths_are_told_each_at_its_time(make_plane):
    plane = grace(make_plane)
    put(plane, 1, "x")
    publish(plane, [0], "y", client=REWARDER)
    park(plane, 2, names=("x",), wait_s=600.0)
    park(plane, 2, names=("y",), task="judge", wait_s=600.0)
    plane.client_gone(ROLLOUT, now=10.0)
    plane.client_gone(REWARDER, now=13.0)
    assert (plane.next_deadline(), len(plane.expire(15.0))) == (15.0, 1)
    assert (plane.next_deadline(), len(plane.expire(18.0))) == (18.0, 1)


def test_the_goodbye_of_the_last_after_the_death_of_another_is_told(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, client="second")
    park(plane, 3, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    plane.client_gone("second", now=2.0, died=False)
    refused(plane.expire(7.0)[0].reply, "ProducersGoneError", "field 'x'")


def test_a_sealed_stream_ends_whether_its_producers_live_or_not(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    seal(plane)
    plane.client_gone(ROLLOUT, now=1.0)
    assert batch(plane, 2, now=100.0) == [0]
    assert isinstance(fetch(plane, 2, now=100.0), p.Ended)


def test_a_partition_made_anew_knows_nothing_of_the_dead(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    plane.client_gone(ROLLOUT, now=1.0)
    ask(plane, ACTOR, p.ClearPartition, "p")
    park(plane, 1, wait_s=600.0)
    assert plane.expire(50.0) == []
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [1])]
