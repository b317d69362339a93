# SPDX-License-Identifier: Apache-2.0
"""Samples that tasks will never get, counted by task and reason: left over by a tail, or cleared too early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from transfer_queue.control.partition import Partition

_MOST_TASKS = 1000
_OTHERS = "(others)"


class Dropped:
    """``tail``: no round could be filled with them. ``cleared``: they were cleared before the task was given them.

    A task that follows another one is given a batch at once, but reads it later. So what was cleared before it
    acknowledged the batch counts. The tails of partitions that still exist are not in here: their consumers know them.
    """

    def __init__(self, is_follower: Callable[[str], bool]) -> None:
        self._is_follower = is_follower
        self._counts: dict[str, dict[str, int]] = {}

    def _add(self, task: str, reason: str, count: int) -> None:
        if count > 0:
            name = task if task in self._counts or len(self._counts) < _MOST_TASKS else _OTHERS
            own = self._counts.setdefault(name, {"tail": 0, "cleared": 0})
            own[reason] += count

    def wanted(self, partition: Partition) -> dict[str, int]:
        """By task: how many samples would be lost to it if they were cleared, those of its tail included."""
        return {
            task: consumer.ledger.num_open_samples if self._is_follower(task) else consumer.num_undrawn
            for task, consumer in partition.consumers.items()
        }

    def samples_cleared(self, partition: Partition, before: Mapping[str, int]) -> None:
        """Samples of the partition were cleared. ``before``: what was ``wanted`` then."""
        for task, count in self.wanted(partition).items():
            if not partition.consumers[task].num_dropped:  # otherwise they were counted as its tail
                self._add(task, "cleared", before[task] - count)

    def partition_cleared(self, partition: Partition) -> None:
        """The whole partition was cleared."""
        for task, count in self.wanted(partition).items():
            tail = partition.consumers[task].num_dropped
            self._add(task, "tail", tail)
            self._add(task, "cleared", count - tail)

    def forget(self, task: str) -> None:
        """The task was deleted."""
        self._counts.pop(task, None)

    def counts(self, partitions: Iterable[Partition]) -> dict[str, dict[str, int]]:
        """Numbers of samples by task and reason, those of these partitions' tails included."""
        total = {task: dict(own) for task, own in self._counts.items()}
        for partition in partitions:
            for task, consumer in partition.consumers.items():
                if consumer.num_dropped:
                    total.setdefault(task, {"tail": 0, "cleared": 0})["tail"] += consumer.num_dropped
        return total
