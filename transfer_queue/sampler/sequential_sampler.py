# SPDX-License-Identifier: Apache-2.0
"""SequentialSampler: the oldest ready samples first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.sampler.base import Picked, RoundSampler


class SequentialSampler(RoundSampler):
    """The first ``batch_size`` ready samples, or all if fewer are ready. The default.

    Examples:
        >>> tq.SequentialSampler()([3, 5, 8], 2)
        ([3, 5], [3, 5])
        >>> client.register_task("oldest_first", sampler=tq.SequentialSampler())
    """

    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Picked:
        sampled = list(ready_indexes[:batch_size])
        return sampled, list(sampled)
