# SPDX-License-Identifier: Apache-2.0
"""Fetches: what is refused, who waits for whom, rounds for all ranks, and the same answer to the same question."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    INT,
    REWARDER,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    clear,
    fetch,
    indexes,
    not_ready,
    park,
    publish,
    put,
    refused,
    register,
    reserve,
    seal,
    send,
)

from transfer_queue import protocol as p

# ---- what is refused, before anything is consumed ----


@pytest.mark.parametrize(
    ("batch_size", "rank", "batch_index", "part"),
    [
        (0, None, None, "batch_size must be at least 1, got 0"),
        (-3, None, None, "batch_size must be at least 1, got -3"),
        (1, -1, 0, "dp_rank must be greater than or equal to 0, got -1"),
        (1, 0, -1, "batch_index must be greater than or equal to 0, got -1"),
        (1, 2, 0, "dp_rank 2 asked for a batch of task 'train', which has dp_size 2: ranks go from 0 to 1"),
        (1, None, 0, "task 'train' has dp_size 2: a fetch must name its dp_rank"),
    ],
)
def test_a_fetch_that_cannot_be_right_is_refused_and_consumes_nothing(plane, batch_size, rank, batch_index, part):
    put(plane, 4)
    register(plane, dp_size=2)
    reply = fetch(plane, batch_size, rank, batch_index, wait_s=9.0)
    refused(reply, "InvalidRequestError", part)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [0, 0, 0, 0]
    assert plane.next_deadline() is None


def test_a_fetch_must_name_a_field(plane):
    refused(fetch(plane, 1, names=()), "InvalidRequestError", "at least one field", "data_fields=[]")


def test_a_fetch_that_waits_for_no_number_is_refused(plane):
    refused(fetch(plane, 1, wait_s=float("nan")), "InvalidRequestError", "NaN")


def test_different_dp_sizes_for_one_task_are_refused_with_all_of_them(plane):
    register(plane, dp_size=2)
    refused(fetch(plane, 1, 0, dp_size=4), "InvalidRequestError", "[2, 4]", "registered 2", "fetch 4", "one dp_size")


@pytest.mark.parametrize(
    ("settings", "code", "parts"),
    [
        ({"dp_size": 0}, "InvalidRequestError", ["dp_size must be at least 1, got 0"]),
        ({"tail": "lose"}, "InvalidRequestError", ["drop, pad, uneven_ok", "'lose'"]),
        ({"sampler": "SequentalSampler"}, "SamplerError", ["Could not find sampler", "'SequentialSampler'"]),
        ({"sampler": "os:path"}, "SamplerError", ["may not be imported"]),
    ],
)
def test_a_task_registered_wrongly_stays_as_it_was(plane, settings, code, parts):
    register(plane, dp_size=2, tail="pad")
    refused(ask(plane, ACTOR, p.RegisterTask, "train", **settings), code, *parts)
    task = plane.state.tasks.get("train")
    assert (task.dp_size, task.tail, type(task.sampler).__name__) == (2, "pad", "SequentialSampler")


def test_parts_of_a_task_that_are_not_named_stay_as_they_are(plane):
    register(plane, sampler="RankAwareSampler", dp_size=2, tail="pad")
    sampler = plane.state.tasks.get("train").sampler
    register(plane, sampler="RankAwareSampler")
    task = plane.state.tasks.get("train")
    assert (task.sampler is sampler, task.dp_size, task.tail) == (True, 2, "pad")


def test_an_unknown_field_is_not_ready_and_the_known_ones_are_named(plane):
    put(plane, 2, "x")
    reply = fetch(plane, 1, names=("x", "rewards"))
    assert reply.known_fields == ["x"]
    assert not_ready(reply) == (1, 0, 2, {"rewards": 2})


# ---- three answers ----


def test_not_yet_says_what_is_missing_in_numbers(plane):
    put(plane, 3, "x", now=1.0)
    put(plane, 2, "x", "y", now=4.0)
    reserve(plane, 7)
    reply = fetch(plane, 4, names=("x", "y"), now=6.0)
    assert reply == p.NotReady(reply.id, 4, 2, 5, {"y": 3}, 2.0, ["x", "y"], 7, ["rollout"])


def test_not_yet_says_whether_more_samples_may_come(plane):
    put(plane, 3, "x")
    assert not fetch(plane, 4, names=("x", "y")).sealed
    seal(plane)
    assert fetch(plane, 4, names=("x", "y")).sealed


def test_not_yet_names_those_who_still_owe_samples(plane):
    for i in range(7):
        reserve(plane, 2, client=f"writer {i}")
    reserve(plane, 1, partition="q", client="elsewhere")
    reply = fetch(plane, 1)
    assert (reply.reserved, reply.owed_by) == (14, [f"writer {i}" for i in range(5)])


def test_not_yet_counts_what_the_task_has_still_to_get_for_all_ranks_together(plane):
    register(plane, dp_size=2)
    put(plane, 6)
    batch(plane, 2, 0, 0)
    assert not_ready(fetch(plane, 2, 0, 1)) == (4, 2, 2, {})


def test_a_partition_that_nobody_knows_is_not_yet_there(plane):
    register(plane, dp_size=3)
    assert not_ready(fetch(plane, 2, 0, 0)) == (6, 0, 0, {})
    assert ask(plane, ACTOR, p.ListPartitions).names == []


def test_a_fetch_may_wait_for_a_partition_that_does_not_exist_yet(plane):
    park(plane, 1)
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [0])]


# ---- parking ----


def test_a_parked_fetch_is_answered_at_its_deadline_and_not_before(plane):
    put(plane, 1)
    park(plane, 2, wait_s=3.0, now=10.0)
    assert plane.next_deadline() == 13.0
    assert plane.expire(12.9) == []
    (to,) = plane.expire(13.0)
    assert (to.client, not_ready(to.reply)) == (ACTOR, (2, 1, 1, {}))
    assert (plane.next_deadline(), plane.expire(99.0)) == (None, [])


def test_a_parked_fetch_delays_nobody_else(plane):
    put(plane, 2)
    put(plane, 1, partition="q")
    park(plane, 9, task="greedy")
    assert batch(plane, 2, task="train") == [0, 1]
    assert batch(plane, 1, task="greedy", partition="q") == [2]


def test_within_a_task_a_later_smaller_fetch_never_overtakes(plane):
    park(plane, 3, client="large")
    park(plane, 1, client="small")
    put_replies = publish(plane, reserve(plane, 2))
    assert batches(put_replies) == []
    assert batches(publish(plane, reserve(plane, 2))) == [("large", [0, 1, 2]), ("small", [3])]


def test_a_fetch_that_does_not_wait_never_overtakes_one_that_does(plane):
    park(plane, 3, client="patient")
    put(plane, 2)
    assert not_ready(fetch(plane, 1)) == (1, 2, 2, {})
    assert batches(publish(plane, reserve(plane, 1))) == [("patient", [0, 1, 2])]


def test_a_fetch_whose_deadline_comes_behind_another_does_not_overtake_it(plane):
    park(plane, 3, client="patient", wait_s=9.0)
    park(plane, 1, client="hasty", wait_s=1.0)
    put(plane, 2)
    ((client, reply),) = plane.expire(1.0)
    assert (client, not_ready(reply)) == ("hasty", (1, 2, 2, {}))


def test_a_fetch_that_gives_up_makes_way_for_those_behind_it(plane):
    park(plane, 3, client="large", wait_s=1.0)
    park(plane, 1, client="small", wait_s=9.0)
    put(plane, 2)
    large, small = plane.expire(1.0)
    assert (large.client, type(large.reply)) == ("large", p.NotReady)
    assert batches([small]) == [("small", [0])]


def test_a_client_that_dies_while_it_waits_makes_way_for_those_behind_it(plane):
    park(plane, 3, client="large")
    park(plane, 1, client="small")
    put(plane, 2)
    assert batches(plane.client_gone("large", now=1.0)) == [("small", [0])]


def test_parked_fetches_are_served_in_order_of_their_batch(plane):
    park(plane, 1, 0, 2, client="two")
    park(plane, 1, 0, 0, client="zero")
    park(plane, 1, 0, 1, client="one")
    assert batches(publish(plane, reserve(plane, 3))) == [("zero", [0]), ("one", [1]), ("two", [2])]


def test_every_task_sees_every_sample(plane):
    park(plane, 2, task="train")
    park(plane, 1, task="judge", client=CRITIC)
    assert batches(publish(plane, reserve(plane, 2))) == [(ACTOR, [0, 1]), (CRITIC, [0])]
    assert batch(plane, 1, task="judge") == [1]


def test_a_tag_that_a_sampler_waits_for_is_enough_to_answer(plane):
    register(plane, sampler={"class": "TokenBudgetSampler", "kwargs": {"max_tokens": 4}})
    put(plane, 2, lengths=[2, 1])
    park(plane, 8)
    replies = send(plane, REWARDER, p.SetTags, {"p": {1: {"total_lengths": 2}}})
    assert batches(replies) == [(ACTOR, [0, 1])]


# ---- rounds ----


def test_a_round_exists_for_all_ranks_or_for_none(plane):
    register(plane, dp_size=3)
    put(plane, 5)
    park(plane, 2, 1, 0)
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [2, 3])]
    assert batch(plane, 2, 0, 0) == [0, 1]
    assert batch(plane, 2, 2, 0) == [4, 5]


def test_ranks_wait_together_and_are_served_by_one_publish(plane):
    for rank in range(2):
        park(plane, 1, rank, 0, client=f"rank {rank}", dp_size=2)
    put(plane, 1)
    assert batches(publish(plane, reserve(plane, 1))) == [("rank 0", [0]), ("rank 1", [1])]


def test_a_rank_that_lags_still_gets_its_batches_and_one_that_runs_ahead_takes_nothing_from_it(plane):
    register(plane, dp_size=2)
    put(plane, 8)
    assert [batch(plane, 2, 0, i) for i in range(2)] == [[0, 1], [4, 5]]
    assert isinstance(fetch(plane, 2, 0, 2), p.NotReady)
    assert [batch(plane, 2, 1, i) for i in range(2)] == [[2, 3], [6, 7]]


def test_without_dp_size_each_rank_draws_for_itself_first_come_first_served(plane):
    put(plane, 4)
    assert [batch(plane, 1, rank, 0) for rank in (3, 0, 1)] == [[0], [1], [2]]


def test_a_dp_size_that_changes_within_a_partition_is_refused_and_overwrites_nothing(plane):
    put(plane, 8)
    first = batch(plane, 1, 0, 0, dp_size=2)
    reply = fetch(plane, 1, 2, 0, dp_size=4)
    refused(reply, "InvalidRequestError", "batch 0", "another one; it is 4 now", "one dp_size")
    assert batch(plane, 1, 0, 0, dp_size=2) == first


def test_a_rank_that_drew_alone_keeps_its_batch_when_another_names_a_dp_size(plane):
    put(plane, 4)
    alone = batch(plane, 1, 1, 0)
    refused(fetch(plane, 1, 0, 0, dp_size=2), "InvalidRequestError", "it is 2 now")
    assert batch(plane, 1, 1, 0) == alone


# ---- the same answer ----


def test_the_same_question_gets_the_same_answer_whoever_asks_and_whatever_is_ready(plane):
    put(plane, 2)
    first = fetch(plane, 2, 0, 0)
    put(plane, 2)
    again = fetch(plane, 2, 0, 0, client="tensor-parallel peer")
    assert (again.indexes, again.token, again.batch_index) == (first.indexes, first.token, 0)


def test_unnamed_batches_of_a_rank_follow_each_other_and_have_names_for_others(plane):
    put(plane, 3)
    assert [fetch(plane, 1, 0).batch_index for _ in range(3)] == [0, 1, 2]
    assert batch(plane, 1, 0, 1) == [1]


def test_an_unnamed_fetch_skips_batches_that_were_settled_before_it_came(plane):
    register(plane, dp_size=2)
    put(plane, 4)
    batch(plane, 1, 0, 0)
    clear(plane, [1])
    assert batch(plane, 1, 1) == [3]


def test_partitions_and_tasks_with_the_same_batch_index_do_not_disturb_each_other(plane):
    put(plane, 2, partition="p")
    put(plane, 2, partition="q")
    assert batch(plane, 2, 0, 0, partition="q") == [2, 3]
    assert batch(plane, 2, 0, 0, partition="p") == [0, 1]
    assert batch(plane, 1, 0, 0, partition="p", task="judge") == [0]
    assert batch(plane, 2, 0, 0, partition="q") == [2, 3]


def test_a_batch_given_again_waits_for_fields_it_was_not_drawn_with(plane):
    samples = put(plane, 2, "x")
    batch(plane, 2, 0, 0)
    publish(plane, samples[:1], "y")
    assert not_ready(fetch(plane, 2, 0, 0, names=("x", "y"))) == (2, 1, 2, {"y": 1})
    park(plane, 2, 0, 0, names=("x", "y"))
    assert batches(publish(plane, samples[1:], "y")) == [(ACTOR, [0, 1])]


def test_who_waits_for_fields_of_a_batch_is_told_when_it_is_settled(plane):
    put(plane, 1, "x")
    token = fetch(plane, 1, 0, 0).token
    park(plane, 1, 0, 0, names=("x", "y"))
    _, told = send(plane, CRITIC, p.Ack, "p", "train", [token])
    refused(told.reply, "InvalidRequestError", "batch 0", "settled")


def test_a_batch_of_samples_that_were_partly_cleared_is_an_error_that_names_them(plane):
    put(plane, 2)
    batch(plane, 2, 0, 0)
    clear(plane, [1])
    refused(fetch(plane, 2, 0, 0), "SampleClearedError", "1 of 2 samples", "[1]", "'p'")


def test_a_batch_describes_its_samples(plane):
    samples = reserve(plane, 2)
    shapes = {"x": INT, "y": p.FieldSpec("float32", None, True, False, bytes([1, 0, 0, 0, 5, 0, 0, 0]))}
    ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), shapes, {1: {"length": 5}})
    reply = fetch(plane, 2, 0, 0, names=("y", "x", "y"))
    assert reply == p.Batch(
        reply.id, "p", p.pack_indexes([0, 1]), {"y": shapes["y"], "x": INT}, bytes([1, 1]),
        p.pack_tags([None, p.encode({"length": 5})]),
        "p/train/1/0#1", 0,
    )  # fmt: skip


# ---- acks ----


def test_an_acknowledged_batch_is_settled_and_asking_for_it_says_so(plane):
    put(plane, 2)
    token = fetch(plane, 1, 0, 0).token
    assert (ack(plane, token), ack(plane, token)) == (1, 0)
    refused(
        fetch(plane, 1, 0, 0), "InvalidRequestError", "batch 0", "settled", "acknowledged", "later batch_index",
        "Another Trainer or stream may read the same task: give it a task name of its own",
    )  # fmt: skip
    assert batch(plane, 1, 0) == [1]


@pytest.mark.parametrize("token", ["", "#1", "p/train/1/0#99", "p/train/1/0#²", "nonsense", "p/judge/1/0#1"])
def test_a_token_that_means_nothing_settles_nothing(plane, token):
    put(plane, 1)
    batch(plane, 1, 0, 0)
    assert ack(plane, token) == 0
    assert batch(plane, 1, 0, 0) == [0]


def test_a_late_ack_settles_nothing_of_a_partition_made_anew(plane):
    put(plane, 1)
    late = fetch(plane, 1, 0, 0).token
    ask(plane, ACTOR, p.ClearPartition, "p")
    put(plane, 1)
    batch(plane, 1, 0, 0)
    assert (ack(plane, late), ack(plane, late, partition="gone")) == (0, 0)


def test_an_ack_of_one_rank_leaves_the_others_their_batch(plane):
    register(plane, dp_size=2)
    put(plane, 2)
    ack(plane, fetch(plane, 1, 0, 0).token)
    assert batch(plane, 1, 1, 0) == [1]


def test_acknowledged_samples_are_not_drawn_again(plane):
    put(plane, 2)
    ack(plane, fetch(plane, 1, 0, 0).token)
    assert batch(plane, 1, 0, 1) == [1]
    assert isinstance(fetch(plane, 1, 0, 2), p.NotReady)


@pytest.mark.parametrize("first", [0, 1])
def test_a_fetch_without_rank_takes_no_batch_of_the_only_rank(plane, first):
    register(plane, dp_size=1)
    put(plane, 6)
    given = [batch(plane, 2, *which) for which in [[(0, 0), (None, None)], [(None, None), (0, 0)]][first]]
    assert given == [[0, 1], [2, 3]]
    assert batch(plane, 2, 0, 1) == [4, 5]
    assert batch(plane, 2, 0, 0) == given[first]


def test_rows_that_a_reader_has_had_may_be_cleared_when_it_asks_for_the_rest(plane):
    register(plane, dp_size=1, tail="pad")
    put(plane, 3)
    seal(plane)
    whole = fetch(plane, 4, 0, 0)
    clear(plane, [0, 1])
    refused(fetch(plane, 4, 0, 0), "SampleClearedError")
    refused(fetch(plane, 4, 0, 0, skip=1), "SampleClearedError")
    refused(fetch(plane, 4, 0, 0, skip=-1), "InvalidRequestError", "got -1")
    put_off = fetch(plane, 4, 0, 0, skip=2)
    refused(put_off, "SampleClearedError")  # its padding is the first row again
    ask(plane, ACTOR, p.ClearPartition, "p")
    put(plane, 4)
    assert indexes(fetch(plane, 4, 0, 0)) == [3, 4, 5, 6]
    clear(plane, [3, 4])
    rest = fetch(plane, 4, 0, 0, skip=2)
    assert (indexes(rest), rest.batch_index, rest.padding) == ([5, 6], 0, None)
    assert whole.padding == bytes([0, 0, 0, 1])


# ---- what is settled ----


def test_an_ack_settles_the_earlier_batches_of_its_rank_when_told_to(plane):
    put(plane, 8)
    keys = [(0, 0), (0, 1), (1, 0), (0, 2)]
    tokens = {key: fetch(plane, 1, *key).token for key in keys}
    assert ack(plane, tokens[0, 1], earlier=True) == 2
    assert ack(plane, tokens[0, 0], earlier=True) == 0, "it comes late"
    replies = [fetch(plane, 1, *key) for key in keys]
    assert [isinstance(reply, p.Batch) for reply in replies] == [False, False, True, True]
    refused(replies[0], "InvalidRequestError", "settled")


def test_all_batches_of_a_rank_before_a_given_one_are_acknowledged_without_their_tokens(plane):
    put(plane, 8)
    keys = [(0, 0), (0, 1), (0, 2), (1, 0)]
    for key in keys:
        fetch(plane, 1, *key)
    assert [ask(plane, ACTOR, p.Ack, "p", "train", [], False, 2, 0).value for _ in range(2)] == [2, 0]
    assert [isinstance(fetch(plane, 1, *key), p.Batch) for key in keys] == [False, False, True, True]
    assert ask(plane, ACTOR, p.Ack, "nowhere", "train", [], False, 2, 0).value == 0


def test_statistics_say_from_where_on_no_rank_has_settled_a_batch(plane):
    def settled():
        return ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["tasks"]["train"]["settled"]

    put(plane, 12)
    tokens = {(rank, at): fetch(plane, 1, rank, at).token for at in range(3) for rank in range(2)}
    assert settled() == 0
    ack(plane, tokens[0, 0], tokens[0, 1], tokens[1, 0])
    assert settled() == 2
    ack(plane, *tokens.values())
    assert settled() == 3
