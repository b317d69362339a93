# SPDX-License-Identifier: Apache-2.0
"""Rules of RankAwareSampler: the call form with dp_rank and batch_index, and the older one with replica groups."""

from __future__ import annotations

from typing import Any

import pytest

from transfer_queue import RankAwareSampler
from transfer_queue.errors import SamplerError


def replica(rank: int, world_size: int = 2, group: int = 0) -> dict[str, Any]:
    return {"data_replica_group": group, "data_replica_rank": rank, "data_replica_world_size": world_size}


def ask(sampler: RankAwareSampler, ready: list[int], size: int, **kwargs: Any) -> list[int]:
    sampled, consumed = sampler.sample(ready, size, task_name="t", partition_id="p", **kwargs)
    assert sampled == consumed
    assert sampled is not consumed
    return sampled


def test_peers_get_the_same_batch_whoever_asks_first_and_however_often() -> None:
    sampler = RankAwareSampler()
    assert ask(sampler, [0, 1, 2, 3], 2, dp_rank=0, batch_index=0) == [0, 1]
    assert ask(sampler, [2, 3], 2, dp_rank=0, batch_index=1) == [2, 3]
    assert ask(sampler, [], 2, dp_rank=0, batch_index=0) == [0, 1]
    assert ask(sampler, [], 2, dp_rank=0, batch_index=1) == [2, 3]
    assert sampler._states == {"p": {"t": {0: {0: [0, 1], 1: [2, 3]}}}}
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1})


def test_positional_arguments_are_rank_batch_task_partition() -> None:
    sampler = RankAwareSampler()
    assert sampler.sample([5, 6], 1, 3, 7, "t", "p") == ([5], [5])
    assert sampler._states == {"p": {"t": {3: {7: [5]}}}}


def test_too_few_give_nothing_and_leave_no_trace() -> None:
    sampler = RankAwareSampler()
    assert ask(sampler, [0], 2, dp_rank=0, batch_index=0) == []
    assert sampler._states == {}


def test_a_changed_answer_does_not_change_the_memory() -> None:
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 2, dp_rank=0, batch_index=0).append(99)
    ask(sampler, [], 2, dp_rank=0, batch_index=0).append(99)
    assert ask(sampler, [], 2, dp_rank=0, batch_index=0) == [0, 1]


def test_a_batch_needs_a_rank_and_a_number() -> None:
    with pytest.raises(ValueError, match="dp_rank must be greater than or equal to 0, got -1"):
        ask(RankAwareSampler(), [0], 1, dp_rank=-1, batch_index=0)
    with pytest.raises(ValueError, match="needs dp_rank and batch_index, got 0 and None"):
        ask(RankAwareSampler(), [0], 1, dp_rank=0)
    with pytest.raises(ValueError, match="needs dp_rank and batch_index"):
        ask(RankAwareSampler(), [0], 1)


def test_forget_and_clear_drop_numbered_batches() -> None:
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 1, dp_rank=0, batch_index=0)
    ask(sampler, [1], 1, dp_rank=0, batch_index=1)
    sampler.forget("p", "t", 0)
    assert sampler._states == {"p": {"t": {0: {1: [1]}}}}
    sampler.clear_cache("p")
    assert sampler._states == {}


def test_replicas_see_the_same_batches_in_the_same_order_at_any_distance() -> None:
    sampler = RankAwareSampler()
    assert ask(sampler, [0, 1, 2, 3], 2, **replica(0)) == [0, 1]
    assert ask(sampler, [2, 3], 2, **replica(0)) == [2, 3]
    assert ask(sampler, [], 2, **replica(1)) == [0, 1]
    assert ask(sampler, [], 2, **replica(1)) == [2, 3]
    assert ask(sampler, [4, 5], 2, **replica(1)) == [4, 5]
    assert ask(sampler, [], 2, **replica(0)) == [4, 5]
    assert sampler._states == {"p": {"t": {0: {0: [], 1: []}}}}


def test_the_older_positional_form_is_told_by_its_world_size() -> None:
    sampler = RankAwareSampler()
    assert sampler.sample([0, 1], 2, 7, 0, 2, "t", "p") == ([0, 1], [0, 1])
    assert sampler._states == {"p": {"t": {7: {0: [], 1: [[0, 1]]}}}}
    assert sampler.sample([], 2, 7, 1, 2, "t", "p") == ([0, 1], [0, 1])


def test_replica_groups_draw_separately() -> None:
    sampler = RankAwareSampler()
    assert ask(sampler, [0, 1, 2, 3], 2, **replica(0, group=0)) == [0, 1]
    assert ask(sampler, [2, 3], 2, **replica(0, group=1)) == [2, 3]
    assert ask(sampler, [], 2, **replica(1, group=1)) == [2, 3]


def test_too_few_for_a_replica_leave_no_trace() -> None:
    sampler = RankAwareSampler()
    assert ask(sampler, [0], 2, **replica(0)) == []
    assert sampler._states == {}


def test_a_replica_with_a_filled_buffer_counts_as_cached() -> None:
    sampler = RankAwareSampler()
    assert not sampler.has_cached_result("p", "t", replica(1))
    ask(sampler, [0, 1], 2, **replica(0))
    assert sampler.has_cached_result("p", "t", replica(1))
    assert not sampler.has_cached_result("p", "t", replica(0))
    assert not sampler.has_cached_result("p", "t", replica(1, group=3))
    ask(sampler, [], 2, **replica(1))
    assert not sampler.has_cached_result("p", "t", replica(1))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replica(0, 0), "must >= 1"),
        (replica(2, 2), r"must be in \[0, 2\), got 2"),
        (replica(-1, 2), r"must be in \[0, 2\), got -1"),
        (replica(0, 3), "has 2 ranks, now data_replica_world_size is 3"),
        ({"data_replica_rank": 0}, "missing: data_replica_group, data_replica_world_size"),
        ({"dp_rank": 0, "batch_index": 0}, r"was read with data_replica_\* before"),
    ],
)
def test_a_wrong_replica_is_refused_and_loses_nothing(config: dict[str, Any], text: str) -> None:
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 2, **replica(0))
    before = sampler.save_checkpoint()
    with pytest.raises(ValueError, match=text):
        ask(sampler, [2, 3], 2, **config)
    assert sampler.save_checkpoint() == before


def test_a_numbered_task_cannot_be_read_by_replicas() -> None:
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 2, dp_rank=0, batch_index=0)
    with pytest.raises(SamplerError, match="was read with dp_rank before"):
        ask(sampler, [2, 3], 2, **replica(0))


def test_buffers_are_bounded_and_the_error_names_who_lags() -> None:
    sampler = RankAwareSampler(max_buffered_batches=2)
    for start in (0, 1):
        ask(sampler, [start], 1, **replica(0, 3))
    ask(sampler, [], 1, **replica(1, 3))
    with pytest.raises(SamplerError, match="rank 2 of replica group 0 lags 2 batches behind rank 0"):
        ask(sampler, [2], 1, **replica(0, 3))
    assert ask(sampler, [], 1, **replica(2, 3)) == [0]
    assert ask(sampler, [2], 1, **replica(0, 3)) == [2]
    with pytest.raises(ValueError, match="max_buffered_batches must be at least 1"):
        RankAwareSampler(0)


def test_forget_leaves_replica_buffers_alone_and_clear_drops_them() -> None:
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 2, **replica(0))
    sampler.forget("p", "t", 0)
    sampler.forget("p", "t", None)
    assert ask(sampler, [], 2, **replica(1)) == [0, 1]
    sampler.clear_cache("p")
    assert sampler.save_checkpoint() == {"_states": {}, "_replica_tasks": []}
    assert ask(sampler, [4, 5], 2, dp_rank=0, batch_index=0) == [4, 5]


def test_a_checkpoint_restores_both_forms() -> None:
    sampler, other = RankAwareSampler(), RankAwareSampler()
    ask(sampler, [0, 1], 2, **replica(0))
    sampler.sample([2, 3], 2, 0, 0, "u", "p")
    other.load_checkpoint(sampler.save_checkpoint())
    assert ask(other, [], 2, **replica(1)) == [0, 1]
    assert other.sample([], 2, 0, 0, "u", "p") == ([2, 3], [2, 3])
