# SPDX-License-Identifier: Apache-2.0
"""What is being saved stays meanwhile: what is cleared is kept for the save, and writers that would replace it wait."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    FLOAT,
    INT,
    REWARDER,
    ROLLOUT,
    ask,
    batch,
    cancel,
    chores,
    clear,
    clear_consumed,
    indexes,
    publish,
    put,
    refused,
    reserve,
    send,
)

from transfer_queue import protocol as p

SAVER = "saver"


def test_what_is_cleared_meanwhile_is_hidden_at_once_and_dropped_afterwards(plane):
    put(plane, 4)
    put(plane, 2, partition="q")
    frozen = ask(plane, SAVER, p.Freeze)
    late = put(plane, 1)
    assert clear(plane, [0, 1, *late]) == late
    assert indexes(ask(plane, ACTOR, p.ClearPartition, "q")) == []
    assert batch(plane, 2) == [2, 3]
    assert clear_consumed(plane) == []
    assert indexes(ask(plane, SAVER, p.Thaw, frozen.id)) == [0, 1, 2, 3, 4, 5]
    assert indexes(ask(plane, SAVER, p.Thaw, frozen.id)) == []


@pytest.mark.parametrize("client", [SAVER, CRITIC])
def test_two_may_save_at_a_time(plane, client):
    put(plane, 3)
    first, second = ask(plane, SAVER, p.Freeze), ask(plane, client, p.Freeze)
    assert clear(plane, [0]) == []
    assert indexes(ask(plane, SAVER, p.Thaw, first.id)) == []
    assert clear(plane, [1]) == []
    assert indexes(ask(plane, client, p.Thaw, second.id)) == [0, 1]


def test_what_a_saver_kept_is_dropped_when_it_ends(plane):
    put(plane, 2)
    ask(plane, SAVER, p.Freeze)
    clear(plane, [1])
    plane.client_gone(SAVER, 0.0)
    assert chores(plane) == [1]
    assert clear(plane, [0]) == [0]


def test_a_put_that_replaces_values_waits_until_they_are_read(plane):
    ask(plane, SAVER, p.CreatePartition, "p", None, {"x": p.DeclaredField("int64")})
    mine = p.pack_indexes(put(plane, 2))
    frozen = ask(plane, SAVER, p.Freeze)
    other = p.pack_indexes(put(plane, 1))
    assert isinstance(ask(plane, REWARDER, p.CheckFields, "p", other, {"x": INT}, 9.0), p.Done), "not being saved"
    assert isinstance(ask(plane, REWARDER, p.CheckFields, "p", mine, {"r": INT}, 9.0), p.Done), "replaces nothing"
    assert ask(plane, REWARDER, p.CheckFields, "p", mine, {"x": INT}, 9.0) is None
    assert [type(to.reply) for to in send(plane, SAVER, p.Thaw, frozen.id)] == [p.Cleared, p.Done]
    refused(ask(plane, REWARDER, p.CheckFields, "p", mine, {"x": FLOAT}), "SchemaConflictError")


def test_a_put_by_key_that_replaces_values_waits_and_new_keys_and_tags_do_not(plane):
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True))
    publish(plane, samples, "x")
    frozen = ask(plane, SAVER, p.Freeze)
    keyed = {"create": True, "hold": True, "wait_s": 9.0}
    assert ask(plane, REWARDER, p.ResolveKeys, "p", ["u"], **keyed, writes=["x"]) is None
    assert len(indexes(ask(plane, REWARDER, p.ResolveKeys, "p", ["v"], **keyed, writes=["x"]))) == 1
    assert indexes(ask(plane, REWARDER, p.ResolveKeys, "p", ["u"], **keyed)) == samples
    assert indexes(ask(plane, REWARDER, p.ResolveKeys, "p", ["u"], **keyed, writes=["r"])) == samples
    (_, answer) = send(plane, SAVER, p.Thaw, frozen.id)
    assert indexes(answer.reply) == samples


def test_a_put_that_waits_for_a_save_holds_up_no_other_put(make_plane):
    plane = make_plane(capacity=3)
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True))
    publish(plane, samples, "x")
    ask(plane, SAVER, p.Freeze)
    assert ask(plane, REWARDER, p.ResolveKeys, "p", ["u"], True, True, {}, 9.0, ["x"]) is None
    assert reserve(plane, 2) == [1, 2]


def test_a_put_by_key_that_gets_room_while_values_that_it_replaces_are_saved_waits_for_that_too(make_plane):
    plane = make_plane(capacity=2)
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True))
    publish(plane, samples, "x")
    other = put(plane, 1)
    assert ask(plane, REWARDER, p.ResolveKeys, "p", ["u", "v"], True, True, {}, 9.0, ["x"]) is None, "there is no room"
    frozen = ask(plane, SAVER, p.Freeze)
    assert [to.client for to in send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(other))] == [ACTOR]
    (_, answer) = send(plane, SAVER, p.Thaw, frozen.id)
    assert (answer.client, indexes(answer.reply)) == (REWARDER, [*samples, 2])


def test_a_put_that_waits_for_a_save_in_vain_is_told_so(plane):
    mine = p.pack_indexes(put(plane, 2))
    ask(plane, SAVER, p.Freeze)
    assert ask(plane, REWARDER, p.CheckFields, "p", mine, {"x": INT}, 9.0) is None
    assert plane.expire(8.5) == []
    (late,) = plane.expire(9.0)
    refused(late.reply, "CheckpointError", "'p'", "waited 9.0 s", "put_timeout_s")


def leave(plane: Any) -> tuple[bytes, Any]:
    """REWARDER got leave to replace "x" of a sample."""
    mine = p.pack_indexes(put(plane, 1))
    reply = ask(plane, REWARDER, p.CheckFields, "p", mine, {"x": INT})
    assert isinstance(reply, p.Done)
    return mine, reply


@pytest.mark.parametrize("how", ["publish", "cancel", "end"])
def test_a_save_waits_for_writers_that_are_replacing_values(plane, how):
    mine, checked = leave(plane)
    plane.received(REWARDER, [checked.id])  # says nothing about the write
    assert ask(plane, SAVER, p.Freeze, 9.0) is None
    assert ask(plane, CRITIC, p.CheckFields, "p", mine, {"x": INT}, 9.0) is None, "a save that waits goes first"
    if how == "publish":
        replies = send(plane, REWARDER, p.Publish, "p", mine, {"x": INT}, completes=checked.id)[1:]
    elif how == "cancel":
        replies = send(plane, REWARDER, p.Cancel, checked.id)[1:]
    else:
        replies = plane.client_gone(REWARDER, 0.0)
    ((client, frozen),) = replies
    assert (client, type(frozen)) == (SAVER, p.Frozen)
    thawed = send(plane, SAVER, p.Thaw, frozen.id)
    assert [(to.client, type(to.reply)) for to in thawed] == [(SAVER, p.Cleared), (CRITIC, p.Done)]


def test_a_save_that_is_cancelled_ends_and_what_it_kept_is_deleted(plane):
    put(plane, 1)
    frozen = ask(plane, SAVER, p.Freeze)
    plane.received(SAVER, [frozen.id])
    clear(plane, [0])
    assert cancel(plane, SAVER, frozen)[0] == "undone"
    assert chores(plane) == [0]


def test_a_put_that_replaces_nothing_holds_up_no_save(plane):
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True))
    publish(plane, samples, "x")
    keyed = {"create": True, "hold": True}
    assert indexes(ask(plane, REWARDER, p.ResolveKeys, "p", ["u"], **keyed, writes=["r"])) == samples
    assert indexes(ask(plane, REWARDER, p.ResolveKeys, "p", ["v"], **keyed, writes=["x"])) == [1]
    assert isinstance(ask(plane, REWARDER, p.CheckFields, "p", p.pack_indexes(samples), {"r": INT}), p.Done)
    assert isinstance(ask(plane, SAVER, p.Freeze), p.Frozen)


def test_a_writer_that_never_says_what_became_of_its_put_holds_up_a_save_for_so_long_only(plane):
    mine, _ = leave(plane)
    assert ask(plane, SAVER, p.Freeze, 9.0) is None
    (answer,) = plane.expire(9.0)
    assert isinstance(answer.reply, p.Frozen)
    assert ask(plane, CRITIC, p.CheckFields, "p", mine, {"x": INT}, 99.0) is None
    assert plane.next_deadline() == 99.0


def test_a_put_for_which_a_save_waited_in_vain_is_refused_while_its_values_are_saved(plane):
    mine = p.pack_indexes(put(plane, 1))
    first, second = (ask(plane, REWARDER, p.CheckFields, "p", mine, {"x": INT}) for _ in range(2))
    new = ask(plane, REWARDER, p.CheckFields, "p", mine, {"r": INT})
    ask(plane, SAVER, p.Freeze, 9.0)
    (answer,) = plane.expire(9.0)
    refused(
        ask(plane, REWARDER, p.Publish, "p", mine, {"x": INT}, completes=first.id, now=9.5), "CheckpointError", "9.5 s"
    )
    assert isinstance(ask(plane, REWARDER, p.Publish, "p", mine, {"r": INT}, completes=new.id), p.Published)
    ask(plane, SAVER, p.Thaw, answer.reply.id)
    assert isinstance(ask(plane, REWARDER, p.Publish, "p", mine, {"x": INT}, completes=second.id), p.Published)


@pytest.mark.parametrize("what", ["new field", "new key"])
def test_a_save_waits_for_a_put_of_what_another_has_put_since_it_began(plane, what):
    """When it began there was nothing to replace."""
    if what == "new field":
        begin: Any = (p.CheckFields, "p", p.pack_indexes(put(plane, 1)), {"r": INT})
    else:
        begin = (p.ResolveKeys, "p", ["u"], True, True, {"r": INT}, 9.0, ["r"])
    first, second = ask(plane, REWARDER, *begin), ask(plane, CRITIC, *begin)
    ask(plane, CRITIC, p.Publish, "p", p.pack_indexes([0]), {"r": INT}, completes=second.id)
    assert ask(plane, SAVER, p.Freeze, 9.0) is None
    replies = send(plane, REWARDER, p.Publish, "p", p.pack_indexes([0]), {"r": INT}, completes=first.id)
    assert [(to.client, type(to.reply)) for to in replies] == [(REWARDER, p.Published), (SAVER, p.Frozen)]
