# SPDX-License-Identifier: Apache-2.0
"""Samplers through the plane: groups and balanced ranks, and samplers that are anybody's code."""

from __future__ import annotations

from collections import Counter

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ask,
    batch,
    batches,
    clear,
    fetch,
    grpo,
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

from transfer_queue import BaseSampler, SequentialSampler
from transfer_queue import protocol as p


def spec(name, **kwargs):
    return {"class": name, "kwargs": kwargs}


def balanced(plane, dp_size, size=1, **kwargs):
    register(plane, sampler=spec("SeqlenBalancedSampler", n_samples_per_prompt=size, dp_size=dp_size), **kwargs)


# ---- groups ----


def test_a_partial_group_waits_and_never_shifts_the_groups_behind_it(plane):
    grpo(plane, 3)
    first, second = put(plane, 3, "x"), put(plane, 3, "x")
    publish(plane, first[:2] + second, "y")
    assert batch(plane, 3, names=("x", "y")) == second
    publish(plane, first[2:], "y")
    assert batch(plane, 3, names=("x", "y")) == first


def test_a_group_that_lost_a_sample_is_never_completed_by_another_put(plane):
    grpo(plane, 2)
    first = put(plane, 2)
    clear(plane, first[1:])
    other = put(plane, 2)
    clear(plane, other[:1])
    assert isinstance(fetch(plane, 2), p.NotReady)
    assert batch(plane, 2, task="judge") == [first[0], other[1]]


def test_a_group_split_between_preallocated_and_new_samples_is_whole(make_plane):
    plane = make_plane(preallocate=3)
    grpo(plane, 2)
    put(plane, 2)
    put(plane, 1, partition="other")
    assert put(plane, 2) == [2, 6]
    assert [batch(plane, 2) for _ in range(2)] == [[0, 1], [2, 6]]


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_groups_go_whole_to_one_rank_and_every_rank_gets_as_many(plane, dp_size):
    grpo(plane, 2, dp_size=dp_size)
    groups = [put(plane, 2) for _ in range(2 * dp_size)]
    shares = [batch(plane, 4, rank, 0) for rank in range(dp_size)]
    assert shares == [groups[2 * rank] + groups[2 * rank + 1] for rank in range(dp_size)]


def test_partial_groups_at_the_end_are_dropped_and_counted(plane):
    grpo(plane, 2)
    put(plane, 3)
    seal(plane)
    assert batch(plane, 2) == [0, 1]
    reply = fetch(plane, 2)
    assert (reply.reason, reply.dropped) == ("sealed", 1)


def test_pad_repeats_whole_groups(plane):
    grpo(plane, 2, dp_size=2, tail="pad")
    put(plane, 2)
    seal(plane)
    assert [batch(plane, 4, rank, 0) for rank in range(2)] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert list(fetch(plane, 4, 0, 0).padding) == [0, 0, 1, 1]


def test_a_batch_size_that_splits_groups_is_refused_with_the_nearest_that_work(plane):
    grpo(plane, 4)
    put(plane, 8)
    refused(fetch(plane, 6, wait_s=9.0), "SamplerError", "multiple of n_samples_per_prompt (4)", "4 or 8")
    assert batch(plane, 8) == list(range(8))


@pytest.mark.parametrize("kind", ["GRPOGroupNSampler", "SeqlenBalancedSampler"])
def test_a_waiting_fetch_is_refused_by_a_new_sampler_whose_groups_it_would_split(plane, kind):
    put(plane, 5)
    park(plane, 6)
    register(plane, sampler=spec(kind, n_samples_per_prompt=4))
    (_, failed) = publish(plane, reserve(plane, 1))
    refused(failed.reply, "SamplerError", "multiple of n_samples_per_prompt (4)")


# ---- balanced ranks ----


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_balanced_ranks_get_groups_of_similar_weight_and_share_the_whole_round(plane, dp_size):
    balanced(plane, dp_size, size=2)
    lengths = [length for i in range(2 * dp_size) for length in (10 * i + 1, 10 * i + 1)]
    samples = put(plane, 4 * dp_size, lengths=lengths)
    shares = [batch(plane, 4, rank, 0) for rank in range(dp_size)]
    assert sorted(index for share in shares for index in share) == samples
    assert all(pair[1] == pair[0] + 1 for share in shares for pair in (share[:2], share[2:]))
    assert len({sum(lengths[index] for index in share) for share in shares}) == 1


def test_a_balanced_round_is_consumed_whole_by_whoever_asks_first(plane):
    balanced(plane, 2)
    put(plane, 4, lengths=[5, 1, 3, 3])
    batch(plane, 2, 1, 0)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [1, 1, 1, 1]


def test_a_wrong_weight_names_the_sample_and_consumes_nothing(plane):
    balanced(plane, 2)
    put(plane, 2, lengths=[5, -1])
    refused(fetch(plane, 1, 0, 0, wait_s=9.0), "SamplerError", "sample 1 is -1")
    assert ask(plane, ACTOR, p.SetTags, {"p": {1: {"total_lengths": 2}}}).value is None
    assert sorted(batch(plane, 1, 0, 0) + batch(plane, 1, 1, 0)) == [0, 1]


def test_the_balanced_samplers_own_dp_size_holds_for_the_task(plane):
    balanced(plane, 2)
    refused(fetch(plane, 1, 2, 0), "InvalidRequestError", "dp_size 2: ranks go from 0 to 1")
    refused(fetch(plane, 1, 0, 0, dp_size=4), "InvalidRequestError", "[2, 4]", "sampler 2")


def test_a_token_budget_gives_every_rank_a_batch_of_its_own_length(plane):
    register(plane, sampler=spec("TokenBudgetSampler", max_tokens=10), dp_size=2)
    put(plane, 5, lengths=[6, 4, 9, 1, 7])
    shares = [batch(plane, 8, rank, 0) for rank in range(2)]
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert not_ready(fetch(plane, 8, 0, 1)) == (2, 1, 1, {})


def test_a_token_budget_waits_while_more_would_fit_and_takes_the_rest_after_the_seal(plane):
    register(plane, sampler=spec("TokenBudgetSampler", max_tokens=10))
    put(plane, 2, lengths=[3, 3])
    park(plane, 8)
    assert batches(seal(plane)) == [(ACTOR, [0, 1])]


def test_a_sample_over_the_token_budget_is_named(plane):
    register(plane, sampler=spec("TokenBudgetSampler", max_tokens=10))
    put(plane, 1, lengths=[11])
    refused(fetch(plane, 1), "SamplerError", "sample 0 alone weighs 11", "max_tokens (10)")


# ---- rank-aware ----


def test_the_rank_aware_sampler_needs_a_rank_and_a_batch(plane):
    register(plane, sampler="RankAwareSampler")
    put(plane, 1)
    refused(fetch(plane, 1), "SamplerError", "needs dp_rank and batch_index")


def test_the_older_call_form_gives_all_replicas_of_a_group_the_same_batches(plane):
    register(plane, sampler="RankAwareSampler")
    put(plane, 4)
    replica = {"data_replica_group": 0, "data_replica_world_size": 2}
    leader, follower = ({**replica, "data_replica_rank": rank} for rank in range(2))
    first, second = (batch(plane, 2, sampler_args=leader) for _ in range(2))
    assert [batch(plane, 2, sampler_args=follower) for _ in range(2)] == [first, second] == [[0, 1], [2, 3]]
    put(plane, 2)
    reply = fetch(plane, 2, sampler_args={**leader, "data_replica_world_size": 4})
    refused(reply, "SamplerError", "2 ranks", "is 4")


# ---- anybody's code ----


def plane_of(make_plane, sampler, **config):
    """Tasks draw with this sampler; "other" and "plain" are first come, first served."""
    plane = make_plane(sampler=sampler, **config)
    for task in ("other", "plain"):
        register(plane, task, sampler="SequentialSampler")
    return plane


class Own(BaseSampler):
    """Answers with whatever it was built with; a callable gets the ready indexes."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.offered = []

    def sample(self, ready_indexes, batch_size):
        self.offered.append(ready_indexes)
        return self.answer(ready_indexes) if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (None, ["Own returned None; expected (sampled, consumed)"]),
        ([0], ["Own returned [0]; expected (sampled, consumed)"]),
        (([0, 99], [0]), ["Own picked samples [99]", "must pick from the ready indexes"]),
        (([0, 2], []), ["Own picked samples [2]", "all of these fields: x"]),
        ((["first"], []), ["Own returned ['first']", "two lists of indexes"]),
        (([0.5], []), ["Own returned [0.5]"]),
        (([0], [0.5]), ["Own returned [0.5]"]),
        (([[0]], []), ["Own returned [[0]]"]),
        (([2**70], []), ["Own returned"]),
        ((5, 5), ["Own returned 5"]),
        (lambda ready: ready[7], ["Own failed: IndexError: list index out of range", f"({__file__}, line "]),
        (lambda ready: {}["no"], ["Own failed: KeyError: 'no'"]),
    ],
)
def test_a_sampler_that_answers_nonsense_is_an_error_for_who_asked_and_consumes_nothing(make_plane, answer, parts):
    plane = plane_of(make_plane, Own(answer))
    put(plane, 2)
    reserve(plane, 1)
    refused(fetch(plane, 1, 0, 0, wait_s=9.0), "SamplerError", *parts)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [0, 0]
    assert (plane.next_deadline(), batch(plane, 2, task="other")) == (None, [0, 1])


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, RecursionError, MemoryError, AssertionError])
def test_a_samplers_failure_answers_the_parked_fetch_and_the_publish_all_the_same(make_plane, error):
    def fail(ready):
        raise error("on purpose")

    plane = plane_of(make_plane, Own(fail))
    park(plane, 2)
    park(plane, 2, task="other", client=CRITIC)
    own, *others = publish(plane, reserve(plane, 2))
    assert isinstance(own.reply, p.Published)
    assert batches(others) == [(CRITIC, [0, 1])]
    (failed,) = [to.reply for to in others if isinstance(to.reply, p.Failed)]
    refused(failed, "SamplerError", f"Own failed: {error.__name__}: on purpose")


class Broken(SequentialSampler):
    """From some moment on its number of ranks can't be told."""

    broken = False

    @property
    def dp_size(self):
        if self.broken:
            raise SystemExit("no")

    def __deepcopy__(self, memo):
        raise SystemExit("no copies")


def test_a_sampler_whose_number_of_ranks_cannot_be_told_is_an_error_for_its_task_alone(make_plane):
    sampler = Broken()
    plane = plane_of(make_plane, sampler)
    park(plane, 1)
    park(plane, 1, task="other", client=CRITIC)
    sampler.broken = True
    _, *others = publish(plane, reserve(plane, 1))
    assert batches(others) == [(CRITIC, [0])]
    (failed,) = [to.reply for to in others if isinstance(to.reply, p.Failed)]
    refused(failed, "SamplerError", "Broken failed: SystemExit")
    refused(fetch(plane, 1), "SamplerError", "Broken failed: SystemExit")
    assert [each["task"] for each in ask(plane, ACTOR, p.GetStats).value["waiting"]] == []
    state = ask(plane, ACTOR, p.Freeze).state
    refused(ask(plane, ACTOR, p.Restore, state, 10), "SamplerError", "no copies")


class Two(SequentialSampler):
    dp_size = None


def test_a_bug_of_ours_in_one_parked_request_loses_no_answer_of_others(make_plane):
    sampler = Two()
    plane = plane_of(make_plane, sampler)
    park(plane, 1, names=("x",))
    park(plane, 1, task="other", client=CRITIC)
    sampler.dp_size = "two"  # nobody checks this number as one of a registered task is checked
    own, *others = publish(plane, reserve(plane, 1))
    assert batches(others) == [(CRITIC, [0])]
    (failed,) = [to.reply for to in others if isinstance(to.reply, p.Failed)]
    assert isinstance(own.reply, p.Published)
    assert failed.code == "InvalidRequestError", failed


@pytest.mark.parametrize(
    ("method", "samples"), [("check", 2), ("samples_needed", 2), ("has_cached_result", 1), ("forget", 2), ("tail", 1)]
)
def test_any_method_of_a_sampler_may_fail_and_every_fetch_is_answered(make_plane, method, samples):
    def fail(*args, **kwargs):
        raise LookupError(method)

    sampler = Own(([0, 1], [0, 1]))
    setattr(sampler, method, fail)
    plane = plane_of(make_plane, sampler)
    put(plane, samples)
    seal(plane)
    refused(fetch(plane, 2), "SamplerError", "Own failed: LookupError", method)


def test_a_tail_that_names_a_sample_twice_is_refused_and_consumes_nothing(make_plane):
    sampler = Own(([0, 1], [0, 1]))
    sampler.tail = lambda ready, *args, **kwargs: [*ready, *ready]
    plane = plane_of(make_plane, sampler)
    put(plane, 1)
    seal(plane)
    refused(fetch(plane, 2), "SamplerError", "Own.tail returned a sample twice: array([0, 0])")
    del sampler.tail
    assert batch(plane, 2) == [0]


@pytest.mark.parametrize("method", ["check", "samples_needed", "round"])
def test_a_sampler_of_ours_may_fail_and_every_fetch_is_answered(make_plane, method):
    sampler = SequentialSampler()
    setattr(sampler, method, lambda *args: {}[method])
    plane = plane_of(make_plane, sampler)
    put(plane, 2)
    refused(fetch(plane, 2), "SamplerError", "SequentialSampler failed: KeyError", method)


def test_a_partition_is_not_cleared_when_a_sampler_cannot_forget_it(make_plane):
    sampler = Own(([], []))
    sampler.clear_cache = lambda partition_id: 1 // 0
    plane = plane_of(make_plane, sampler)
    put(plane, 1)
    refused(ask(plane, ACTOR, p.ClearPartition, "p"), "SamplerError", "Own failed: ZeroDivisionError")
    assert batch(plane, 1, task="other") == [0]


def test_a_users_sampler_gets_a_list_and_only_the_arguments_it_names(make_plane):
    sampler = Own(([0], [0]))
    plane = plane_of(make_plane, sampler)
    put(plane, 3)
    assert batch(plane, 1, 0, 0, sampler_args={"temperature": 1}) == [0]
    assert [(type(offered), offered) for offered in sampler.offered] == [(list, [0, 1, 2])]


def test_a_users_sampler_may_change_its_list_and_gets_a_new_one_at_the_next_try(make_plane):
    offered = []

    def spoil(ready):
        offered.append(list(ready))
        ready.clear()
        return [], []

    plane = plane_of(make_plane, Own(spoil))
    put(plane, 3)
    for _ in range(2):
        fetch(plane, 1)
    put(plane, 1)
    fetch(plane, 1)
    assert offered == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]


def test_a_users_sampler_gets_the_callers_arguments_and_what_the_plane_knows(make_plane):
    class Curious(BaseSampler):
        def sample(self, ready_indexes, batch_size, temperature=None, partition=None, **kwargs):
            self.seen = (temperature, partition.get_custom_meta([0, 1]), partition.put_positions([1]), kwargs)
            return ready_indexes[:batch_size], ready_indexes[:batch_size]

    sampler = Curious()
    plane = plane_of(make_plane, sampler)
    put(plane, 2, lengths=[5])
    batch(plane, 1, 0, 3, sampler_args={"temperature": 2, "task_name": "forged"})
    known = {"task_name": "train", "partition_id": "p", "dp_size": None, "dp_rank": 0, "batch_index": 3}
    assert sampler.seen == (2, {0: {"total_lengths": 5}, 1: {}}, [(1, 2)], known)


def test_sampling_with_replacement_consumes_nothing_and_batches_keep_their_answer(make_plane):
    plane = plane_of(make_plane, Own(([1, 1], [])))
    put(plane, 2)
    assert [batch(plane, 2, 0, i) for i in (0, 1, 0)] == [[1, 1]] * 3
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [0, 0]


def test_a_sampler_may_consume_more_than_it_gives_and_each_sample_once(make_plane):
    plane = plane_of(make_plane, Own(([0], [0, 1, 1, 99])))
    put(plane, 3)
    batch(plane, 1, 0, 0)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [1, 1, 0]


def test_a_round_that_fails_for_one_rank_exists_for_none(make_plane):
    answers = iter([([0], [0]), ([], []), ([0], [0]), ([1], [1])])
    plane = plane_of(make_plane, Own(lambda ready: next(answers)))
    register(plane, dp_size=2)
    put(plane, 2)
    park(plane, 1, 0, 0)
    assert list(ask(plane, ACTOR, p.ConsumptionStatus, "p", "train").status) == [0, 0]
    assert batches(publish(plane, [0], "x")) == [(ACTOR, [0])]
    assert batch(plane, 1, 1, 0) == [1]


def test_what_a_round_took_that_failed_is_offered_again(make_plane):
    works = iter([True, False, True, True])
    sampler = Own(lambda ready: (ready[:1], ready[:1]) if next(works) else ([], []))
    plane = plane_of(make_plane, sampler)
    register(plane, dp_size=2)
    put(plane, 2)
    assert isinstance(fetch(plane, 1, 0, 0), p.NotReady)
    assert [batch(plane, 1, rank, 0) for rank in range(2)] == [[0], [1]]
    assert sampler.offered == [[0, 1], [1], [0, 1], [1]]


def test_ranks_of_a_round_are_offered_only_what_the_ranks_before_them_left(make_plane):
    sampler = Own(lambda ready: (ready[-1:], ready[-1:]))
    plane = plane_of(make_plane, sampler)
    register(plane, dp_size=3)
    put(plane, 3)
    assert batch(plane, 1, 0, 0) == [2]
    assert sampler.offered == [[0, 1, 2], [0, 1], [0]]


def test_a_fetch_is_told_when_its_task_got_a_sampler_that_refuses_it(plane):
    park(plane, 3)
    own, failed = send_register(plane)
    assert isinstance(own.reply, p.Done)
    refused(failed.reply, "InvalidRequestError", "[2, 4]")


def send_register(plane):
    register(plane, dp_size=2)
    plane.expire(1e6)
    put(plane, 1)
    park(plane, 3, 0, 0)
    return send(plane, ACTOR, p.RegisterTask, "train", spec("SeqlenBalancedSampler", dp_size=4))


class Counting(BaseSampler):
    """Never has enough, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def sample(self, ready_indexes, batch_size, *args, task_name, **kwargs):
        self.calls[task_name] += 1
        return [], []


def test_a_poll_asks_the_sampler_once_and_leaves_those_who_wait_alone(make_plane):
    sampler = Counting()
    plane = plane_of(make_plane, sampler)
    put(plane, 4)
    park(plane, 2, task="waiting")
    assert not_ready(fetch(plane, 2, task="polled")) == (2, 4, 4, {})
    assert sampler.calls == {"polled": 1, "waiting": 1}
    batch(plane, 2, task="plain")
    park(plane, 2, 0, 1, task="waiting")
    assert sampler.calls["waiting"] == 2  # the one that came now, and it is first: the other names no batch


def test_a_task_that_draws_groups_waits_where_there_are_none_and_ends_with_the_partition(plane):
    register(plane, sampler=spec("GroupSampler", groups=1, window=2))
    put(plane, 2)
    park(plane, 0)
    (ended,) = [to for to in send(plane, ROLLOUT, p.SealPartition, "p") if to.client == ACTOR]
    assert (ended.reply.reason, ended.reply.dropped) == ("sealed", 2)
