# SPDX-License-Identifier: Apache-2.0
"""What a request costs doesn't depend on how many samples its partition holds: array elements are counted, not time."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    ROLLOUT,
    ack,
    ask,
    batch,
    cancel,
    clear,
    fetch,
    grpo,
    new_plane,
    park,
    publish,
    put,
    register,
    reserve,
    rest,
    seal,
)
from counting_kit import cost, watch

from transfer_queue import BaseSampler
from transfer_queue import protocol as p

ROWS = 200_000
MOST = 10_000
"""Elements that a request for few samples may look at: some chunks of 4096 rows, some blocks of 1024."""


@pytest.fixture(scope="module")
def tokens() -> list[str]:
    return []


@pytest.fixture(scope="module")
def large(tokens):
    """A partition of many samples in mid-stream; each request below is one that its kind of client repeats."""
    plane = new_plane()
    put(plane, ROWS, "x")
    put(plane, 100, "x")  # the table has room now: growing costs its size, once in a while
    publish(plane, [ROWS - 1], "y")
    for task in ("plain", "sealed", "parked"):  # the first look of a task at some fields is a scan
        batch(plane, 1, task=task)
        fetch(plane, 1, task=task, names=("x", "z"))
        fetch(plane, 2, task=task, names=("x", "y"))
    fetch(plane, 1, task="filtered", where="v == 1 or not exists(w)")
    rest(plane)
    fetch(plane, 1, task="finite", names=("x", "z"))
    batch(plane, ROWS, task="finite")
    batch(plane, 100, task="finite")
    for sampler in ("SequentialSampler", "RankAwareSampler", "GRPOGroupNSampler"):
        register(plane, sampler, sampler=sampler, dp_size=4)
        batch(plane, 2, 0, 0, task=sampler)
    tokens += [fetch(plane, 1, 0, index, task="ranked").token for index in range(3)]
    park(plane, 2, task="parked", names=("x", "y"))
    watch(plane)
    return plane


REQUESTS = {
    "reserve": lambda plane: reserve(plane, 1),
    "put": lambda plane: put(plane, 1),
    "publish onto a sample": lambda plane: publish(plane, [5], "x"),
    "publish described": lambda plane: publish(plane, reserve(plane, 1), describe=True),
    "cancel": lambda plane: cancel(plane, ROLLOUT, ask(plane, ROLLOUT, p.Reserve, "p", 1)),
    "insert": lambda plane: ask(plane, ROLLOUT, p.Insert, "p", 1, ["x"]),
    "fetch": lambda plane: batch(plane, 4, task="plain"),
    "fetch with a filter": lambda plane: batch(plane, 4, task="filtered", where="v == 1 or not exists(w)"),
    "fetch of another's round": lambda plane: batch(plane, 2, 3, 0, task="RankAwareSampler"),
    "round of SequentialSampler": lambda plane: batch(plane, 2, 0, 1, task="SequentialSampler"),
    "round of RankAwareSampler": lambda plane: batch(plane, 2, 0, 1, task="RankAwareSampler"),
    "round of GRPOGroupNSampler": lambda plane: batch(plane, 2, 0, 1, task="GRPOGroupNSampler"),
    "batch given again": lambda plane: batch(plane, 1, 0, 2, task="ranked"),
    "poll for a field that nobody has": lambda plane: fetch(plane, 1, task="plain", names=("x", "z")),
    "poll for a field that one has": lambda plane: fetch(plane, 2, task="plain", names=("x", "y")),
    "poll far ahead": lambda plane: fetch(plane, 1, 0, 10**15, task="plain", names=("x", "z"), first_index=0),
    "end of a finite stream": lambda plane: fetch(plane, ROWS, task="finite", finite=True),
    "a parked fetch expires": lambda plane: plane.expire(1e9),
    "set tags": lambda plane: ask(plane, ACTOR, p.SetTags, {"p": {7: {"a": 1}}}),
    "describe": lambda plane: ask(plane, ACTOR, p.Describe, "p", None, p.pack_indexes([7])),
    "resolve keys": lambda plane: ask(plane, ROLLOUT, p.ResolveKeys, "p", ["k", "l"], True),
    "is all consumed?": lambda plane: ask(plane, ACTOR, p.ConsumptionStatus, "p", "plain", True),
    "clear": lambda plane: clear(plane, [11, 12]),
    "statistics": lambda plane: ask(plane, ACTOR, p.GetStats),
    "writer gone": lambda plane: plane.client_gone(ROLLOUT, now=0.0),
    "seal": lambda plane: seal(plane),
    "fetch from a sealed partition": lambda plane: batch(plane, 4, task="sealed"),
    "poll of a sealed partition": lambda plane: fetch(plane, 1, task="sealed", names=("x", "z")),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_looks_at_few_rows_however_many_there_are(large, kind):
    assert cost(lambda: REQUESTS[kind](large)) < MOST


@pytest.mark.parametrize("per_put", [1, 2, 4, 1000])
def test_a_reward_that_completes_no_round_looks_at_few_rows(per_put):
    plane = new_plane()
    for _ in range(4000 // per_put):
        put(plane, per_put)
    grpo(plane, 4)
    park(plane, 200, names=("x", "y"))
    publish(plane, [row for row in range(4000) if row % 4], "y")  # three of four, so that no group is whole
    watch(plane)
    assert [cost(lambda row=row: publish(plane, [row], "y")) < 2000 for row in range(0, 196, 4)] == [True] * 49
    (_, drawn) = publish(plane, [2000], "y")
    drawn_rows = p.unpack_indexes(drawn.reply.indexes).tolist()
    assert (drawn_rows[:196], len(drawn_rows)) == (list(range(196)), 200)


class Never(BaseSampler):
    def sample(self, ready_indexes, batch_size):
        return [], []


def test_what_is_ready_is_listed_once_per_change_for_a_sampler_that_sees_it_all():
    plane = new_plane(sampler=Never())
    put(plane, ROWS, "x")
    park(plane, 1, names=("x",))
    watch(plane)
    assert cost(lambda: publish(plane, [5], "y")) < MOST
    assert cost(lambda: put(plane, 1, "x")) > ROWS


def test_an_ack_looks_at_no_rows(large, tokens):
    assert cost(lambda: ack(large, tokens[0], task="ranked")) == 0


def test_the_count_notices_a_scan(large):
    assert cost(lambda: ask(large, ACTOR, p.ConsumptionStatus, "p", "plain")) > ROWS
    assert cost(lambda: fetch(large, 1, task="new")) > ROWS


def test_a_preallocated_partition_finds_its_free_rows_without_looking_at_all_of_them():
    plane = new_plane(preallocate=ROWS)
    put(plane, ROWS // 2)
    watch(plane)
    taken = []
    assert cost(lambda: [taken.extend(reserve(plane, 1)) for _ in range(3)]) < 4 * MOST
    assert taken == [ROWS // 2, ROWS // 2 + 1, ROWS // 2 + 2]
