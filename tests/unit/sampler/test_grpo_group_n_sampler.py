# SPDX-License-Identifier: Apache-2.0
"""Rules of GRPOGroupNSampler: only whole groups, of one prompt each."""

from __future__ import annotations

import pytest

from transfer_queue import GRPOGroupNSampler


class AnswersAnything:
    """What a test double without a specification does."""

    def __getattr__(self, name: str) -> object:
        return lambda *args: object()


def pick(n: int, ready: list[int], batch_size: int, partition: object = None) -> list[int]:
    sampled, consumed = GRPOGroupNSampler(n).sample(ready, batch_size, partition=partition)
    assert sampled == consumed
    assert sampled is not consumed
    return sampled


@pytest.mark.parametrize("n", [0, -1])
def test_group_size_must_be_positive(n: int) -> None:
    with pytest.raises(ValueError, match="n_samples_per_prompt must be positive"):
        GRPOGroupNSampler(n)


def test_batch_size_must_be_a_multiple_of_the_group() -> None:
    sampler = GRPOGroupNSampler(4)
    for call in (lambda: sampler.sample(list(range(12)), 6), lambda: sampler.check(6, None)):
        with pytest.raises(ValueError, match=r"must be a multiple of n_samples_per_prompt \(4\).*4 or 8"):
            call()
    with pytest.raises(ValueError, match="Nearest that works: 4"):
        sampler.check(2, None)
    sampler.check(8, 2)


def test_without_a_partition_any_run_of_consecutive_indexes_is_a_group() -> None:
    assert pick(4, [3, 4, 5, 6, 9, 10, 11, 12], 8) == [3, 4, 5, 6, 9, 10, 11, 12]
    assert pick(4, [0, 1, 2, 4, 5, 6, 7, 8], 4) == [4, 5, 6, 7]
    assert pick(2, [7, 0, 6, 1], 4) == [0, 1, 6, 7]
    assert pick(4, [0, 1, 2, 3], 4, AnswersAnything()) == [0, 1, 2, 3]


def test_too_few_whole_groups_give_nothing() -> None:
    assert pick(4, [0, 1, 2, 4, 5, 6, 7], 8) == []
    assert pick(4, [], 4) == []
    assert pick(4, [0, 1, 2, 3], 0) == []


def test_the_tail_is_what_is_left_of_whole_groups() -> None:
    assert GRPOGroupNSampler(4).tail([1, 2, 3, 4, 6], 8) == [1, 2, 3, 4]
    assert GRPOGroupNSampler(4).tail([], 8) == []
    assert GRPOGroupNSampler(1).tail([1, 3], 8) == [1, 3]


def test_a_named_batch_is_given_again_and_cannot_be_spoilt() -> None:
    sampler = GRPOGroupNSampler(2)
    sampled, consumed = sampler.sample([0, 1, 2, 3], 2, "t", "p", dp_rank=0, batch_index=5)
    sampled.append(99)
    consumed.clear()
    assert sampler.sample([2, 3], 2, "t", "p", dp_rank=0, batch_index=5) == ([0, 1], [0, 1])
    assert sampler.sample([2, 3], 2, "t", "p", dp_rank=1, batch_index=5) == ([2, 3], [2, 3])
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 5})
    sampler.forget("p", "t", 5)
    assert sampler.sample([2, 3], 2, "t", "p", dp_rank=0, batch_index=5) == ([2, 3], [2, 3])


def test_a_rank_without_a_batch_index_gets_new_samples_each_time() -> None:
    sampler = GRPOGroupNSampler(2)
    assert sampler.sample([0, 1, 2, 3], 2, "t", "p", dp_rank=0)[0] == [0, 1]
    assert sampler.sample([2, 3], 2, "t", "p", dp_rank=0)[0] == [2, 3]
    assert sampler._states == {}


def test_partitions_and_tasks_do_not_share_batches() -> None:
    sampler = GRPOGroupNSampler(2)
    for start, (task, partition) in enumerate([("t", "p"), ("u", "p"), ("t", "q")]):
        ready = [4 * start, 4 * start + 1]
        assert sampler.sample(ready, 2, task, partition, dp_rank=0, batch_index=0) == (ready, ready)


def test_no_round_begins_without_groups_for_every_rank() -> None:
    sampler = GRPOGroupNSampler(2)
    ready = [0, 1, 2, 4]
    assert sampler.sample(ready, 2, "t", "p", dp_rank=0, batch_index=0, dp_size=2) == ([], [])
    assert sampler._states == {}
    ready = [0, 1, 2, 4, 5]
    assert sampler.sample(ready, 2, "t", "p", dp_rank=0, batch_index=0, dp_size=2) == ([0, 1], [0, 1])
    assert sampler.sample(ready[2:], 2, "t", "p", dp_rank=1, batch_index=0, dp_size=2) == ([4, 5], [4, 5])
