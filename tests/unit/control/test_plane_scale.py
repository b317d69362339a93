# SPDX-License-Identifier: Apache-2.0
"""A thousand waiting ranks: what decides nothing looks at few of them, and what decides all takes short turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from control_kit import (
    ACTOR,
    ROLLOUT,
    ack,
    ask,
    batch,
    batches,
    cancel,
    chores,
    clear,
    fetch,
    indexes,
    new_plane,
    not_ready,
    park,
    publish,
    put,
    refused,
    register,
    reserve,
    seal,
    send,
    turns,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import RankAwareSampler
from transfer_queue import protocol as p

RANKS = 1000
ANSWERS_PER_TURN = 205
"""As many as a turn has looks at the time, and a few."""
TASKS = ("actor", "critic")
MOST_LOOKS = 5
"""At waiting fetches, of a request that decides none of them: the first of each task, or one that was just answered."""


class OneByOne(RankAwareSampler):
    """Draws as its parent does, but it might not: so it is called for each rank."""


@pytest.fixture
def crowd(make_plane: Callable[..., Any], looks: Any) -> Any:
    """Every rank of every task waits for its first batch of one sample; no sample is there."""
    plane = make_plane()
    for task, rank in itertools.product(TASKS, range(RANKS)):
        park(plane, 1, rank, 0, task=task, dp_size=RANKS, client=f"rank {rank}", wait_s=10.0)
    put(plane, 1)  # the partition is there from now on, which may have decided something
    turns(plane)
    return plane


UNDECISIVE: dict[str, Callable[[Any], Any]] = {
    "put": lambda plane: put(plane, 1),
    "another field": lambda plane: publish(plane, [0], "y"),
    "a rank is gone": lambda plane: plane.client_gone("rank 7", now=0.0),
    "the first rank is gone": lambda plane: plane.client_gone("rank 0", now=0.0),
    "a batch of another partition": lambda plane: (put(plane, 1, partition="q"), batch(plane, 1, partition="q")),
    "tags": lambda plane: ask(plane, ACTOR, p.SetTags, {"p": {0: {"a": 1}}}),
    "clear": lambda plane: clear(plane, [0]),
    "cancelled reservation": lambda plane: cancel(plane, ROLLOUT, ask(plane, ROLLOUT, p.Reserve, "p", 1)),
    "park": lambda plane: fetch(plane, 1, 5, 1, task="actor", dp_size=RANKS, wait_s=10.0),
    "poll": lambda plane: not_ready(fetch(plane, 1, 5, 1, task="actor", dp_size=RANKS)),
}


@pytest.mark.parametrize("kind", UNDECISIVE)
def test_what_decides_nothing_looks_at_few_of_the_waiting_fetches(crowd, looks, kind):
    assert looks.of(lambda: (UNDECISIVE[kind](crowd), turns(crowd))) <= MOST_LOOKS


def test_ranks_that_come_one_by_one_look_at_few_of_those_that_wait_for_the_next_round(plane, looks):
    put(plane, 20)
    tokens = [fetch(plane, 1, rank, 0, dp_size=20).token for rank in range(10)]
    for rank in range(10):
        ack(plane, tokens[rank])
        park(plane, 1, rank, 1, dp_size=20, client=f"rank {rank}")
    for rank in range(10, 20):
        assert looks.of(lambda rank=rank: (batch(plane, 1, rank, 0, dp_size=20), turns(plane))) <= MOST_LOOKS


def test_a_round_that_wakes_all_ranks_is_told_in_short_turns_and_others_are_served_between(crowd):
    (first, *rest) = [publish(crowd, reserve(crowd, RANKS - 1)), *turns(crowd)]
    told = [*first[1:], *itertools.chain(*rest)]
    assert max(map(len, (first, *rest))) <= ANSWERS_PER_TURN + 1
    assert sorted(batches(told)) == sorted((f"rank {rank}", [rank]) for rank in range(RANKS) for _ in TASKS)
    assert crowd.next_deadline() is None


def test_a_bystander_is_answered_while_many_ranks_are_still_to_be_told(crowd):
    publish(crowd, reserve(crowd, RANKS - 1))
    assert crowd.next_deadline() == -math.inf
    assert put(crowd, 1, partition="other") == [RANKS]
    assert batch(crowd, 1, partition="other") == [RANKS]
    assert batch(crowd, 1, RANKS - 1, 0, task="actor", dp_size=RANKS) == [RANKS - 1]
    turns(crowd)
    assert crowd.next_deadline() is None


def test_fetches_that_all_reach_their_deadline_are_answered_in_short_turns(crowd):
    told = turns(crowd, now=11.0)
    assert max(map(len, told)) <= ANSWERS_PER_TURN
    replies = [to.reply for to in itertools.chain(*told)]
    assert {not_ready(reply)[:2] for reply in replies} == {(RANKS, 1)}
    assert (len(replies), crowd.next_deadline()) == (2 * RANKS, None)


def test_fetches_of_a_cleared_partition_end_in_short_turns(crowd):
    told = [send(crowd, ACTOR, p.ClearPartition, "p"), *turns(crowd)]
    assert max(map(len, told)) <= ANSWERS_PER_TURN + 1
    replies = [to.reply for to in itertools.chain(*told)]
    assert sum(isinstance(reply, p.Ended) for reply in replies) == 2 * RANKS


def test_statistics_examine_ranks_that_wait_for_the_same_once(crowd):
    waiting = ask(crowd, ACTOR, p.GetStats).value["waiting"]
    assert {(each["task"], each["wanted"], each["ready"]) for each in waiting} == {(task, RANKS, 1) for task in TASKS}
    assert len({id(each["lacking"]) for each in waiting}) == len(TASKS)


# ---- what behind the first of a line may be decided nevertheless ----


@pytest.fixture
def blocked(plane: Any) -> Any:
    """Rank 0 waits for a batch that can't be drawn, and others wait behind it."""
    put(plane, 4, "x")
    register(plane, dp_size=2)
    assert batch(plane, 1, 0, 0) == [0]
    park(plane, 8, 0, 1, client="first")
    return plane


def test_a_batch_of_the_ledger_comes_once_its_samples_have_the_field(blocked):
    park(blocked, 1, 1, 0, names=("y",), client="behind")  # first again: its round is the earlier one
    park(blocked, 1, 1, 0, names=("y",), client="last")
    assert batches(publish(blocked, [0], "y")) == []
    assert batches(publish(blocked, [1], "y")) == [("behind", [1]), ("last", [1])]


def test_a_batch_that_is_acknowledged_meanwhile_is_refused(blocked):
    token = fetch(blocked, 1, 1, 0).token
    park(blocked, 1, 1, 0, names=("y",), client="behind")
    park(blocked, 1, 1, 0, names=("y",), client="last")
    (_, behind, last) = send(blocked, ACTOR, p.Ack, "p", "train", [token])
    assert (behind.client, last.client) == ("behind", "last")
    refused(last.reply, "InvalidRequestError", "settled")


def test_a_rank_that_names_no_batch_gets_the_next_one_when_it_was_given_the_earlier_one(plane):
    register(plane, dp_size=2)
    put(plane, 4)
    assert [batch(plane, 1, 1) for _ in range(2)] == [[1], [3]]  # both rounds are drawn
    park(plane, 1, 0, 5, names=("z",), client="first")
    park(plane, 1, 0, names=("z",), client="unnamed")  # for its batch 0, which lacks this field
    publish(plane, [2], "z")
    told = send(plane, ACTOR, p.Fetch, "p", "train", ["x"], 1, 0, 0)
    assert batches(told) == [(ACTOR, [0]), ("unnamed", [2])]


def test_a_round_drawn_with_one_filter_is_told_to_a_rank_that_waits_with_another(plane):
    register(plane, dp_size=2)
    park(plane, 1, 1, 0, where="v == 2", client="other")
    park(plane, 1, 0, 0, where="v == 1", client="first")
    samples = reserve(plane, 2)
    told = publish(plane, samples, tags={index: {"v": 1} for index in samples})
    assert batches(told) == [("first", [0]), ("other", [1])]


def test_all_waiting_fetches_are_told_the_end(crowd):
    told = itertools.chain(seal(crowd), *turns(crowd))
    assert sum(isinstance(to.reply, p.Ended) for to in told) == 2 * RANKS


# ---- rounds ----


@given(
    cleared=st.sets(st.integers(0, 59), max_size=30),
    tails=st.sets(st.integers(0, 59), max_size=30),
    size=st.integers(1, 3),
    ranks=st.integers(2, 9),
)
@settings(max_examples=20, deadline=None)
def test_a_round_in_one_step_is_the_round_drawn_rank_by_rank(cleared, tails, size, ranks):
    planes = []
    for sampler in (RankAwareSampler(), OneByOne()):
        plane = new_plane(sampler=sampler)
        put(plane, 60)
        fetch(plane, size, 0, 10**6, dp_size=ranks, task="other")
        given_before = [batch(plane, size, rank, 0, dp_size=ranks) for rank in range(ranks)]
        clear(plane, sorted(cleared))
        publish(plane, sorted(tails - cleared) or reserve(plane, 1), "y")
        seen = [fetch(plane, size, r, b, dp_size=ranks, names=("y",)) for b in (1, 2) for r in range(ranks)]
        planes.append((given_before, [indexes(each) if isinstance(each, p.Batch) else None for each in seen]))
        plane.check_invariants()
    assert planes[0] == planes[1]


# ---- writers ----


def test_a_request_checks_no_writer_that_waits_for_room(make_plane, looks):
    plane = make_plane(capacity=8)
    samples = put(plane, 8)
    token = fetch(plane, 1, 0, 0).token
    for number in range(100):
        assert ask(plane, f"writer {number}", p.Reserve, "p", 1, wait_s=9.0) is None
    looks.writers = 0
    ack(plane, token)
    publish(plane, samples, "y")
    fetch(plane, 1, 0, 1)
    assert looks.writers == 0
    (_, to) = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[:1]))
    assert (to.client, looks.writers, chores(plane)) == ("writer 0", 1, [])
    told = send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[1:3]))
    assert [to.client for to in told[1:]] == ["writer 1", "writer 2"]
    told = [*seal(plane), *itertools.chain(*turns(plane))]
    assert [to.client for to in told[1:]] == [f"writer {number}" for number in range(3, 100)]


def test_many_writers_that_find_room_at_once_are_admitted_in_short_turns(make_plane):
    plane = make_plane(capacity=RANKS)
    samples = put(plane, RANKS)
    for number in range(RANKS):
        assert ask(plane, f"writer {number}", p.Reserve, "p", 1, wait_s=9.0) is None
    told = [send(plane, ACTOR, p.ClearSamples, "p", p.pack_indexes(samples))[1:], *turns(plane)]
    assert max(map(len, told)) <= ANSWERS_PER_TURN
    assert [to.client for to in itertools.chain(*told)] == [f"writer {number}" for number in range(RANKS)]
    assert plane.next_deadline() is None


def test_the_last_of_a_long_line_is_answered_while_publishes_go_on(plane) -> None:
    """Each publish may decide somebody, so no look is for nothing; but the pass must come to its end."""
    count = 2 * RANKS
    register(plane, dp_size=count)
    put(plane, count, "x")
    assert fetch(plane, 1, 0, 0)
    for rank in range(count):
        send(plane, f"rank {rank}", p.Fetch, "p", "train", ["y"], 1, rank, 0, wait_s=1e6)
    turns(plane)
    told = publish(plane, [count - 1], "y")  # the sample that the round gave to the last rank
    for other in put(plane, 10, "x"):
        told += publish(plane, [other], "y") + plane.expire(0.0)
    assert [reply.client for reply in told if isinstance(reply.reply, p.Batch)] == [f"rank {count - 1}"]


@pytest.mark.parametrize("wait_s", [0.0, 9.0])
def test_a_round_that_a_fetch_draws_without_an_own_batch_is_told_to_its_ranks(plane: Any, wait_s: float) -> None:
    register(plane, dp_size=2)
    send(plane, "waiting", p.Fetch, "p", "train", ["x"], 1, 1, 0, wait_s=1e6, where="v == 2")
    samples = reserve(plane, 2)
    publish(plane, samples, tags={index: {"v": 1} for index in samples})
    told = send(plane, "ahead", p.Fetch, "p", "train", ["x"], 1, 0, 1, first_index=0, wait_s=wait_s, where="v == 1")
    told += [reply for turn in turns(plane) for reply in turn]
    assert [reply.client for reply in told if isinstance(reply.reply, p.Batch)] == ["waiting"]
