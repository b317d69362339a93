# SPDX-License-Identifier: Apache-2.0
"""The end of a stream: sealing, the three tail policies, finite streams, and what the end is not."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    cancel,
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

from transfer_queue import SequentialSampler
from transfer_queue import protocol as p


def ended(reply):
    """(reason, dropped)"""
    assert isinstance(reply, p.Ended), reply
    return reply.reason, reply.dropped


def padding(reply):
    return None if reply.padding is None else list(reply.padding)


# ---- seal ----


def test_a_sealed_and_consumed_partition_has_ended_and_an_unsealed_one_has_not(plane):
    put(plane, 2)
    batch(plane, 2)
    assert not_ready(fetch(plane, 2)) == (2, 0, 0, {})
    seal(plane)
    assert ended(fetch(plane, 2)) == ("sealed", 0)


def test_the_seal_answers_parked_fetches_of_every_task(plane):
    park(plane, 1, task="train")
    park(plane, 1, task="judge")
    assert [ended(to.reply) for to in seal(plane)[1:]] == [("sealed", 0), ("sealed", 0)]


def test_sealing_a_partition_that_nobody_used_ends_it(plane):
    seal(plane)
    assert ended(fetch(plane, 1)) == ("sealed", 0)


def test_sealing_twice_is_harmless(plane):
    put(plane, 1)
    assert [isinstance(seal(plane)[0].reply, p.Done) for _ in range(2)] == [True, True]
    assert batch(plane, 1) == [0]


def test_a_partition_made_for_a_number_of_samples_seals_itself_there(plane):
    ask(plane, ROLLOUT, p.CreatePartition, "p", 3)
    put(plane, 2)
    park(plane, 3)
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [0, 1, 2])]
    assert ended(fetch(plane, 3)) == ("sealed", 0)
    refused(ask(plane, ROLLOUT, p.Reserve, "p", 1), "InvalidRequestError", "sealed after 3 samples")


def test_the_number_of_samples_counts_also_where_a_producer_came_first(plane):
    put(plane, 2)
    park(plane, 3)
    replies = send(plane, ROLLOUT, p.CreatePartition, "p", 2)
    assert [replies[0].reply.value, *batches(replies)] == [False, (ACTOR, [0, 1])]
    assert plane.state.partitions["p"].sealed


def test_cleared_samples_still_count_towards_the_number_that_seals(plane):
    ask(plane, ROLLOUT, p.CreatePartition, "p", 2)
    clear(plane, put(plane, 1))
    put(plane, 1)
    assert plane.state.partitions["p"].sealed


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_number_of_samples_below_one_is_refused(plane, wrong):
    refused(ask(plane, ROLLOUT, p.CreatePartition, "p", wrong), "InvalidRequestError", f"got {wrong}")
    assert ask(plane, ACTOR, p.ListPartitions).names == []


def test_two_different_numbers_of_samples_are_refused_with_both(plane):
    assert ask(plane, ROLLOUT, p.CreatePartition, "p", 3).value is True
    assert ask(plane, ROLLOUT, p.CreatePartition, "p", 3).value is False
    assert ask(plane, ROLLOUT, p.CreatePartition, "p").value is False
    reply = ask(plane, ROLLOUT, p.CreatePartition, "p", 4)
    refused(reply, "InvalidRequestError", "'p'", "at 3 samples", "is 4")
    assert plane.state.partitions["p"].num_samples == 3


def test_a_sealed_stream_waits_for_fields_that_are_still_missing(plane):
    samples = put(plane, 2, "x")
    publish(plane, samples[:1], "y")
    seal(plane)
    park(plane, 2, names=("x", "y"))
    assert batches(publish(plane, samples[1:], "y")) == [(ACTOR, [0, 1])]


def test_a_sealed_stream_waits_for_writes_under_way(plane):
    samples = put(plane, 1) + reserve(plane, 1)
    seal(plane)
    park(plane, 2)
    assert batches(publish(plane, samples[1:])) == [(ACTOR, samples)]


def test_a_sealed_stream_stops_waiting_for_a_writer_that_died(plane):
    put(plane, 1)
    reserve(plane, 1, client="dying")
    seal(plane)
    park(plane, 2)
    assert batches(plane.client_gone("dying", now=1.0)) == [(ACTOR, [0])]


def test_a_sealed_stream_stops_waiting_for_samples_that_were_cleared(plane):
    samples = put(plane, 2, "x")
    publish(plane, samples[:1], "y")
    seal(plane)
    park(plane, 2, names=("x", "y"))
    assert batches(send(plane, ROLLOUT, p.ClearSamples, "p", p.pack_indexes([1]))) == [(ACTOR, [0])]


def test_the_end_is_the_end_for_every_rank_and_every_later_batch_but_not_for_earlier_ones(plane):
    register(plane, dp_size=2)
    put(plane, 5)
    first = batch(plane, 2, 0, 0)
    seal(plane)
    assert [ended(fetch(plane, 2, rank, i)) for rank in range(2) for i in (1, 2)] == [("sealed", 1)] * 4
    assert (batch(plane, 2, 0, 0), batch(plane, 2, 1, 0)) == (first, [2, 3])


# ---- tail policies ----


def test_drop_drops_what_fills_no_round_and_counts_it(plane):
    register(plane, dp_size=2, tail="drop")
    put(plane, 7)
    seal(plane)
    assert [batch(plane, 2, rank, 0) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [ended(fetch(plane, 2, rank, 1)) for rank in range(2)] == [("sealed", 3)] * 2
    task = ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["tasks"]["train"]
    assert (task["ended"], task["dropped"]) == ("sealed", 3)


def test_drop_does_not_wait_for_samples_that_could_not_fill_a_round_and_counts_them_too(plane):
    register(plane, dp_size=2, tail="drop")
    samples = put(plane, 2, "x")
    publish(plane, samples[:1], "y")
    seal(plane)
    assert ended(fetch(plane, 2, 0, 0, names=("x", "y"))) == ("sealed", 2)


def test_drop_waits_while_a_round_can_still_come_together(plane):
    register(plane, dp_size=2, tail="drop")
    samples = put(plane, 1) + reserve(plane, 1)
    seal(plane)
    park(plane, 1, 0, 0)
    assert batches(publish(plane, samples[1:])) == [(ACTOR, [0])]


def test_drop_is_the_default_with_several_ranks_and_nothing_is_lost_with_one(plane):
    put(plane, 3)
    seal(plane)
    assert ended(fetch(plane, 2, 0, 0, task="ranks", dp_size=2)) == ("sealed", 3)
    assert [batch(plane, 2, 0, i, task="one", dp_size=1) for i in range(2)] == [[0, 1], [2]]


def test_pad_fills_the_last_round_by_repeating_and_marks_what_is_repeated(plane):
    register(plane, dp_size=2, tail="pad")
    put(plane, 7)
    seal(plane)
    assert [padding(fetch(plane, 2, rank, 0)) for rank in range(2)] == [None, None]
    first, second = (fetch(plane, 2, rank, 1) for rank in range(2))
    assert [(indexes(reply), padding(reply)) for reply in (first, second)] == [([4, 5], None), ([6, 4], [0, 1])]
    assert ended(fetch(plane, 2, 0, 2)) == ("sealed", 0)


def test_pad_repeats_one_sample_as_often_as_needed_for_ranks_that_get_nothing_else(plane):
    register(plane, dp_size=3, tail="pad")
    put(plane, 1)
    seal(plane)
    replies = [fetch(plane, 2, rank, 0) for rank in range(3)]
    assert [(indexes(reply), padding(reply)) for reply in replies] == [
        ([0, 0], [0, 1]),
        ([0, 0], [1, 1]),
        ([0, 0], [1, 1]),
    ]
    assert padding(fetch(plane, 2, 1, 0)) == [1, 1]


def test_pad_of_nothing_is_the_end(plane):
    register(plane, dp_size=2, tail="pad")
    seal(plane)
    assert ended(fetch(plane, 2, 0, 0)) == ("sealed", 0)


def test_pad_and_uneven_wait_for_every_sample_that_may_still_come(plane):
    for policy in ("pad", "uneven_ok"):
        register(plane, task=policy, dp_size=2, tail=policy)
        park(plane, 2, 0, 0, task=policy)
    samples = put(plane, 1) + reserve(plane, 1)
    assert batches(seal(plane)) == []
    assert batches(publish(plane, samples[1:])) == [(ACTOR, [0, 1]), (ACTOR, [0, 1])]


def test_uneven_shares_the_rest_out_in_order_and_tells_the_other_ranks_the_end(plane):
    register(plane, dp_size=3, tail="uneven_ok")
    put(plane, 3)
    seal(plane)
    assert ended(fetch(plane, 2, 2, 0)) == ("sealed", 0)
    assert [batch(plane, 2, rank, 0) for rank in range(2)] == [[0, 1], [2]]
    assert ended(fetch(plane, 2, 0, 1)) == ("sealed", 0)


def test_a_rank_that_the_tail_did_not_reach_hears_the_end_after_a_reset_too(plane):
    register(plane, dp_size=2, tail="uneven_ok")
    put(plane, 1)
    seal(plane)
    assert (batch(plane, 1, 0, 0), ended(fetch(plane, 1, 1, 0))) == ([0], ("sealed", 0))
    ask(plane, ACTOR, p.ResetConsumption, "p")
    assert (ended(fetch(plane, 1, 1, 0)), batch(plane, 1, 0, 0)) == (("sealed", 0), [0])


@pytest.mark.parametrize("sealed", [True, False])
def test_a_rank_that_the_tail_did_not_reach_hears_the_end_after_the_others_settled_theirs_too(plane, sealed):
    register(plane, dp_size=2, tail="uneven_ok")
    put(plane, 3)
    if sealed:
        seal(plane)
    first = [fetch(plane, 1, rank, 0, finite=True, now=5.0) for rank in range(2)]
    tail = fetch(plane, 1, 0, 1, finite=True, now=5.0)
    assert [indexes(each) for each in (*first, tail)] == [[0], [1], [2]]
    assert ack(plane, *(each.token for each in (*first, tail))) == 3
    assert ended(fetch(plane, 1, 1, 1, finite=True, now=5.0)) == ("sealed" if sealed else "consumed", 0)


def test_uneven_gives_a_long_rest_in_several_batches(make_plane):
    class Hesitant(SequentialSampler):
        """Never content; what is left at the end is all that ever comes."""

        def sample(self, ready_indexes, batch_size, **kwargs):
            return [], []

    plane = make_plane(sampler=Hesitant())
    put(plane, 5)
    seal(plane)
    assert [batch(plane, 2) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert ended(fetch(plane, 2)) == ("sealed", 0)


# ---- finite streams ----


def test_a_finite_stream_ends_when_every_sample_is_consumed_sealed_or_not(plane):
    put(plane, 2)
    batch(plane, 2, finite=True)
    assert ended(fetch(plane, 2, finite=True)) == ("consumed", 0)


def test_a_finite_stream_does_not_end_before_its_first_sample(plane):
    assert isinstance(fetch(plane, 2, finite=True), p.NotReady)
    ask(plane, ROLLOUT, p.CreatePartition, "p")
    assert isinstance(fetch(plane, 2, finite=True), p.NotReady)


def test_a_finite_stream_waits_for_writes_under_way(plane):
    put(plane, 1)
    batch(plane, 1, finite=True)
    held = reserve(plane, 1)
    park(plane, 1, finite=True)
    assert batches(publish(plane, held)) == [(ACTOR, held)]
    assert ended(fetch(plane, 1, finite=True)) == ("consumed", 0)


def test_a_finite_stream_waits_for_preallocated_samples(make_plane):
    plane = make_plane(preallocate=4)
    put(plane, 2)
    batch(plane, 2, finite=True)
    park(plane, 2, finite=True)
    assert batches(publish(plane, reserve(plane, 1))) == []
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [2, 3])]
    assert ended(fetch(plane, 2, finite=True)) == ("consumed", 0)


def test_a_cancelled_put_does_not_end_a_finite_stream_early(make_plane):
    plane = make_plane(preallocate=2)
    put(plane, 1)
    batch(plane, 1, finite=True)
    cancel(plane, ROLLOUT, ask(plane, ROLLOUT, p.Reserve, "p", 1))
    park(plane, 1, finite=True)
    assert batches(publish(plane, reserve(plane, 1))) == [(ACTOR, [2])]


def test_the_last_short_batch_of_a_finite_stream_comes_when_all_preallocated_samples_are_there(make_plane):
    plane = make_plane(preallocate=3)
    put(plane, 3)
    assert [batch(plane, 2, 0, i, finite=True) for i in range(2)] == [[0, 1], [2]]
    assert ended(fetch(plane, 2, 0, 2, finite=True)) == ("consumed", 0)


def test_a_finite_stream_that_went_quiet_ends_with_a_short_batch(plane):
    put(plane, 3, now=10.0)
    batch(plane, 2, finite=True, now=10.0)
    assert isinstance(fetch(plane, 2, finite=True, now=11.0), p.NotReady)
    park(plane, 2, finite=True, now=11.0, wait_s=0.5)
    assert isinstance(plane.expire(11.5)[0].reply, p.NotReady)
    park(plane, 2, finite=True, now=11.5)
    assert plane.next_deadline() == 12.0
    assert batches(plane.expire(12.0)) == [(ACTOR, [2])]


def test_each_publish_begins_the_quiet_time_of_a_finite_stream_anew(plane):
    put(plane, 1, now=10.0)
    park(plane, 3, 0, 0, finite=True, now=10.0)
    park(plane, 3, 0, 1, finite=True, now=10.0)
    put(plane, 1, now=11.5)
    assert (plane.expire(12.0), plane.next_deadline()) == ([], 13.5)
    assert batches(plane.expire(13.5)) == [(ACTOR, [0, 1])]


def test_a_finite_stream_counts_its_quiet_time_from_the_last_publish_whenever_it_comes(plane):
    put(plane, 1, now=10.0)
    assert batch(plane, 2, finite=True, now=12.0) == [0]


@pytest.mark.parametrize("what", ["published", "given up"])
def test_a_finite_stream_is_never_quiet_while_a_write_is_under_way(plane, what):
    first = put(plane, 1, now=10.0)
    held = reserve(plane, 1, now=10.0)
    park(plane, 3, finite=True, now=10.0)
    assert (plane.expire(12.0), plane.next_deadline()) == ([], 110.0)
    if what == "published":
        publish(plane, held, now=20.0)
        assert batches(plane.expire(22.0)) == [(ACTOR, first + held)]
    else:
        assert batches(plane.client_gone(ROLLOUT, now=20.0)) == [(ACTOR, first)]


def test_the_quiet_time_ends_the_wait_of_all_who_read_a_finite_stream(plane):
    put(plane, 1, now=10.0)
    for _ in range(3):
        park(plane, 2, finite=True, now=10.0)
    first, *others = plane.expire(12.0)
    assert batches([first]) == [(ACTOR, [0])]
    assert [ended(to.reply) for to in others] == [("consumed", 0)] * 2
    assert plane.next_deadline() is None


def test_an_endless_stream_never_ends_by_itself(plane):
    put(plane, 3, now=10.0)
    batch(plane, 2, now=10.0)
    assert isinstance(fetch(plane, 2, now=1e6), p.NotReady)


def test_what_one_rank_is_told_of_the_end_of_a_finite_stream_all_ranks_are_told(plane):
    register(plane, dp_size=2)
    put(plane, 2)
    assert [batch(plane, 1, rank, 0, finite=True) for rank in range(2)] == [[0], [1]]
    assert ended(fetch(plane, 1, 0, 1, finite=True)) == ("consumed", 0)
    put(plane, 2)
    assert ended(fetch(plane, 1, 0, 1, finite=True)) == ("consumed", 0)
    assert ended(fetch(plane, 1, 1, 1, finite=True)) == ("consumed", 0)
    assert [batch(plane, 1, rank, 1, finite=True) for rank in range(2)] == [[2], [3]]


@pytest.mark.parametrize("dp_size", [None, 1, 2])
def test_all_who_read_one_pass_of_a_finite_stream_are_told_the_same_end(plane, dp_size):
    ranks = range(dp_size or 1)
    one_pass = {"finite": True, "dp_size": dp_size, "pass_start": 0}
    next_pass = {**one_pass, "pass_start": 1}
    put(plane, len(ranks))
    for _ in "ab":  # two readers of each rank, as in tensor parallelism
        assert [batch(plane, 1, rank, 0, **one_pass) for rank in ranks] == [[rank] for rank in ranks]
    assert [ended(fetch(plane, 1, rank, 1, **one_pass)) for rank in ranks] == [("consumed", 0)] * len(ranks)
    put(plane, 2 * len(ranks))
    late = [batch(plane, 1, rank, 1, **next_pass) for rank in ranks]
    assert late == [[len(ranks) + rank] for rank in ranks]
    assert [ended(fetch(plane, 1, rank, 1, **one_pass)) for rank in ranks] == [("consumed", 0)] * len(ranks)
    assert [batch(plane, 1, rank, 1, **next_pass) for rank in ranks] == late
    assert [ended(fetch(plane, 1, 0, at, **one_pass)) for at in (2, 7)] == [("consumed", 0)] * 2
    assert batch(plane, 1, 0, 2, **next_pass) == [2 * len(ranks)]


def test_workers_of_one_pass_end_at_the_first_batch_that_was_not_there(plane):
    one_pass = {"finite": True, "first_index": 0, "pass_start": 0}
    put(plane, 4)
    assert batch(plane, 4, 0, 0, **one_pass) == [0, 1, 2, 3]
    assert ended(fetch(plane, 4, 0, 1, **one_pass)) == ("consumed", 0)
    put(plane, 8)
    assert ended(fetch(plane, 4, 0, 2, **one_pass)) == ("consumed", 0)
    assert batch(plane, 4, 0, 2, finite=True, first_index=1, pass_start=1) == [8, 9, 10, 11]


def test_ranks_that_draw_for_themselves_end_by_themselves_and_a_reset_forgets_ends(plane):
    put(plane, 4)
    for batch_index in range(3):
        batch(plane, 1, 0, batch_index, finite=True, pass_start=0)
    batch(plane, 1, 1, 0, finite=True, pass_start=0)
    assert ended(fetch(plane, 1, 1, 1, finite=True, pass_start=0)) == ("consumed", 0)
    put(plane, 1)
    assert batch(plane, 1, 0, 3, finite=True, pass_start=0) == [4]
    assert ended(fetch(plane, 1, 1, 1, finite=True, pass_start=0)) == ("consumed", 0)
    ask(plane, ACTOR, p.ResetConsumption, "p")
    put(plane, 1)
    assert batch(plane, 1, 1, 1, finite=True, pass_start=0) == [5]


def test_a_finite_stream_may_go_on_when_more_samples_come_later(plane):
    put(plane, 1)
    batch(plane, 1, 0, 0, finite=True)
    assert ended(fetch(plane, 1, 0, 1, finite=True)) == ("consumed", 0)
    put(plane, 1)
    assert batch(plane, 1, 0, 1, finite=True) == [1]


def test_a_finite_stream_waits_for_the_declared_number_of_samples_however_quiet_it_is(plane):
    ask(plane, ACTOR, p.CreatePartition, "p", 4)
    put(plane, 3)
    assert batch(plane, 2, 0, 0, finite=True) == [0, 1]
    assert isinstance(fetch(plane, 2, 0, 1, finite=True, now=100.0), p.NotReady)
    put(plane, 1)
    assert batch(plane, 2, 0, 1, finite=True, now=100.0) == [2, 3]
    assert ended(fetch(plane, 2, 0, 2, finite=True, now=100.0)) == ("consumed", 0)
