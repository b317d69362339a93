# SPDX-License-Identifier: Apache-2.0
"""Rules of TokenBudgetSampler: bounded tokens per rank, the same number of batches on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import TokenBudgetSampler
from transfer_queue.errors import SamplerError


class Tagged:
    """A partition whose samples 0, 1, ... have these lengths."""

    def __init__(self, lengths: list[int], sealed: bool = False) -> None:
        self.lengths = lengths
        self.sealed = sealed
        self.looked_up = 0

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        self.looked_up += len(indexes)
        return {index: {"total_lengths": self.lengths[index]} for index in indexes}


def shares(
    sampler: TokenBudgetSampler, partition: Tagged, dp_size: int, size: int = 100, batch: int = 0, ready: Any = None
) -> list[list[int]]:
    """One round, as the controller asks for it."""
    left = list(range(len(partition.lengths))) if ready is None else ready
    result = []
    for rank in range(dp_size):
        sampled, consumed = sampler.sample(
            left, size, "t", "p", partition=partition, dp_rank=rank, batch_index=batch, dp_size=dp_size
        )
        assert sampled == consumed
        assert sampled is not consumed
        left = [index for index in left if index not in consumed]
        result.append(sampled)
    return result


def test_takes_as_many_of_the_oldest_as_fit() -> None:
    assert shares(TokenBudgetSampler(10), Tagged([4, 4, 4, 1]), 1) == [[0, 1]]


def test_never_passes_over_a_sample_that_does_not_fit() -> None:
    sampler, partition = TokenBudgetSampler(10), Tagged([4, 9, 1, 1, 1])
    assert shares(sampler, partition, 1) == [[0]]
    assert shares(sampler, partition, 1, batch=1, ready=[1, 2, 3, 4]) == [[1, 2]]


def test_fills_the_ranks_as_well_as_a_round_allows() -> None:
    # In order of arrival the third sample would block both ranks; 6+4 and 5+5 fill them to the brim.
    assert shares(TokenBudgetSampler(10), Tagged([4, 5, 5, 6, 1]), 2) == [[0, 3], [1, 2]]
    # Heaviest first into the lightest bin misses 3+3 | 2+2+2.
    assert shares(TokenBudgetSampler(6), Tagged([3, 3, 2, 2, 2, 1]), 2) == [[0, 1], [2, 3, 4]]


def test_waits_while_everything_ready_fits_and_there_is_room() -> None:
    sampler = TokenBudgetSampler(10)
    assert shares(sampler, Tagged([4, 4]), 1) == [[]]
    assert sampler._states == {}
    assert shares(sampler, Tagged([4, 6]), 1) == [[0, 1]]


def test_batch_size_bounds_the_samples_of_a_rank() -> None:
    assert shares(TokenBudgetSampler(100), Tagged([1, 2, 3, 4]), 2, size=2) == [[0, 3], [1, 2]]
    assert shares(TokenBudgetSampler(100), Tagged([50, 1, 1, 1, 1]), 2, size=2) == [[0, 3], [1, 2]]
    assert shares(TokenBudgetSampler(100), Tagged([1, 2, 3]), 2, size=2) == [[], []]


def test_a_sealed_rest_is_spread_over_all_ranks() -> None:
    assert shares(TokenBudgetSampler(100), Tagged([9, 1, 1, 8], sealed=True), 3) == [[0], [3], [1, 2]]
    assert shares(TokenBudgetSampler(100), Tagged([9, 1], sealed=True), 3) == [[], [], []]


def test_zero_weights_leave_no_rank_empty() -> None:
    assert shares(TokenBudgetSampler(10), Tagged([0, 0, 0], sealed=True), 3) == [[2], [1], [0]]
    assert shares(TokenBudgetSampler(10), Tagged([10, 0, 0], sealed=True), 2) == [[0], [1, 2]]


def test_a_sealed_round_leaves_a_sample_per_rank_for_the_last_one() -> None:
    sampler, partition = TokenBudgetSampler(10), Tagged([5, 5, 5, 5, 5], sealed=True)
    assert shares(sampler, partition, 2) == [[0, 1], [2]]
    assert shares(sampler, partition, 2, batch=1, ready=[3, 4]) == [[4], [3]]


def test_a_sample_over_the_budget_is_refused_by_name() -> None:
    sampler = TokenBudgetSampler(10)
    with pytest.raises(SamplerError, match=r"sample 1 alone weighs 11, more than max_tokens \(10\)"):
        shares(sampler, Tagged([4, 11, 5]), 1)
    assert sampler._states == {}


def test_ranks_get_their_shares_in_any_order_and_again() -> None:
    sampler, partition = TokenBudgetSampler(10, dp_size=2), Tagged([5, 5, 5, 5, 1])
    ask = {"partition": partition, "task_name": "t", "partition_id": "p", "batch_index": 0}
    first = sampler.sample(list(range(5)), 9, dp_rank=1, **ask)[0]
    first.append(99)
    assert sampler.sample([], 9, dp_rank=1, **ask) == (first[:-1], first[:-1])
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert sorted(first[:-1] + sampler.sample([], 9, dp_rank=0, **ask)[0]) == [0, 1, 2, 3]
    sampler.forget("p", "t", 0)
    assert sampler._states == {"p": {"t": {}}}


def test_without_a_known_dp_size_every_rank_draws_for_itself() -> None:
    sampler, partition = TokenBudgetSampler(10), Tagged([5, 5, 5, 5, 1])
    ask = {"partition": partition, "task_name": "t", "partition_id": "p", "batch_index": 0}
    assert sampler.sample([0, 1, 2, 3, 4], 9, dp_rank=3, **ask)[0] == [0, 1]
    assert sampler.sample([2, 3, 4], 9, dp_rank=0, **ask)[0] == [2, 3]
    assert sampler.sample([], 9, dp_rank=3, **ask)[0] == [0, 1]


def test_an_unnamed_reader_gets_new_samples_each_time() -> None:
    sampler, partition = TokenBudgetSampler(10), Tagged([5, 5, 5, 5, 1])
    assert sampler.sample([4, 3, 2, 1, 0], 9, partition=partition)[0] == [0, 1]
    assert sampler.sample([2, 3, 4], 9, partition=partition)[0] == [2, 3]


def test_needs_at_least_a_sample_per_rank() -> None:
    assert TokenBudgetSampler(10).samples_needed(64, None) == 1
    assert TokenBudgetSampler(10).samples_needed(64, 4) == 4
    assert TokenBudgetSampler(10, dp_size=2).samples_needed(64, None) == 2


def test_bad_arguments_are_refused() -> None:
    for build, text in [
        (lambda: TokenBudgetSampler(0), "max_tokens must be positive"),
        (lambda: TokenBudgetSampler(1, dp_size=0), "dp_size must be positive"),
    ]:
        with pytest.raises(ValueError, match=text):
            build()
    sampler, partition = TokenBudgetSampler(10, dp_size=2), Tagged([1, 1])
    for kwargs, text in [
        ({"dp_rank": 2, "partition": partition}, r"dp_rank 2 is outside 0\.\.1"),
        ({"dp_rank": -1, "partition": partition}, "greater than or equal to 0"),
        ({"partition": partition}, "needs dp_rank"),
        ({"dp_rank": 0}, "needs the partition= argument"),
        ({"dp_rank": 0, "dp_size": 4, "partition": partition}, "built for dp_size 2"),
    ]:
        with pytest.raises(ValueError, match=text):
            sampler.sample([0, 1], 2, **kwargs)


def test_looks_only_at_as_many_samples_as_may_fit() -> None:
    partition = Tagged([5] * 100_000)
    assert shares(TokenBudgetSampler(10), partition, 2, size=10_000, ready=range(100_000)) is not None
    assert partition.looked_up <= 256


@given(
    lengths=st.lists(st.integers(0, 10), min_size=1, max_size=40),
    dp_size=st.integers(1, 4),
    size=st.integers(1, 6),
)
def test_rounds_keep_the_bounds_and_hold_every_sample_but_a_tail(lengths: list[int], dp_size: int, size: int) -> None:
    sampler, partition = TokenBudgetSampler(10), Tagged(lengths, sealed=True)
    left, batch = list(range(len(lengths))), 0
    while any(round_ := shares(sampler, partition, dp_size, size, batch, left)):
        for share in round_:
            assert 1 <= len(share) <= size
            assert sum(lengths[index] for index in share) <= 10
        taken = sorted(index for share in round_ for index in share)
        assert taken == left[: len(taken)]
        left = left[len(taken) :]
        sampler.forget("p", "t", batch)
        batch += 1
    # A tail is left only where the last round could not be shortened to leave a sample per rank.
    assert len(left) < dp_size
    if len(lengths) < dp_size:
        assert batch == 0
