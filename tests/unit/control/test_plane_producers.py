# SPDX-License-Identifier: Apache-2.0
"""Producers that die: grace time, replacement, and an error in place of silence for those who wait."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    REWARDER,
    ROLLOUT,
    ask,
    batch,
    batches,
    fetch,
    fields,
    new_plane,
    park,
    publish,
    put,
    refused,
    reserve,
    seal,
)
from control_model import ProducersModel
from hypothesis import given, settings
from hypothesis import strategies as st

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
    refused(reply, "ProducersGoneError", "task 'train'", "samples of 'p'", "producers of 'x'", "restart them")
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
    refused(fetch(plane, 2, now=100.0), "ProducersGoneError", "producers of 'x'")


def test_a_producer_that_says_goodbye_is_not_dead(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 2)
    plane.client_gone(ROLLOUT, now=1.0, died=False)
    assert plane.expire(50.0) == []


def test_producers_that_died_dont_count_where_new_ones_are_expected(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    batch(plane, 1)
    plane.client_gone(ROLLOUT, now=1.0)
    refused(fetch(plane, 1, now=10.0), "ProducersGoneError")
    assert ask(plane, ACTOR, p.ExpectProducers, now=10.0).value is True
    park(plane, 1, wait_s=600.0, now=10.0)
    assert plane.expire(500.0) == []
    put(plane, 1, client="replacement", now=500.0)
    park(plane, 1, wait_s=600.0, now=500.0)
    plane.client_gone("replacement", now=501.0)
    refused(plane.expire(506.0)[0].reply, "ProducersGoneError", "producers of 'x'")


def test_a_producer_that_said_goodbye_after_an_error_is_dead_once_its_exit_is_noted(make_plane):
    """Python says goodbye at its end, whether the program failed or not."""
    plane = grace(make_plane)
    put(plane, 1, client="rollout-0_71.ab")
    park(plane, 2, wait_s=600.0)
    plane.client_gone("rollout-0_71.ab", now=1.0, died=False)
    assert ask(plane, ACTOR, p.NoteExit, "rollout-0", "pid 71 ended with exit code 1", "ValueError: x", now=2.0).value
    (told,) = plane.expire(50.0)
    refused(told.reply, "ProducersGoneError", "last client rollout-0_71.ab, pid 71 ended with exit code 1, which said")


def test_a_planned_end_is_known_until_a_producer_of_that_name_comes_again(make_plane):
    plane = grace(make_plane)
    put(plane, 1, client="rollout-0_71.ab")
    ask(plane, ACTOR, p.NoteExit, "rollout-0", "ended with its run", "", True)
    plane.client_gone("rollout-0_71.ab", now=1.0)
    assert ask(plane, ACTOR, p.GetStats, now=50.0).value["lost_producers"]["x"]["planned"]
    put(plane, 1, client="rollout-0_72.cd", now=60.0)
    plane.client_gone("rollout-0_72.cd", now=61.0)
    lost = ask(plane, ACTOR, p.GetStats, now=90.0).value["lost_producers"]
    assert lost == {"x": {"client": "rollout-0_72.cd"}}


def test_one_living_producer_of_a_field_is_enough(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, client="second")
    park(plane, 3, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    assert plane.expire(50.0) == []
    plane.client_gone("second", now=60.0)
    refused(plane.expire(65.0)[0].reply, "ProducersGoneError")


def test_the_dead_producer_of_another_field_is_no_reason_to_give_up(make_plane):
    plane = grace(make_plane)
    samples = put(plane, 1, "x")
    publish(plane, samples, "rewards", client=REWARDER)
    park(plane, 2, names=("x",))
    park(plane, 2, names=("x", "rewards"), task="judge")
    plane.client_gone(REWARDER, now=1.0)
    (told,) = plane.expire(6.0)
    refused(told.reply, "ProducersGoneError", "task 'judge'", "producers of 'rewards'")


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


def test_when_the_last_one_leaves_on_purpose_an_earlier_death_is_no_reason_to_give_up(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, client="second")
    park(plane, 3, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    plane.client_gone("second", now=2.0, died=False)
    assert plane.expire(50.0) == []


def test_a_death_after_the_last_goodbye_is_told(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, client="second")
    park(plane, 3, wait_s=600.0)
    plane.client_gone("second", now=1.0, died=False)
    plane.client_gone(ROLLOUT, now=2.0)
    refused(plane.expire(7.0)[0].reply, "ProducersGoneError", "producers of 'x'")


def test_a_session_that_only_reserved_is_a_living_producer(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 2, wait_s=600.0)
    ask(plane, "second", p.Reserve, "q", 1, fields("x"))
    plane.client_gone(ROLLOUT, now=1.0)
    assert plane.expire(50.0) == []
    plane.client_gone("second", now=60.0)
    refused(plane.expire(65.0)[0].reply, "ProducersGoneError")


def test_a_session_that_only_reserved_and_left_says_nothing_about_those_that_published(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    park(plane, 2, wait_s=600.0)
    ask(plane, "second", p.Reserve, "q", 1, fields("x"))
    plane.client_gone(ROLLOUT, now=1.0)
    ((client, reply),) = plane.client_gone("second", now=60.0, died=False)
    assert client == ACTOR
    refused(reply, "ProducersGoneError")


def test_a_producer_that_dies_in_its_first_put_is_told(make_plane):
    plane = grace(make_plane)
    ask(plane, ROLLOUT, p.Reserve, "p", 1, fields("x"))
    park(plane, 1, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    refused(plane.expire(6.0)[0].reply, "ProducersGoneError")


def test_a_sealed_stream_ends_whether_its_producers_live_or_not(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    seal(plane)
    plane.client_gone(ROLLOUT, now=1.0)
    assert batch(plane, 2, now=100.0) == [0]
    assert isinstance(fetch(plane, 2, now=100.0), p.Ended)


@pytest.mark.parametrize("parks_first", [True, False])
def test_producers_that_died_before_the_next_partition_was_filled_are_told_to_those_who_wait_for_it(
    make_plane, parks_first
):
    plane = grace(make_plane)
    put(plane, 1)
    ask(plane, ACTOR, p.ClearPartition, "p")
    if parks_first:
        park(plane, 1, partition="q", wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    if parks_first:
        refused(plane.expire(6.0)[0].reply, "ProducersGoneError", "samples of 'q'")
    refused(fetch(plane, 1, partition="q", now=6.0), "ProducersGoneError", "samples of 'q'")
    assert fetch(plane, 1, partition="q", now=7.0, names=("y",), wait_s=9.0) is None, "nobody knows of that field"


def test_a_producer_alive_in_another_partition_is_one_for_all(make_plane):
    plane = grace(make_plane)
    put(plane, 1)
    put(plane, 1, partition="q", client="second")
    park(plane, 2, wait_s=600.0)
    plane.client_gone(ROLLOUT, now=1.0)
    assert plane.expire(50.0) == []


def test_what_is_known_of_fields_does_not_grow_with_sessions_that_leave(make_plane):
    plane = grace(make_plane)
    for i in range(50):
        put(plane, 1, f"field {i}", client=f"client {i}")
        plane.client_gone(f"client {i}", now=0.0, died=False)
    assert ask(plane, ACTOR, p.GetStats).value["producers"] == {}


SESSIONS, FIELDS = ("anna", "bert", "carl"), ("x", "y")
STEP = st.one_of(
    st.tuples(st.sampled_from(["announced", "published"]), st.sampled_from(SESSIONS), st.sampled_from(FIELDS)),
    st.tuples(st.just("gone"), st.sampled_from(SESSIONS), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([1.0, 4.0, 6.0]), st.none()),
)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.lists(STEP, max_size=30))
def test_producers_are_lost_when_none_is_left_and_the_last_one_to_end_died_longer_ago_than_the_grace_time(steps):
    plane, model, now, waiting = new_plane(producer_grace_s=5.0), ProducersModel(), 0.0, set()
    for kind, who, what in steps:
        for name in sorted({*FIELDS} - waiting - {name for name in FIELDS if model.lost([name], now, 5.0)}):
            park(plane, 1, partition="nowhere", names=(name,), client=name, wait_s=1e6, now=now)
            waiting.add(name)
        told = []
        if kind == "time":
            now += who
        elif kind == "gone":
            told = plane.client_gone(who, now, what)
            model.gone(who, what, now)
        elif kind == "announced":
            ask(plane, who, p.Reserve, "q", 1, fields(what), now=now)
            model.announced(who, [what])
        else:
            put(plane, 1, what, client=who, now=now)
            model.published(who, [what])
        told += plane.expire(now)
        lost = {name for name in FIELDS if model.lost([name], now, 5.0)}
        assert sorted(to.client for to in told) == sorted(lost & waiting), "those who wait are told"
        for to in told:
            refused(to.reply, "ProducersGoneError", f"producers of {to.client!r}")
        waiting -= lost
        now_lost = [fetch(plane, 1, partition="nowhere", names=(name,), now=now) for name in FIELDS]
        assert [isinstance(reply, p.Failed) for reply in now_lost] == [name in lost for name in FIELDS]
