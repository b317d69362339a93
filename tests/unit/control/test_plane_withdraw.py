# SPDX-License-Identifier: Apache-2.0
"""A client that gives up while its answer is on the way leaves the queue as if it had not asked."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    clear,
    fetch,
    fields,
    indexes,
    park,
    publish,
    put,
    reserve,
    seal,
    send,
)
from transfer_queue.control.answered import _MOST, _MOST_NBYTES, Answered

from transfer_queue import protocol as p


def give_up(plane: Any, client: str, reply: Any) -> list[Any]:
    """All replies to the Withdraw of the request that this answered."""
    own, *others = send(plane, client, p.Withdraw, reply.id)
    assert own.reply.value == 1
    return others


def held(plane: Any, partition: str = "p") -> int:
    return int(ask(plane, ACTOR, p.GetStats).value["partitions"][partition]["held"])


# ---- writers ----


def test_a_reservation_that_its_writer_never_heard_of_makes_room_and_ends_the_wait_of_a_sealed_stream(make_plane):
    plane = make_plane(capacity=3)
    put(plane, 1)
    lost = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    seal(plane)
    park(plane, 2)
    assert ask(plane, CRITIC, p.Reserve, "q", 2) is None
    writer, reader = give_up(plane, ROLLOUT, lost)
    assert (writer.client, indexes(writer.reply)) == (CRITIC, [3, 4])
    assert batches([reader]) == [(ACTOR, [0])]
    assert plane.take_orphans() == []


def test_keys_and_leave_of_a_put_that_its_writer_never_heard_of_are_free_again(plane):
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old"], True, True)
    lost = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old", "new"], True, True, fields("x"), 60.0, ["x"])
    give_up(plane, ROLLOUT, lost)
    assert ask(plane, ACTOR, p.ResolveKeys, "p", ["old", "new"]).keys == ["old"]
    assert held(plane) == 1
    publish(plane, indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old"])))
    give_up(plane, CRITIC, ask(plane, CRITIC, p.ResolveKeys, "p", ["old"], True, True, fields("x"), 60.0, ["x"]))
    assert isinstance(ask(plane, ACTOR, p.Freeze, 1, 9.0), p.Frozen), "nobody is replacing values"


def test_a_key_that_another_writer_has_published_meanwhile_stays(plane):
    lost = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True)
    publish(plane, indexes(ask(plane, CRITIC, p.ResolveKeys, "p", ["u"], True, True)), client=CRITIC)
    give_up(plane, ROLLOUT, lost)
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {"u": {}}}


def test_inserted_samples_that_nobody_heard_of_are_gone_but_for_those_with_values(plane):
    ask(plane, ROLLOUT, p.CreatePartition, "p", 4)
    lost = ask(plane, ROLLOUT, p.Insert, "p", 3, ["x"])
    publish(plane, [1])
    give_up(plane, ROLLOUT, lost)
    assert indexes(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train")) == [1]
    put(plane, 3)
    assert batch(plane, 4) == [1, 3, 4, 5]
    assert isinstance(fetch(plane, 1), p.Ended), "four samples were published, as declared"


def test_a_reservation_for_the_next_put_goes_with_a_publish_that_was_given_up_and_the_samples_stay(plane):
    (own,) = publish(plane, reserve(plane, 2), reserve_next=2)
    give_up(plane, ROLLOUT, own.reply)
    assert isinstance(publish(plane, indexes(own.reply))[0].reply, p.Failed)
    assert batch(plane, 2) == [0, 1]


# ---- readers ----


def test_what_a_fetch_drew_for_nobody_is_drawn_again_and_first(plane):
    put(plane, 6)
    seal(plane)
    assert batch(plane, 2) == [0, 1]
    lost, kept = fetch(plane, 2), fetch(plane, 2)
    assert isinstance(fetch(plane, 2), p.Ended)
    give_up(plane, ACTOR, lost)
    assert ask(plane, ACTOR, p.ConsumptionStatus, "p", "train", True).value is False
    assert (indexes(kept), batch(plane, 2)) == ([4, 5], [2, 3])
    assert isinstance(fetch(plane, 2), p.Ended)


def test_samples_drawn_for_nobody_go_to_who_waits(plane):
    put(plane, 2)
    lost = fetch(plane, 2)
    park(plane, 2, client=CRITIC)
    assert batches(give_up(plane, ACTOR, lost)) == [(CRITIC, [0, 1])]


def test_the_next_batch_of_a_rank_that_never_heard_of_it_is_the_next_one_again(plane):
    put(plane, 8)
    lost, kept = fetch(plane, 2, 0), fetch(plane, 2, 0)
    give_up(plane, ACTOR, lost)
    assert [batch(plane, 2, 0) for _ in range(2)] == [[0, 1], [4, 5]]
    assert ack(plane, kept.token) == 1


def test_a_rank_may_ask_for_another_batch_than_the_one_it_never_heard_of(plane):
    put(plane, 6)
    publish(plane, [4], "y")
    give_up(plane, ACTOR, fetch(plane, 4, 0))
    assert batch(plane, 1, 0, names=("y",)) == [4]
    assert batch(plane, 2, 0) == [0, 1]
    assert batch(plane, 3, 0) == [2, 3, 5]


def test_samples_that_were_cleared_or_drawn_again_since_are_left_alone(plane):
    put(plane, 4)
    lost = fetch(plane, 2)
    clear(plane, [0])
    ask(plane, ACTOR, p.ResetConsumption, "p")
    assert batch(plane, 3) == [1, 2, 3]
    give_up(plane, ACTOR, lost)
    assert fetch(plane, 1).samples == 0
    lost = fetch(plane, 1, task="other")
    ask(plane, ACTOR, p.ClearPartition, "p")
    put(plane, 1)
    assert batch(plane, 1, task="other") == [4]
    give_up(plane, ACTOR, lost)
    assert fetch(plane, 1, task="other").samples == 0


def test_a_batch_that_was_named_stays_in_the_ledger_for_who_asks_again(plane):
    put(plane, 2)
    first = fetch(plane, 2, 0, 0)
    assert ask(plane, ACTOR, p.Withdraw, first.id).value == 0
    assert batch(plane, 2, 0, 0) == [0, 1]


# ---- what is kept for that ----


def test_of_a_client_so_many_answers_and_bytes_are_kept_and_none_after_it_left():
    undone: list[int] = []
    answered = Answered()
    for request in range(_MOST + 1):
        answered.remember("a", request, 8, lambda request=request: undone.append(request))
    assert [answered.undo("a", request) for request in (0, 1, 1, _MOST)] == [False, True, False, True]
    answered.remember("a", 1000, _MOST_NBYTES, lambda: undone.append(1000))
    assert [answered.undo("a", request) for request in (2, 1000)] == [False, True]
    answered.remember("a", 1001, 1, lambda: undone.append(1001))
    answered.remember("b", 1, 1, lambda: undone.append(-1))
    answered.forget("a")
    assert (answered.undo("a", 1001), answered.undo("b", 1)) == (False, True)
    assert undone == [1, _MOST, 1000, -1]


@pytest.mark.parametrize("died", [True, False])
def test_nothing_is_kept_of_a_client_that_left(plane, died):
    lost = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    plane.client_gone(ROLLOUT, 0.0, died)
    assert ask(plane, ROLLOUT, p.Withdraw, lost.id).value == 0
