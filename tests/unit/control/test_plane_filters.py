# SPDX-License-Identifier: Apache-2.0
"""Fetches with a filter over tags: what they draw, when they end, and that comparing holds up nobody."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ask,
    batch,
    batches,
    cancel,
    clear,
    fetch,
    indexes,
    load,
    not_ready,
    park,
    publish,
    put,
    refused,
    register,
    reserve,
    save,
    seal,
    send,
    short_turns,
    turns,
)

from transfer_queue import protocol as p

MATH, CODE = "env == 'math'", "env == 'code'"


def put_tagged(plane: Any, *envs: str | None, names: tuple[str, ...] = ("x",)) -> list[int]:
    """One sample per environment; None: without tags."""
    samples = reserve(plane, len(envs))
    tags = {index: {"env": env} for index, env in zip(samples, envs, strict=True) if env is not None}
    publish(plane, samples, *names, tags=tags)
    return samples


def retag(plane: Any, **tags: Any) -> Any:
    """``_3={"env": "math"}`` replaces the tags of sample 3."""
    return send(plane, ROLLOUT, p.SetTags, {"p": {int(name[1:]): own for name, own in tags.items()}})


def ended(reply: Any) -> tuple[str, int]:
    assert isinstance(reply, p.Ended), reply
    return reply.reason, reply.dropped


# ---- what is drawn ----


def test_a_fetch_draws_only_what_matches_and_leaves_the_others(plane):
    put_tagged(plane, "math", "code", None, "math", "code")
    assert batch(plane, 2, where=MATH) == [0, 3]
    assert fetch(plane, 1, where=MATH).ready == 0
    assert batch(plane, 3) == [1, 2, 4]


def test_each_task_has_its_own_share_of_what_matches(plane):
    put_tagged(plane, "math", "code", "math")
    assert batch(plane, 2, where=MATH, task="a") == [0, 2]
    assert batch(plane, 2, where=MATH, task="b") == [0, 2]


def test_a_mistake_in_a_filter_is_refused_and_takes_nothing(plane):
    put_tagged(plane, "math")
    refused(fetch(plane, 1, where="env = 'math'"), "InvalidRequestError", "at character 5", "found \"= 'math'\"")
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["tasks"] == {}
    assert batch(plane, 1) == [0]


def test_a_fetch_waits_for_the_put_that_brings_a_match(plane):
    put_tagged(plane, "code")
    park(plane, 1, where=MATH)
    samples = reserve(plane, 2)
    replies = publish(plane, samples, tags={1: {"env": "code"}, 2: {"env": "math"}})
    assert batches(replies) == [(ACTOR, [2])]


def test_a_fetch_waits_for_the_tags_that_make_a_match(plane):
    put_tagged(plane, None, "code")
    park(plane, 1, where=MATH)
    assert batches(retag(plane, _1={"env": "math"})) == [(ACTOR, [1])]


def test_what_matches_no_more_is_not_drawn(plane):
    put_tagged(plane, "math", "math")
    assert not_ready(fetch(plane, 3, where=MATH))[:3] == (3, 2, 2)
    retag(plane, _0={"env": "code"})
    assert batch(plane, 1, where=MATH) == [1]


def test_tags_that_come_with_a_later_field_count(plane):
    put_tagged(plane, "code", names=("y",))
    park(plane, 1, names=("x", "y"), where=MATH)
    assert batches(publish(plane, [0], "x", tags={0: {"env": "math"}})) == [(ACTOR, [0])]


def test_a_put_of_the_same_field_again_changes_nothing(plane):
    put_tagged(plane, "math", "math")
    assert not_ready(fetch(plane, 3, where=MATH))[1] == 2
    publish(plane, [0], "x")
    assert batch(plane, 2, where=MATH) == [0, 1]


def test_a_fetch_behind_one_that_lacks_a_field_is_told_how_many_match(plane):
    put_tagged(plane, "math")
    assert batch(plane, 1, 0, 0, where=MATH) == [0]
    park(plane, 1, 0, 0, names=("x", "y"), where=MATH)
    put_tagged(plane, "math", "code", "math", names=("x", "y"))
    reply = fetch(plane, 3, 0, 1, names=("x", "y"), where=MATH)
    assert (not_ready(reply)[:2], reply.unmatched) == ((3, 2), 1)


def test_what_a_cancelled_fetch_took_is_drawn_again(plane):
    put_tagged(plane, "code", "math")
    taken = fetch(plane, 1, where=MATH)
    assert cancel(plane, ACTOR, taken) == ("undone", [])
    assert batch(plane, 1, where=MATH) == [1]


def test_cleared_samples_and_a_compacted_table_are_followed(plane):
    put_tagged(plane, *["math", "code"] * 100)
    assert not_ready(fetch(plane, 101, where=MATH))[1] == 100
    clear(plane, list(range(150)))
    assert batch(plane, 25, where=MATH) == list(range(150, 200, 2))


def test_after_a_reset_the_filter_is_compared_anew(plane):
    put_tagged(plane, "math", "code")
    assert batch(plane, 1, where=MATH) == [0]
    ask(plane, ACTOR, p.ResetConsumption, "p")
    assert batch(plane, 1, where=MATH) == [0]


def test_the_reply_and_the_statistics_say_what_does_not_match(plane):
    put_tagged(plane, "math", "code", "code")
    put_tagged(plane, None, names=("y",))
    reply = fetch(plane, 2, where=MATH)
    assert (not_ready(reply), reply.unmatched) == ((2, 1, 4, {"x": 1}), 2)
    park(plane, 2, where=MATH)
    stats = ask(plane, CRITIC, p.GetStats).value
    assert stats["partitions"]["p"]["tasks"]["train"]["ready"] == {"x": 3, f"x where {MATH}": 1}
    assert stats["waiting"][0]["unmatched"] == 2


# ---- who waits for whom ----


def test_fetches_with_other_filters_do_not_wait_for_one_another(plane):
    put_tagged(plane, "code")
    park(plane, 1, where=MATH)
    assert batch(plane, 1, where=CODE) == [0]
    assert batches([*publish(plane, reserve(plane, 1), tags={1: {"env": "math"}})]) == [(ACTOR, [1])]


def test_with_one_filter_a_later_smaller_fetch_does_not_overtake(plane):
    park(plane, 2, where=MATH)
    park(plane, 1, where=MATH, client=CRITIC)
    assert batches(publish(plane, reserve(plane, 1), tags={0: {"env": "math"}})) == []
    replies = publish(plane, reserve(plane, 2), tags={1: {"env": "math"}, 2: {"env": "math"}})
    assert batches(replies) == [(ACTOR, [0, 1]), (CRITIC, [2])]


# ---- rounds and the ledger ----


def test_a_round_is_drawn_for_all_ranks_with_the_filter_of_the_fetch_that_draws_it(plane):
    register(plane, dp_size=2, sampler="RankAwareSampler")
    put_tagged(plane, "math", "code", "math", "code", "math")
    assert batch(plane, 1, 0, 0, where=MATH) == [0]
    assert batch(plane, 1, 1, 0) == [2], "the ledger answers, whatever the filter"
    park(plane, 1, 1, 1, where=MATH)
    replies = publish(plane, reserve(plane, 1), tags={5: {"env": "math"}})
    assert batches(replies) == [(ACTOR, [5])]
    assert batch(plane, 1, 0, 1, where=MATH) == [4]


def test_a_batch_keeps_its_samples_when_their_tags_change(plane):
    put_tagged(plane, "math", "code")
    assert batch(plane, 1, 0, 0, where=MATH) == [0]
    retag(plane, _0={"env": "code"}, _1={"env": "math"})
    assert batch(plane, 1, 0, 0, where=MATH) == [0]


def test_a_group_is_drawn_only_if_all_of_it_matches(plane):
    register(plane, sampler={"class": "GRPOGroupNSampler", "args": [], "kwargs": {"n_samples_per_prompt": 2}})
    for envs in (("math", "code"), ("math", "math")):
        put_tagged(plane, *envs)
    assert batch(plane, 2, where=MATH) == [2, 3]


# ---- ends ----


def test_a_sealed_partition_ends_for_a_filter_that_nothing_ready_matches(plane):
    put_tagged(plane, "math", "code")
    assert batch(plane, 1, where=MATH) == [0]
    park(plane, 1, where=MATH)
    replies = seal(plane)
    assert [ended(to.reply) for to in replies[1:]] == [("sealed", 0)]
    assert batch(plane, 1) == [1], "the other fetches go on"
    assert ended(fetch(plane, 1)) == ("sealed", 0)


def test_samples_under_way_or_without_a_field_may_still_match(plane):
    put_tagged(plane, "code", names=("y",))
    held = reserve(plane, 1)
    seal(plane)
    park(plane, 1, where=MATH)
    assert batches(publish(plane, held, tags={1: {"env": "math"}})) == [(ACTOR, [1])]
    park(plane, 1, where=MATH)
    (_, other) = publish(plane, [0], "x")
    assert ended(other.reply) == ("sealed", 0)


def test_an_end_that_was_told_stays_for_all_ranks_until_samples_come_back(plane):
    register(plane, dp_size=2, sampler="RankAwareSampler")
    put_tagged(plane, "code", "code")
    seal(plane)
    assert ended(fetch(plane, 1, 0, 0, where=MATH)) == ("sealed", 0)
    retag(plane, _0={"env": "math"}, _1={"env": "math"})
    assert ended(fetch(plane, 1, 1, 0, where=MATH)) == ("sealed", 0)
    ask(plane, ACTOR, p.ResetConsumption, "p")
    assert batch(plane, 1, 1, 0, where=MATH) == [1]


@pytest.mark.parametrize(("tail", "expected"), [("drop", ("sealed", 1)), ("pad", [0]), ("uneven_ok", [0])])
def test_the_tail_is_what_matches(plane, tail, expected):
    register(plane, tail=tail)
    put_tagged(plane, "math", "code", "code")
    seal(plane)
    reply = fetch(plane, 2, 0, 0, where=MATH)
    if tail == "drop":
        assert ended(reply) == expected
    else:
        assert sorted(set(indexes(reply))) == expected
        assert ended(fetch(plane, 2, 0, 1, where=MATH)) == ("sealed", 0)


def test_a_finite_stream_ends_when_it_has_consumed_what_matches(plane):
    put_tagged(plane, "math", "code")
    assert batch(plane, 1, 0, 0, where=MATH, finite=True) == [0]
    assert ended(fetch(plane, 1, 0, 1, where=MATH, finite=True)) == ("consumed", 0)


def test_ends_of_filters_are_saved(plane, make_plane):
    put_tagged(plane, "code")
    seal(plane)
    assert ended(fetch(plane, 1, where=MATH)) == ("sealed", 0)
    restored = make_plane()
    assert isinstance(load(restored, save(plane)), p.Cleared)
    retag(restored, _0={"env": "math"})
    assert ended(fetch(restored, 1, where=MATH)) == ("sealed", 0)
    assert batch(restored, 1, where="exists(env)") == [0]


# ---- comparing a little at a time ----

MANY = 12_800
"""Many times as many as are compared between two looks at the time."""


@pytest.fixture
def many(plane):
    """Of many samples only the last one matches."""
    short_turns(plane, 8)
    put(plane, MANY - 1)
    put_tagged(plane, "math")
    return plane


def finish(plane: Any, now: float = 1.0) -> tuple[int, list[Any]]:
    """How many turns it takes until there is nothing to compare, and the replies."""
    found = turns(plane, now)
    return len(found), [reply for turn in found for reply in turn]


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 50.0])
def test_a_fetch_is_answered_once_all_samples_are_compared_some_in_each_turn(many, wait_s):
    assert fetch(many, 1, where=MATH, wait_s=wait_s) is None
    assert batch(many, 1, task="other") == [0], "others are served in between"
    turns, replies = finish(many)
    assert batches(replies) == [(ACTOR, [MANY - 1])]
    assert turns >= 2


def test_a_fetch_that_does_not_wait_is_told_not_yet_after_all_is_compared(many):
    assert fetch(many, 2, where=MATH) is None
    (turns, (reply,)) = finish(many)
    assert (turns >= 3, not_ready(reply.reply)[:2]) == (True, (2, 1))


def test_a_sample_is_compared_once_and_again_when_its_tags_change(many):
    fetch(many, 2, where=MATH)
    finish(many)
    assert not_ready(fetch(many, 2, where=MATH))[:2] == (2, 1), "at once: nothing is left to compare"
    retag(many, _5={"env": "math"})
    publish(many, reserve(many, 1))
    assert batch(many, 2, where=MATH) == [5, MANY - 1]


def test_dead_producers_do_not_fail_a_fetch_before_all_is_compared(many):
    many.client_gone(ROLLOUT, 0.0)
    assert fetch(many, 1, where=MATH, wait_s=50.0, now=100.0) is None
    assert batches(finish(many, 100.0)[1]) == [(ACTOR, [MANY - 1])]
    refused(fetch(many, 1, where=MATH, wait_s=50.0, now=100.0), "ProducersGoneError")


def test_a_fetch_that_ends_while_it_is_compared_leaves_no_work_behind(many):
    fetch(many, 1, where=MATH, wait_s=50.0, client=CRITIC)
    many.client_gone(CRITIC, 0.0)
    assert finish(many) == (0, [])


def test_a_cleared_partition_ends_what_is_compared(many):
    fetch(many, 1, where=MATH)
    (reply, *_) = [to.reply for to in send(many, ROLLOUT, p.ClearPartition, "p") if to.client == ACTOR]
    assert ended(reply) == ("cleared", 0)
