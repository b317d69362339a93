# SPDX-License-Identifier: Apache-2.0
"""Clearing samples and partitions, reset of consumption, and memory that follows what is neither."""

from __future__ import annotations

import msgspec
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    chores,
    clear,
    clear_consumed,
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


def consumed(plane, task="train", partition="p"):
    return list(ask(plane, ACTOR, p.ConsumptionStatus, partition, task).status)


def reset(plane, task=None, partition="p"):
    return send(plane, ACTOR, p.ResetConsumption, partition, task)


# ---- clear ----


def test_cleared_samples_are_forgotten_and_unknown_ones_ignored(plane):
    samples = put(plane, 3)
    other = put(plane, 1, partition="q")
    assert clear(plane, [2, 0, 0, 99, -1, *other]) == [0, 2]
    assert clear(plane, [0]) == []
    assert clear(plane, [0], partition="nowhere") == []
    assert batch(plane, 1) == samples[1:2]
    assert batch(plane, 1, partition="q") == other


def test_clearing_all_samples_leaves_the_partition(plane):
    clear(plane, put(plane, 2))
    assert ask(plane, ACTOR, p.ListPartitions).names == ["p"]
    assert ask(plane, ACTOR, p.ListKeys, "p").keys == {"p": {}}
    assert put(plane, 1) == [2]


def test_a_cleared_sample_is_not_handed_out_any_more(plane):
    samples = put(plane, 3)
    park(plane, 4)
    clear(plane, samples[:1])
    plane.expire(1000.0)
    assert batch(plane, 2) == samples[1:]
    assert not_ready(fetch(plane, 1)) == (1, 0, 0, {})


def test_clearing_a_partition_names_all_that_may_have_values_and_ends_what_waits_there(plane):
    samples = put(plane, 2) + reserve(plane, 1)
    put(plane, 1, partition="q")
    park(plane, 9)
    park(plane, 9, partition="q", client=CRITIC)
    cleared, end = send(plane, ACTOR, p.ClearPartition, "p")
    assert indexes(cleared.reply) == samples
    assert (end.client, end.reply) == (ACTOR, p.Ended(end.reply.id, "cleared"))
    assert ask(plane, ACTOR, p.ListPartitions).names == ["q"]


def test_clearing_a_partition_that_is_not_there_clears_nothing_and_ends_nothing(plane):
    park(plane, 1)
    assert [indexes(to.reply) for to in send(plane, ACTOR, p.ClearPartition, "p")] == [[]]
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [0])]


def test_a_reader_that_comes_after_its_partition_was_cleared_is_told_so_and_a_new_one_waits(plane):
    put(plane, 4)
    token = fetch(plane, 2, 0, 0).token
    assert batch(plane, 2, 0, 1, after=token) == [2, 3]
    send(plane, ACTOR, p.ClearPartition, "p")
    told = p.Ended(0, "cleared")
    assert msgspec.structs.replace(fetch(plane, 2, 0, 1, after=token), id=0) == told
    assert isinstance(fetch(plane, 2, 0, 1), p.NotReady)
    put(plane, 4)
    assert msgspec.structs.replace(fetch(plane, 2, 0, 1, after=token, wait_s=9.0), id=0) == told
    new = fetch(plane, 2, 0, 0)
    assert (indexes(new), batch(plane, 2, 0, 1, after=new.token)) == ([4, 5], [6, 7])


def test_a_partition_cleared_and_used_again_begins_anew(plane):
    put(plane, 2)
    batch(plane, 2, 0, 0)
    seal(plane)
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert put(plane, 1) == [2]
    assert batch(plane, 1, 0, 0) == [2]
    refused(ask(plane, ACTOR, p.Describe, "p", None, p.pack_indexes([0])), "SampleClearedError", "[0]")


def test_a_batch_whose_samples_are_all_cleared_is_settled(plane):
    put(plane, 4)
    batch(plane, 2, 0, 0)
    clear(plane, [0])
    clear(plane, [1])
    refused(fetch(plane, 2, 0, 0), "InvalidRequestError", "settled", "samples were cleared")
    assert batch(plane, 2, 0) == [2, 3]


# ---- clear what every task is done with ----


def test_samples_go_once_every_task_that_reads_has_consumed_and_settled_them(plane):
    put(plane, 4)
    tokens = [fetch(plane, 2, 0, i).token for i in range(2)]
    assert clear_consumed(plane) == []
    ack(plane, tokens[0])
    assert clear_consumed(plane) == [0, 1]
    assert clear_consumed(plane) == []
    ack(plane, tokens[1])
    judged = fetch(plane, 1, 0, 0, task="judge")
    assert (indexes(judged), clear_consumed(plane)) == ([2], [])
    batch(plane, 1, task="judge")  # without a batch_index: settled from the start
    assert clear_consumed(plane) == [3]
    ack(plane, judged.token, task="judge")
    assert clear_consumed(plane) == [2]


def test_a_task_that_was_named_must_have_begun(plane):
    put(plane, 1)
    ack(plane, fetch(plane, 1, 0, 0).token)
    assert clear_consumed(plane, "train", "judge") == []
    batch(plane, 1, task="judge")
    assert clear_consumed(plane, "train", "judge") == [0]


def test_what_nobody_reads_or_is_not_there_is_not_cleared(plane):
    put(plane, 2)
    reserve(plane, 1)
    assert (clear_consumed(plane), clear_consumed(plane, partition="nowhere")) == ([], [])
    batch(plane, 1)
    assert clear_consumed(plane) == [0]


def test_a_sample_that_pads_an_open_batch_of_another_rank_stays(plane):
    register(plane, dp_size=2, tail="pad")
    put(plane, 1)
    seal(plane)
    shares = [fetch(plane, 1, rank, 0) for rank in range(2)]
    assert [indexes(share) for share in shares] == [[0], [0]]
    ack(plane, shares[0].token)
    assert clear_consumed(plane) == []
    ack(plane, shares[1].token)
    assert clear_consumed(plane) == [0]


def test_a_sample_to_be_read_again_after_a_reset_stays(plane):
    put(plane, 1)
    ack(plane, fetch(plane, 1, 0, 0).token)
    reset(plane)
    assert clear_consumed(plane) == []


def test_clearing_what_is_consumed_makes_room_for_a_writer(make_plane):
    plane = make_plane(capacity=2)
    put(plane, 2)
    batch(plane, 2)
    assert send(plane, ROLLOUT, p.Reserve, "p", 1) == []
    cleared, reserved = send(plane, ACTOR, p.ClearConsumed, "p", [])
    assert (indexes(cleared.reply), indexes(reserved.reply)) == ([0, 1], [2])


# ---- reset of consumption ----


def test_a_reset_makes_samples_available_again_for_one_task_or_all(plane):
    put(plane, 2)
    for task in ("train", "judge"):
        batch(plane, 2, task=task)
    reset(plane, "train")
    assert (consumed(plane, "train"), consumed(plane, "judge")) == ([0, 0], [1, 1])
    reset(plane)
    assert batch(plane, 2, task="judge") == batch(plane, 2, task="train") == [0, 1]


def test_a_reset_of_an_unknown_partition_says_so(plane):
    assert [to.reply.value for to in reset(plane)] == [False]


def test_equal_questions_get_equal_answers_after_a_reset_and_consume_again(plane):
    put(plane, 4)
    first = [batch(plane, 2, 0, i) for i in range(2)]
    reset(plane)
    assert consumed(plane) == [0, 0, 0, 0]
    assert batch(plane, 2, 0, 1) == first[1]
    assert consumed(plane) == [0, 0, 1, 1]
    assert batch(plane, 2, 0, 0) == first[0]
    assert consumed(plane) == [1, 1, 1, 1]


def test_unnamed_batches_of_a_rank_start_again_after_a_reset(plane):
    put(plane, 4)
    first = [batch(plane, 2, 0) for _ in range(2)]
    reset(plane)
    assert [batch(plane, 2, 0) for _ in range(2)] == first


def test_samples_that_the_ledger_names_are_not_drawn_into_another_batch_after_a_reset(plane):
    put(plane, 4)
    batch(plane, 4, 0, 0)
    park(plane, 4, 0, 1)
    assert len(reset(plane)) == 1
    assert batches(publish(plane, reserve(plane, 4))) == [(ACTOR, [4, 5, 6, 7])]
    assert batch(plane, 4, 0, 0) == [0, 1, 2, 3]


def test_batches_settled_before_a_reset_may_be_drawn_anew(plane):
    put(plane, 4)
    ack(plane, fetch(plane, 2, 0, 0).token)
    kept = batch(plane, 2, 0, 1)
    reset(plane)
    assert batch(plane, 2, 0, 0) == [0, 1]
    assert batch(plane, 2, 0, 1) == kept
    assert isinstance(fetch(plane, 2, 0, 2), p.NotReady)


def test_a_round_that_some_ranks_had_settled_is_drawn_anew_for_all_after_a_reset(plane):
    register(plane, dp_size=2)
    put(plane, 4)
    ack(plane, fetch(plane, 2, 0, 0).token)
    batch(plane, 2, 1, 0)
    reset(plane)
    assert [batch(plane, 2, rank, 0) for rank in range(2)] == [[0, 1], [2, 3]]


def test_an_ack_from_before_a_reset_settles_nothing_of_the_replay(plane):
    put(plane, 2)
    late = fetch(plane, 2, 0, 0).token
    reset(plane)
    assert ack(plane, late) == 0
    renewed = fetch(plane, 2, 0, 0)
    assert (indexes(renewed), ack(plane, renewed.token)) == ([0, 1], 1)


def test_a_reset_reopens_a_stream_that_had_ended(plane):
    put(plane, 2)
    seal(plane)
    batch(plane, 2, 0, 0)
    assert isinstance(fetch(plane, 2, 0, 1), p.Ended)
    reset(plane)
    assert batch(plane, 2, 0, 0) == [0, 1]
    assert isinstance(fetch(plane, 2, 0, 1), p.Ended)


def test_a_finite_stream_ends_again_only_when_the_replay_is_through(plane):
    put(plane, 4)
    for i in range(2):
        batch(plane, 2, 0, i, finite=True)
    reset(plane)
    park(plane, 2, 0, 2, finite=True)
    batch(plane, 2, 0, 0)
    replies = {to.client: to.reply for to in send(plane, CRITIC, p.Fetch, "p", "train", ["x"], 2, 0, 1)}
    assert indexes(replies[CRITIC]) == [2, 3]
    assert replies[ACTOR].reason == "consumed"


def test_a_reset_answers_fetches_that_wait_for_samples(plane):
    put(plane, 2)
    batch(plane, 2)
    park(plane, 2)
    assert batches(reset(plane)) == [(ACTOR, [0, 1])]


# ---- bounded ----


def rows(plane, partition="p"):
    return plane.state.partitions[partition].table


def test_rows_shrink_when_samples_are_cleared_and_what_stays_stays_right(plane):
    register(plane, dp_size=2)
    samples = put(plane, 1000)
    kept = samples[::50]
    batch(plane, 3, 1, 0)
    clear(plane, sorted(set(samples) - set(kept) - {0, 1, 2, 3, 4, 5}))
    assert (rows(plane).size, rows(plane).num_dead) == (len(kept) + 5, 0)
    assert batch(plane, 3, 0, 0) == [0, 1, 2]
    assert batch(plane, 3, 0, 1) == kept[1:4]
    plane.check_invariants()


def test_a_long_run_of_put_fetch_and_clear_leaves_nothing_behind(plane):
    register(plane, dp_size=2)
    for step in range(200):
        samples = put(plane, 8, lengths=[1] * 8)
        for rank in range(2):
            fetch(plane, 4, rank, step)
        clear(plane, samples)
    consumer = plane.state.partitions["p"].consumers["train"]
    assert rows(plane).size < 200
    assert (len(consumer.ledger), plane.state.partitions["p"].tags) == (0, {})
    assert consumer.ready_counts() == {"x": 0}


def test_a_long_run_with_acks_keeps_only_what_is_in_flight_in_the_ledger(plane):
    token = ""
    for step in range(200):
        put(plane, 1)
        ack(plane, token)
        token = fetch(plane, 1, 0, step).token
    assert len(plane.state.partitions["p"].consumers["train"].ledger) == 1


def test_clearing_a_partition_frees_what_samplers_remember_of_it(plane):
    register(plane, sampler="RankAwareSampler")
    sampler = plane.state.tasks.get("train").sampler
    put(plane, 2)
    arguments = {"data_replica_group": 0, "data_replica_rank": 0, "data_replica_world_size": 2}
    batch(plane, 2, sampler_args=arguments)
    assert sampler._states
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert sampler._states == {}


def test_a_sampler_forgets_a_batch_once_the_ledger_has_it(plane):
    register(plane, sampler="RankAwareSampler", dp_size=2)
    sampler = plane.state.tasks.get("train").sampler
    put(plane, 8)
    for i in range(2):
        batch(plane, 2, 0, i)
    assert not any(batches for tasks in sampler._states.values() for batches in tasks.values())


def test_names_of_tasks_that_only_ask_cost_nothing(plane):
    for i in range(50):
        fetch(plane, 1, task=f"task {i}")
    assert plane.state.tasks.by_name == {}


def test_reservations_of_cleared_partitions_are_chores_once_their_writer_is_gone(plane):
    for step in range(300):
        reserve(plane, 1, f"step {step}")
        own = ask(plane, ACTOR, p.ClearPartition, f"step {step}")
        plane.received(ACTOR, [own.id])
    plane.client_gone(ROLLOUT, now=1.0)
    assert len(chores(plane)) == 300
    assert plane.state.calls.clients() == []


def test_answered_waits_leave_no_deadline_behind(plane):
    for _ in range(500):
        park(plane, 1, wait_s=1000.0)
        publish(plane, reserve(plane, 1))
    assert plane.next_deadline() is None
    assert len(plane.state.waits._deadlines) <= 70


def test_a_large_partition_without_keys_and_tags_is_freed_at_once(plane):
    ask(plane, ROLLOUT, p.Insert, "p", 50_000)
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert plane.next_deadline() is None
