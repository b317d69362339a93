# SPDX-License-Identifier: Apache-2.0
"""Rules of SeqlenBalancedSampler: one draw for all ranks, balanced by weight."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import SeqlenBalancedSampler
from transfer_queue.errors import SamplerError


class Tagged:
    """A partition whose samples carry these lengths, by index."""

    def __init__(self, lengths: dict[int, Any], tag: str = "total_lengths") -> None:
        self.tags = {index: {tag: length} for index, length in lengths.items()}

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: self.tags[index] for index in indexes if index in self.tags}


LENGTHS = Tagged(dict(enumerate([100, 80, 60, 40, 20, 10])))


def ask(
    sampler: SeqlenBalancedSampler,
    rank: int,
    ready: list[int],
    size: int,
    batch: int | None = 0,
    partition: Any = LENGTHS,
    **kwargs: Any,
) -> list[int]:
    sampled, consumed = sampler.sample(
        ready, size, "t", "p", partition=partition, dp_rank=rank, batch_index=batch, **kwargs
    )
    assert sampled == consumed
    assert sampled is not consumed
    return sampled


def test_every_rank_gets_as_many_samples_of_similar_weight() -> None:
    sampler = SeqlenBalancedSampler(dp_size=3)
    assert ask(sampler, 1, list(range(6)), 2) == [2, 3]
    assert ask(sampler, 0, [], 2) == [0, 5]
    assert ask(sampler, 2, [], 2) == [1, 4]
    assert sampler._balanced_cache == {("p", "t", 0): [[0, 5], [2, 3], [1, 4]]}
    assert sampler._states["p"]["t"][2] == {0: ([1, 4], [1, 4])}


def test_groups_are_weighed_as_a_whole_and_stay_together() -> None:
    partition = Tagged({0: 1, 1: 99, 2: 50, 3: 40, 4: 20, 5: 40, 6: 5, 7: 27})
    sampler = SeqlenBalancedSampler(2, dp_size=2)
    assert [ask(sampler, rank, list(range(8)), 4, partition=partition) for rank in (0, 1)] == [
        [2, 3, 4, 5],
        [0, 1, 6, 7],
    ]


def test_waits_for_the_whole_global_batch() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    assert sampler.samples_needed(3, None) == sampler.samples_needed(3, 2) == 6
    assert ask(sampler, 0, [0, 1, 2, 3, 4], 3) == []
    assert (sampler._states, sampler._balanced_cache) == ({}, {})


def test_weight_may_be_another_tag_or_a_function_of_the_tags() -> None:
    partition = Tagged({0: 1, 1: 2, 2: 3, 3: 6}, tag="tokens")
    by_tag = SeqlenBalancedSampler(dp_size=2, weight="tokens")
    assert ask(by_tag, 0, [0, 1, 2, 3], 2, partition=partition) == [0, 3]
    by_function = SeqlenBalancedSampler(dp_size=2, weight=lambda tags: 100 * (tags["tokens"] < 3))
    assert ask(by_function, 0, [0, 1, 2, 3], 2, partition=partition) == [1, 2]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ({0: 5, 1: "long"}, "tag 'total_lengths' of sample 1 is 'long'"),
        ({0: 5, 1: -1}, "sample 1 is -1"),
        ({0: float("nan"), 1: 5}, "sample 0 is nan"),
        ({0: 5, 1: None}, "sample 1 is None"),
    ],
)
def test_a_sample_without_a_usable_weight_is_refused_by_name(lengths: dict[int, Any], text: str) -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    with pytest.raises(SamplerError, match=text):
        ask(sampler, 0, [0, 1], 1, partition=Tagged(lengths))
    assert (sampler._states, sampler._balanced_cache) == ({}, {})


def test_a_sample_without_a_length_counts_as_one_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    partition = Tagged({0: 5, 1: 3, 2: 2})
    assert [ask(sampler, rank, [0, 1, 2, 3], 2, partition=partition) for rank in (0, 1)] == [[0, 3], [1, 2]]
    ask(sampler, 0, [0, 1, 2, 3], 2, batch=1, partition=partition)
    assert ["without the tag 'total_lengths' count as 1" in message for message in caplog.messages] == [True]


def test_a_sample_without_a_tag_of_another_name_is_refused_by_name() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2, weight="tokens")
    with pytest.raises(SamplerError, match=r"sample 1 has no tag 'tokens'.*its tags: \[\]"):
        ask(sampler, 0, [0, 1], 1, partition=Tagged({0: 5}, tag="tokens"))


def test_without_a_partition_the_split_is_by_count_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    assert [ask(sampler, rank, [0, 1, 2, 3], 2, partition=None) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert ["without a partition" in message for message in caplog.messages] == [True]


def test_groups_that_cannot_be_dealt_out_equally_are_refused_before_anything_is_taken() -> None:
    sampler = SeqlenBalancedSampler(4, dp_size=2)  # 2 * 6 samples are whole groups, but three
    with pytest.raises(
        ValueError, match=r"must be a multiple of n_samples_per_prompt \(4\).*Nearest that works: 4 or 8"
    ):
        sampler.check(6, 2)
    with pytest.raises(ValueError, match="Nearest that works: 4 or 8"):
        ask(sampler, 0, list(range(12)), 6)
    assert sampler._states == {}


def test_rank_and_dp_size_are_checked() -> None:
    with pytest.raises(ValueError, match="dp_size must be positive"):
        SeqlenBalancedSampler(dp_size=0)
    sampler = SeqlenBalancedSampler(dp_size=2)
    assert sampler.dp_size == 2
    assert ask(sampler, 2, [0, 1, 2, 3], 2) == []
    assert sampler._states == {}
    with pytest.raises(ValueError, match="dp_rank must be greater than or equal to 0"):
        ask(sampler, -1, [0, 1, 2, 3], 2)
    with pytest.raises(ValueError, match="splits over 2 ranks and needs dp_rank"):
        sampler.sample([0, 1, 2, 3], 2)
    with pytest.raises(ValueError, match="built for dp_size 2, the task has dp_size 3"):
        ask(sampler, 0, [0, 1, 2, 3], 2, dp_size=3)


def test_one_rank_needs_no_name() -> None:
    assert SeqlenBalancedSampler().sample([0, 1, 2], 2, partition=LENGTHS) == ([0, 1], [0, 1])


def test_no_batch_index_means_batch_0_until_it_is_forgotten() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    assert ask(sampler, 0, [0, 1, 2, 3], 1, batch=None) == [0]
    assert sampler.has_cached_result("p", "t", {"dp_rank": 1})
    assert ask(sampler, 1, [2, 3], 1, batch=None) == [1]
    sampler.forget("p", "t", None)
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 1})
    assert sorted(ask(sampler, rank, [2, 3], 1, batch=None)[0] for rank in (0, 1)) == [2, 3]


def test_forget_and_clear_keep_the_caches_bounded() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    for batch in (0, 1):
        ask(sampler, 0, [2 * batch, 2 * batch + 1], 1, batch)
    sampler.sample([4, 5], 1, "t", "q", partition=LENGTHS, dp_rank=0, batch_index=0)
    sampler.forget("p", "t", 0)
    assert list(sampler._balanced_cache) == [("p", "t", 1), ("q", "t", 0)]
    sampler.clear_cache("p")
    assert list(sampler._balanced_cache) == [("q", "t", 0)]
    assert list(sampler._states) == ["q"]


def test_a_checkpoint_carries_the_shares_also_through_msgpack() -> None:
    sampler, other = SeqlenBalancedSampler(dp_size=2), SeqlenBalancedSampler(dp_size=2)
    ask(sampler, 0, [0, 1], 1)
    state = sampler.save_checkpoint()
    other.load_checkpoint(msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False))
    assert ask(other, 1, [], 1) == [1]
    assert other._balanced_cache == sampler._balanced_cache


@given(
    lengths=st.lists(st.integers(0, 1000), min_size=12, max_size=40),
    dp_size=st.integers(1, 3),
    n=st.integers(1, 2),
)
def test_rounds_are_disjoint_whole_groups_and_hold_every_sample_once(lengths: list[int], dp_size: int, n: int) -> None:
    sampler, partition = SeqlenBalancedSampler(n, dp_size=dp_size), Tagged(dict(enumerate(lengths)))
    ready, seen = list(range(len(lengths))), []
    for batch in range(len(lengths) // (2 * n * dp_size)):
        for rank in range(dp_size):
            got = ask(sampler, rank, ready, 2 * n, batch, partition, dp_size=dp_size)
            assert len(got) == 2 * n
            assert all(got[i + n - 1] == got[i] + n - 1 for i in range(0, 2 * n, n))
            ready = [index for index in ready if index not in got]
            seen += got
        sampler.forget("p", "t", batch)
    assert sorted(seen) == list(range(len(seen)))
    assert sampler._balanced_cache == {}
