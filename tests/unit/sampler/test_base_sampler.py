# SPDX-License-Identifier: Apache-2.0
"""Rules of the sampler interface that every sampler inherits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from transfer_queue import BaseSampler, RankAwareSampler, SeqlenBalancedSampler, SequentialSampler
from transfer_queue.errors import SamplerError
from transfer_queue.sampler.registry import resolve


class Newest(BaseSampler):
    """The newest sample, over and over: nothing is consumed."""

    def __init__(self, factor: int = 1, names: tuple[str, ...] = (), *, score: Any = None) -> None:
        super().__init__()
        self.factor, self.names, self.score = factor, names, score

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return [ready_indexes[-1]] * batch_size * self.factor, []


def double(tags: dict[str, Any]) -> float:
    return 2.0 * float(tags["length"])


def test_the_abstract_class_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseSampler()  # type: ignore[abstract]


def test_calling_a_sampler_samples() -> None:
    assert Newest()([3, 5], 2) == ([5, 5], [])
    assert Newest()._states == {}


def test_a_cached_result_is_found_by_rank_and_batch() -> None:
    sampler = Newest()
    sampler._states = {"p": {"t": {0: {3: [1, 2]}}}}
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 3})
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 4})
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 3})
    assert not sampler.has_cached_result("p", "t", {"batch_index": 3})
    assert not sampler.has_cached_result("p", "other", {"dp_rank": 0, "batch_index": 3})
    assert not sampler.has_cached_result("p", "t")


def test_forget_drops_one_batch_of_all_ranks_and_nothing_else() -> None:
    sampler = Newest()
    sampler._states = {"p": {"t": {0: {3: [1], 4: [2]}, 1: {3: [5]}, "own": [9]}, "u": {0: {3: [7]}}}}
    sampler.forget("p", "t", 3)
    sampler.forget("unknown", "t", 3)
    assert sampler._states == {"p": {"t": {0: {4: [2]}, "own": [9]}, "u": {0: {3: [7]}}}}


def test_clear_cache_drops_one_partition() -> None:
    sampler = Newest()
    sampler._states = {"p": {"t": {0: {3: [1]}}}, "q": {"t": {0: {3: [2]}}}}
    sampler.clear_cache("p")
    sampler.clear_cache("p")
    assert sampler._states == {"q": {"t": {0: {3: [2]}}}}


def test_a_checkpoint_shares_nothing_with_the_sampler() -> None:
    sampler, other = Newest(), Newest()
    sampler._states = {"p": {"t": {0: {3: [1]}}}}
    saved = sampler.save_checkpoint()
    other.load_checkpoint(saved)
    saved["_states"]["p"]["t"][0][3].append(2)
    assert sampler._states == other._states == {"p": {"t": {0: {3: [1]}}}}


def test_a_round_needs_a_batch_per_rank() -> None:
    assert Newest().samples_needed(4, None) == 4
    assert Newest().samples_needed(4, 3) == 12


def test_the_tail_is_all_that_is_left() -> None:
    assert Newest().tail(range(3, 6), 4, partition=None) == [3, 4, 5]


def test_sizes_that_can_never_work_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Newest().check(0, None)
    with pytest.raises(SamplerError, match="built for dp_size 2, the task has dp_size 4"):
        SeqlenBalancedSampler(dp_size=2).check(4, 4)
    Newest().check(1, 8)
    SeqlenBalancedSampler(dp_size=2).check(4, None)


def test_spec_is_what_the_constructor_was_given() -> None:
    assert SequentialSampler().spec() == {
        "class": "transfer_queue.sampler.sequential_sampler:SequentialSampler",
        "args": [],
        "kwargs": {},
    }
    assert Newest(2, ("a", "b"), score={"x": [1, None, True]}).spec() == {
        "class": f"{__name__}:Newest",
        "args": [2, ["a", "b"]],
        "kwargs": {"score": {"x": [1, None, True]}},
    }


def test_spec_rebuilds_an_equal_sampler() -> None:
    rebuilt = resolve(Newest(2, score=double).spec(), [__name__])
    assert isinstance(rebuilt, Newest)
    assert (rebuilt.factor, rebuilt.score) == (2, double)
    balanced = resolve(SeqlenBalancedSampler(2, dp_size=4, weight=double).spec(), [__name__])
    assert isinstance(balanced, SeqlenBalancedSampler)
    assert (balanced.n_samples_per_prompt, balanced.dp_size, balanced.weight) == (2, 4, double)


def test_spec_names_the_argument_that_cannot_travel() -> None:
    with pytest.raises(SamplerError, match=r"argument factor of .*:Newest is <object"):
        Newest(object()).spec()  # type: ignore[arg-type]
    with pytest.raises(SamplerError, match=r"argument score of .*lambda"):
        Newest(score=lambda tags: 1.0).spec()
    with pytest.raises(SamplerError, match=r"argument score"):
        Newest(score={1: "keys are strings"}).spec()


def test_copies_keep_spec_and_state() -> None:
    sampler = RankAwareSampler(7)
    sampler.sample([1, 2], 2, 0, 0, "t", "p")
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.spec() == sampler.spec()
        assert twin.sample([], 2, 0, 0, "t", "p") == ([1, 2], [1, 2])


def test_a_sampler_follows_the_number_of_ranks_unless_it_was_told_one() -> None:
    left_open = SeqlenBalancedSampler(4, weight="tokens").for_ranks(3)
    assert isinstance(left_open, SeqlenBalancedSampler)
    assert left_open.dp_size == 3
    assert left_open.spec()["kwargs"] == {"n_samples_per_prompt": 4, "weight": "tokens", "dp_size": 3}
    told = SeqlenBalancedSampler(4, dp_size=2)
    assert told.for_ranks(3) is told
    without = SequentialSampler()
    assert without.for_ranks(3) is without
