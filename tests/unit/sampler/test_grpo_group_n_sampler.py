# SPDX-License-Identifier: Apache-2.0
"""Rules of GRPOGroupNSampler: only whole groups, of one prompt each."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import GRPOGroupNSampler


class Puts:
    """A partition that was filled by puts of the given sizes, one after the other, or of the given indexes."""

    def __init__(self, *puts: int | list[int]) -> None:
        fresh = count()
        self.at: dict[int, tuple[int, int]] = {}
        self.looked_up = 0
        for put in puts:
            indexes = [next(fresh) for _ in range(put)] if isinstance(put, int) else put
            self.at.update({index: (offset, len(indexes)) for offset, index in enumerate(indexes)})

    def put_positions(self, indexes: list[int]) -> list[tuple[int, int]]:
        self.looked_up += len(indexes)
        return [self.at[index] for index in indexes]


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


def test_a_missing_sample_does_not_shift_the_groups_of_its_put() -> None:
    puts = Puts(12)
    assert pick(4, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 8, puts) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert pick(4, [1, 2, 3, 4], 4, puts) == []


def test_a_group_lies_within_one_put() -> None:
    # 6 is no multiple of 4: the last two samples of each put belong to no group.
    assert pick(4, list(range(12)), 8, Puts(6, 6)) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert pick(4, list(range(12)), 12, Puts(6, 6)) == []


def test_halves_of_two_equally_large_puts_are_no_group() -> None:
    assert pick(4, [0, 1, 6, 7], 4, Puts(4, 4)) == []


def test_a_put_with_a_gap_in_its_indexes_is_grouped_by_position() -> None:
    assert pick(4, [0, 1, 8, 9], 4, Puts([0, 1, 8, 9], [2, 3])) == [0, 1, 8, 9]
    assert pick(4, [0, 1, 8, 9], 4, Puts([0, 1, 8, 9])) == [0, 1, 8, 9]


def test_short_puts_in_a_row_make_a_group() -> None:
    assert pick(4, list(range(8)), 8, Puts(1, 1, 1, 1, 2, 2)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert pick(4, [0, 1, 2, 4, 5, 6, 7], 4, Puts(1, 1, 1, 1, 1, 1, 1, 1)) == [4, 5, 6, 7]


def test_a_chain_of_short_puts_that_would_exceed_the_group_starts_anew() -> None:
    assert pick(4, list(range(7)), 4, Puts(3, 2, 2)) == [3, 4, 5, 6]
    assert pick(4, list(range(6)), 4, Puts(3, 3)) == []


def test_a_short_put_that_is_not_whole_breaks_the_chain() -> None:
    assert pick(4, [0, 1, 2, 4, 5, 6, 7], 4, Puts(2, 2, 2, 2)) == [4, 5, 6, 7]
    assert pick(4, [0, 1, 3, 4, 5], 4, Puts(2, 2, 2)) == []


def test_the_rest_of_a_large_put_joins_no_chain() -> None:
    assert pick(4, list(range(8)), 4, Puts(6, 2)) == [0, 1, 2, 3]
    assert pick(4, list(range(8)), 8, Puts(6, 2)) == []


def test_group_of_one_needs_no_knowledge_of_puts() -> None:
    puts = Puts(8)
    assert pick(1, [1, 3, 7], 2, puts) == [1, 3]
    assert puts.looked_up == 0


def test_the_tail_is_what_is_left_of_whole_groups() -> None:
    assert GRPOGroupNSampler(4).tail([1, 2, 3, 4, 5, 6, 7, 8], 8, partition=Puts(12)) == [4, 5, 6, 7]
    assert GRPOGroupNSampler(4).tail([1, 2, 3, 4, 6], 8) == [1, 2, 3, 4]
    assert GRPOGroupNSampler(4).tail([], 8, partition=Puts(12)) == []
    assert GRPOGroupNSampler(1).tail([1, 3], 8, partition=Puts(12)) == [1, 3]


def test_looks_up_a_batch_not_all_that_is_ready() -> None:
    puts = Puts(4, 1000)
    assert pick(4, list(range(1, 1004)), 8, puts) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert puts.looked_up <= 3 * 8


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


@given(
    n=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_groups_come_whole_and_do_not_depend_on_other_puts_being_ready(
    n: int, sizes: list[int], data: st.DataObject
) -> None:
    puts = Puts(*sizes)
    total = sum(sizes)
    ready = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    large = []  # the groups that lie in puts of at least n samples, by the definition
    for index, (offset, size) in puts.at.items():
        members = list(range(index, index + n))
        if size >= n and offset % n == 0 and offset + n <= size and set(members) <= set(ready):
            large.append(members)
    sampler = GRPOGroupNSampler(n)
    found: list[list[int]] = []
    while batch := sampler.sample(ready, n, partition=puts)[0]:
        found.append(batch)
        ready = [index for index in ready if index not in batch]
    assert [group for group in found if puts.at[group[0]][1] >= n] == large
    for group in found:
        assert group == list(range(group[0], group[0] + n))
