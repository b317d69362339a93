# SPDX-License-Identifier: Apache-2.0
"""Room: how many trained batches may wait for a checkpoint before they fill the queue. It is pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_MOST_BETWEEN_LOOKS = 100
_WITH_HEADS = ("waiting", "running", "closed", "ready", "drawn")
"""States of groups whose heads are in the queue. A head takes the room of a sample, and is none."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a bounded queue has for the samples of one task."""

    samples: float
    """How many fit beside those of partitions that the task doesn't read. Infinite: the queue has no bound."""
    batch: float
    """Samples that all ranks take at once."""
    given: float = 0.0
    """Samples that were given to the task and are not cleared."""

    @classmethod
    def of(
        cls, stats: Mapping[str, Any], units: Sequence[Mapping[str, Any]], task: str, dp_size: int, rows: int | None
    ) -> Room:
        """``stats``, ``units``: ``client.get_stats()`` and ``client.get_storage_stats()``. ``rows``: of a rank's batch,
        where none is in flight.

        Sizes are means over all samples that the queue holds now. So they are estimates: keep a distance.
        """
        partitions = stats["partitions"].values()
        own = [each["tasks"][task] for each in partitions if task in each["tasks"]]
        live = sum(each["samples"] for each in partitions)
        others = sum(each["samples"] for each in partitions if task not in each["tasks"])
        nbytes = sum(unit["live_nbytes"] for unit in units)
        limits = [unit["capacity_bytes"] for unit in units if unit["capacity_bytes"] is not None]
        by_bytes = sum(limits) * live / nbytes if limits and len(limits) == len(units) and nbytes else math.inf
        states = [each["groups"]["states"] for each in partitions if "groups" in each]
        heads = sum(count for each in states for state, count in each.items() if state in _WITH_HEADS)
        by_count = math.inf if stats["capacity"] is None else stats["capacity"] - heads
        batches, taken = sum(each["in_flight"] for each in own), sum(each["in_flight_samples"] for each in own)
        of_rank = taken / batches if batches else rows or 1.0
        return cls(min(by_bytes, by_count) - others, dp_size * of_rank, sum(each["consumed"] for each in own))

    def without_undrawn(self, left: Iterable[Mapping[str, Any]], task: str) -> Room:
        """``left``: statistics of partitions that the task has left. What it has not drawn there keeps its room."""
        undrawn = [each["samples"] - each["tasks"][task]["consumed"] for each in left if task in each["tasks"]]
        return replace(self, samples=self.samples - sum(undrawn))

    def batches_left(self, kept: int) -> int:
        """How many more batches may be trained before those that wait must be acknowledged; 0: none.

        Half of the room is for samples that are being made or were fetched ahead, and at least three batches.
        """
        if math.isinf(self.samples):
            return _MOST_BETWEEN_LOOKS
        most = min(self.samples / 2, self.samples - 3 * self.batch) / self.batch
        return max(0, math.floor(most) - kept)

    @property
    def batches_until_full(self) -> int:
        """How many more batches fit, at three batches' distance, if no sample is cleared meanwhile."""
        return math.floor(min((self.samples - self.given) / self.batch - 3, _MOST_BETWEEN_LOOKS))

    def batches_until_look(self, kept: int) -> int:
        """When to look again: sizes may grow, so half-way, and after a hundred batches at the latest."""
        return min(max(1, self.batches_left(kept) // 2), _MOST_BETWEEN_LOOKS)
