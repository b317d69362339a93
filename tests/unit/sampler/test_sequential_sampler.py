# SPDX-License-Identifier: Apache-2.0
"""Rules of SequentialSampler."""

from __future__ import annotations

import pytest

from transfer_queue import SequentialSampler


@pytest.mark.parametrize(("size", "expected"), [(2, [4, 1]), (3, [4, 1, 9]), (5, [4, 1, 9]), (0, []), (-1, [4, 1])])
def test_takes_the_first_ready_samples_by_plain_slicing(size: int, expected: list[int]) -> None:
    assert SequentialSampler().sample([4, 1, 9], size) == (expected, expected)


def test_sampled_and_consumed_are_two_lists() -> None:
    ready = [1, 2, 3]
    sampled, consumed = SequentialSampler().sample(ready, 3, dp_rank=0, batch_index=0, partition=None)
    sampled.append(99)
    assert (consumed, ready) == ([1, 2, 3], [1, 2, 3])


def test_costs_a_batch_whatever_is_ready() -> None:
    assert SequentialSampler().sample(range(10**12), 3) == ([0, 1, 2], [0, 1, 2])
