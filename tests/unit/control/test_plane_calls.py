# SPDX-License-Identifier: Apache-2.0
"""One effect per call: a cancelled call is undone while its answer is on the way, and a retry changes nothing."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    cancel,
    chores,
    clear,
    clear_consumed,
    fetch,
    fields,
    indexes,
    park,
    publish,
    put,
    refused,
    seal,
    send,
)

from transfer_queue import protocol as p


def held(plane, partition="p"):
    return ask(plane, ACTOR, p.GetStats).value["partitions"][partition]["held"]


# ---- writers ----


def test_a_reservation_that_its_writer_never_heard_of_makes_room_and_ends_the_wait_of_a_sealed_stream(make_plane):
    plane = make_plane(capacity=3)
    put(plane, 1)
    lost = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    seal(plane)
    park(plane, 2)
    assert ask(plane, CRITIC, p.Reserve, "q", 2) is None
    done, told = cancel(plane, ROLLOUT, lost)
    reader, writer = sorted(told)
    assert done == "undone"
    assert (writer.client, indexes(writer.reply)) == (CRITIC, [3, 4])
    assert batches([reader]) == [(ACTOR, [0])]
    assert chores(plane) == [1, 2]


def test_keys_and_leave_of_a_put_that_its_writer_never_heard_of_are_free_again(plane):
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old"], True, True)
    lost = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old", "new"], True, True, fields("x"), 60.0, ["x"])
    cancel(plane, ROLLOUT, lost)
    assert ask(plane, ACTOR, p.ResolveKeys, "p", ["old", "new"]).keys == ["old"]
    assert held(plane) == 1
    publish(plane, indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", ["old"])))
    cancel(plane, CRITIC, ask(plane, CRITIC, p.ResolveKeys, "p", ["old"], True, True, fields("x"), 60.0, ["x"]))
    assert isinstance(ask(plane, ACTOR, p.Freeze, 9.0), p.Frozen), "nobody is replacing values"


def test_a_key_that_another_writer_has_published_meanwhile_stays(plane):
    lost = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u"], True, True)
    publish(plane, indexes(ask(plane, CRITIC, p.ResolveKeys, "p", ["u"], True, True)), client=CRITIC)
    cancel(plane, ROLLOUT, lost)
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {"u": {}}}


def test_inserted_samples_that_nobody_heard_of_are_gone_but_for_those_with_values(plane):
    ask(plane, ROLLOUT, p.CreatePartition, "p", 4)
    lost = ask(plane, ROLLOUT, p.Insert, "p", 3, ["x"])
    publish(plane, [1])
    cancel(plane, ROLLOUT, lost)
    assert indexes(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train")) == [1]
    put(plane, 3)
    assert batch(plane, 4) == [1, 3, 4, 5]
    assert isinstance(fetch(plane, 1), p.Ended), "four samples were published, as declared"


def test_inserted_samples_that_got_tags_meanwhile_stay(plane):
    lost = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["u", "v"], True)
    ask(plane, CRITIC, p.SetTags, {"p": {0: {"a": 1}}})
    assert cancel(plane, ROLLOUT, lost)[0] == "undone"
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {"u": {"a": 1}}}


# ---- readers ----


def test_what_a_fetch_drew_for_nobody_is_drawn_again_and_first(plane):
    put(plane, 6)
    seal(plane)
    assert batch(plane, 2) == [0, 1]
    lost, kept = fetch(plane, 2), fetch(plane, 2)
    assert isinstance(fetch(plane, 2), p.Ended)
    cancel(plane, ACTOR, lost)
    assert ask(plane, ACTOR, p.ConsumptionStatus, "p", "train", True).value is False
    assert (indexes(kept), batch(plane, 2)) == ([4, 5], [2, 3])
    assert isinstance(fetch(plane, 2), p.Ended)


def test_samples_drawn_for_nobody_go_to_who_waits(plane):
    put(plane, 2)
    lost = fetch(plane, 2)
    park(plane, 2, client=CRITIC)
    assert batches(cancel(plane, ACTOR, lost)[1]) == [(CRITIC, [0, 1])]


def test_the_next_batch_of_a_rank_that_never_heard_of_it_is_the_next_one_again(plane):
    put(plane, 8)
    lost, kept = fetch(plane, 2, 0), fetch(plane, 2, 0)
    cancel(plane, ACTOR, lost)
    assert [batch(plane, 2, 0) for _ in range(2)] == [[0, 1], [4, 5]]
    assert ack(plane, kept.token) == 1


def test_a_rank_may_ask_for_another_batch_than_the_one_it_never_heard_of(plane):
    put(plane, 6)
    publish(plane, [4], "y")
    cancel(plane, ACTOR, fetch(plane, 4, 0))
    assert batch(plane, 1, 0, names=("y",)) == [4]
    assert batch(plane, 2, 0) == [0, 1]
    assert batch(plane, 3, 0) == [2, 3, 5]


def test_samples_that_were_cleared_or_drawn_again_since_are_left_alone(plane):
    put(plane, 4)
    lost = fetch(plane, 2)
    clear(plane, [0])
    ask(plane, ACTOR, p.ResetConsumption, "p")
    assert batch(plane, 3) == [1, 2, 3]
    cancel(plane, ACTOR, lost)
    assert fetch(plane, 1).samples == 0
    lost = fetch(plane, 1, task="other")
    ask(plane, ACTOR, p.ClearPartition, "p")
    put(plane, 1)
    assert batch(plane, 1, task="other") == [4]
    cancel(plane, ACTOR, lost)
    assert fetch(plane, 1, task="other").samples == 0


def test_a_batch_that_was_named_stays_in_the_ledger_for_who_asks_again(plane):
    put(plane, 2)
    first = fetch(plane, 2, 0, 0)
    assert cancel(plane, ACTOR, first) == ("kept", [])
    assert batch(plane, 2, 0, 0) == [0, 1]


def test_what_an_anonymous_reader_has_not_read_yet_is_not_cleared(plane):
    put(plane, 4)
    first, second = fetch(plane, 2), fetch(plane, 2)
    assert clear_consumed(plane) == []
    plane.received(ACTOR, [first.id, second.id])
    assert clear_consumed(plane) == []
    plane.read(ACTOR, [second.id])
    assert clear_consumed(plane) == [2, 3]
    plane.read(ACTOR, [first.id, second.id, 999])
    assert clear_consumed(plane) == [0, 1]
    assert [call for call in plane.calls.of(ACTOR) if call.kind is p.Fetch] == []


def test_what_a_reader_that_ends_had_received_is_cleared_and_never_given_again(plane):
    put(plane, 4)
    received, lost = fetch(plane, 2), fetch(plane, 2)
    plane.received(ACTOR, [received.id])
    plane.client_gone(ACTOR, 0.0)
    assert indexes(lost) == [2, 3]
    assert clear_consumed(plane) == [0, 1]
    assert batch(plane, 2, client=CRITIC) == [2, 3]
    assert isinstance(fetch(plane, 1, client=CRITIC), p.NotReady)


def test_a_batch_that_was_read_is_never_given_again_although_its_answer_was_not_said_to_be_received(plane):
    put(plane, 2)
    given = fetch(plane, 2)
    plane.read(ACTOR, [given.id])
    assert cancel(plane, ACTOR, given)[0] == "kept"
    plane.client_gone(ACTOR, 0.0)
    assert fetch(plane, 1, client=CRITIC).samples == 0


def test_batches_with_their_values_and_those_of_a_ledger_need_no_word_that_they_were_read(plane):
    put(plane, 4)
    whole, ranked = fetch(plane, 2, with_values=True), fetch(plane, 2, 0)
    assert clear_consumed(plane) == []
    plane.received(ACTOR, [whole.id, ranked.id])
    assert clear_consumed(plane) == [0, 1]
    assert ack(plane, ranked.token) == 1
    assert clear_consumed(plane) == [2, 3]


def test_only_batches_are_read(plane):
    put(plane, 2)
    reserved = ask(plane, ACTOR, p.Reserve, "p", 1)
    plane.read(ACTOR, [reserved.id])
    assert held(plane) == 1
    assert cancel(plane, ACTOR, reserved)[0] == "undone"


def test_what_is_cleared_by_name_is_gone_whoever_may_still_read_it(plane):
    put(plane, 4)
    given = fetch(plane, 4)
    plane.received(ACTOR, [given.id])
    assert clear(plane, [1]) == [1]
    asked = ask(plane, CRITIC, p.ClearConsumed, "p", [], True)
    assert (asked.held_by, asked.readers) == ({"train": 3}, {ACTOR: 3})
    assert indexes(ask(plane, CRITIC, p.ClearPartition, "p")) == [0, 2, 3]
    put(plane, 1)
    assert batch(plane, 1, client=CRITIC) == [4]
    assert clear_consumed(plane) == [4], "the other partition of this name was never given to the first reader"


def test_a_clear_names_the_clients_that_may_still_read_and_how_many_samples(plane):
    put(plane, 6)
    for client, count, task in [(ACTOR, 2, "train"), (ACTOR, 3, "other"), (CRITIC, 1, "train")]:
        plane.received(client, [fetch(plane, count, client=client, task=task).id])
    asked = ask(plane, ROLLOUT, p.ClearConsumed, "p", [], True)
    assert (asked.held_by, asked.readers) == ({"train": 6, "other": 6}, {ACTOR: 3, CRITIC: 1})
    ask(plane, ROLLOUT, p.ResetConsumption, "p")
    asked = ask(plane, ROLLOUT, p.ClearConsumed, "p", [], True)
    assert (asked.held_by, asked.readers) == ({"train": 6, "other": 6}, {ACTOR: 3, CRITIC: 1})
    for client in (ACTOR, CRITIC):
        plane.client_gone(client, 0.0)
    assert ask(plane, ROLLOUT, p.ClearConsumed, "p", [], True).readers == {}


# ---- what is kept for that, and for how long ----


def test_what_was_received_is_not_undone(plane):
    inserted, given = ask(plane, ROLLOUT, p.Insert, "p", 2, ["x"]), None
    put(plane, 2)
    given = fetch(plane, 2)
    plane.received(ROLLOUT, [inserted.id])
    plane.received(ACTOR, [given.id, 999])
    assert (cancel(plane, ROLLOUT, inserted)[0], cancel(plane, ACTOR, given)[0]) == ("kept", "kept")
    plane.client_gone(ACTOR, 0.0)
    assert fetch(plane, 1).samples == 2, "the two inserted ones lack their values"


def test_what_a_call_reserved_stays_the_clients_until_the_call_is_completed_cancelled_or_its_session_ends(plane):
    reserved = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    plane.received(ROLLOUT, [reserved.id])
    assert plane.calls.find(ROLLOUT, reserved.id).reply is None
    plane.client_gone(ROLLOUT, 0.0)
    assert (held(plane), chores(plane)) == (0, [0, 1])


@pytest.mark.parametrize("died", [True, False])
def test_every_call_that_was_not_received_is_undone_when_the_session_ends(plane, died):
    put(plane, 2)
    ask(plane, ACTOR, p.Reserve, "p", 2)
    ask(plane, ACTOR, p.Insert, "p", 1)
    assert indexes(fetch(plane, 2)) == [0, 1]
    ask(plane, ACTOR, p.Freeze)
    assert ask(plane, CRITIC, p.CheckFields, "p", p.pack_indexes([0]), fields("x"), 9.0) is None
    replies = plane.client_gone(ACTOR, 0.0, died)
    assert [(to.client, type(to.reply)) for to in replies] == [(CRITIC, p.Done)]
    assert (held(plane), chores(plane)) == (0, [2, 3])
    assert batch(plane, 2, client=CRITIC) == [0, 1]
    assert plane.calls.of(ACTOR) == []


def test_a_goodbye_ends_the_session(plane):
    ask(plane, ROLLOUT, p.Reserve, "p", 2, fields("x"))
    seal(plane)
    park(plane, 1)
    (end,) = plane.client_gone(ROLLOUT, 0.0, died=False)
    assert isinstance(end.reply, p.Ended)
    assert chores(plane) == [0, 1]


@pytest.mark.parametrize("died", [True, False])
def test_nothing_is_kept_of_a_client_that_left(plane, died):
    lost = ask(plane, ROLLOUT, p.Reserve, "p", 2)
    plane.client_gone(ROLLOUT, 0.0, died)
    assert cancel(plane, ROLLOUT, lost)[0] == "kept"


def test_what_a_client_cleared_and_may_not_have_heard_of_is_deleted_by_the_server(plane):
    put(plane, 3)
    for sample, how in enumerate(("cancel", "end", "settled")):
        reply = ask(plane, CRITIC, p.ClearSamples, "p", p.pack_indexes([sample]))
        if how == "cancel":
            assert cancel(plane, CRITIC, reply)[0] == "kept"
        elif how == "settled":
            plane.received(CRITIC, [reply.id])
        plane.client_gone(CRITIC, 0.0)
        assert chores(plane) == ([] if how == "settled" else [sample])


# ---- retries ----


def again(plane, client, request):
    """The request twice: both replies."""
    return [plane.handle(client, request, 0.0) for _ in range(2)]


def test_a_retry_of_an_answered_call_gets_the_same_answer_and_changes_nothing(plane):
    put(plane, 4)
    for request in (
        p.Reserve(5001, "p", 2), p.Insert(5002, "p", 2), p.ResolveKeys(5003, "p", ["u"], True, True),
        p.ResolveKeys(5004, "p", ["v"], True), p.Fetch(5005, "p", "train", ["x"], 2),
        p.Stage(5006, p.pack_indexes([1])), p.ClearSamples(5007, "p", p.pack_indexes([3])),
        p.CheckFields(5008, "p", p.pack_indexes([0]), fields("x")),
        p.Publish(5009, "p", p.pack_indexes([0]), fields("y")),
    ):  # fmt: skip
        first, second = again(plane, ROLLOUT, request)
        assert first[:1] == second, request
        assert not isinstance(second[0].reply, p.Failed), second
    assert indexes(fetch(plane, 1)) == [2]
    assert put(plane, 1) == [11]


def test_a_call_that_is_parked_already_is_not_parked_twice(make_plane):
    plane = make_plane(capacity=2)
    put(plane, 2)
    assert again(plane, ROLLOUT, p.Reserve(5001, "p", 1, {}, 9.0)) == [[], []]
    assert again(plane, ROLLOUT, p.Fetch(5002, "p", "t", ["x"], 3, wait_s=9.0)) == [[], []]
    assert plane.state.waits.count == 2
    assert [to.reply.id for to in send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes([0]))[1:]] == [5001]


def test_a_number_that_was_used_for_another_verb_is_refused(plane):
    plane.handle(ROLLOUT, p.Reserve(5001, "p", 1), 0.0)
    refused(plane.handle(ROLLOUT, p.Insert(5001, "p", 1), 0.0)[0].reply, "ProtocolError", "5001", "Reserve", "Insert")
    plane.received(ROLLOUT, [5001])
    refused(plane.handle(ROLLOUT, p.Reserve(5001, "p", 1), 0.0)[0].reply, "ProtocolError", "never used again")
    assert held(plane) == 1


def test_a_published_put_whose_values_are_not_committed_is_undone_unless_a_task_was_given_some(plane):
    replies = []
    for number in (5001, 5011):
        (own,) = plane.handle(ROLLOUT, p.Reserve(number, "p", 1), 0.0)
        args = (number + 1, "p", own.reply.indexes, fields("x"))
        replies += plane.handle(ROLLOUT, p.Publish(*args, completes=number, uncommitted=True), 0.0)
    assert batch(plane, 1) == [0]
    assert [cancel(plane, ROLLOUT, to.reply)[0] for to in replies] == ["kept", "undone"]
    assert chores(plane) == [1]
