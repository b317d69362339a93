# SPDX-License-Identifier: Apache-2.0
"""What the verbs of the plane share: partitions, tasks, parked requests, and which lanes a request touched."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transfer_queue.control.answered import Answered
from transfer_queue.control.frozen import Frozen
from transfer_queue.control.indexes import IndexAllocator
from transfer_queue.control.partition import Partition
from transfer_queue.control.producers import Producers
from transfer_queue.control.tasks import Tasks
from transfer_queue.control.waiters import Parked, Waiters
from transfer_queue.errors import UnknownPartitionError
from transfer_queue.protocol import Indexes
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler

_MAX_STRANDED = 64
"""Per writer: cleared reservations kept in mind. A writer has few puts under way, all of them recent."""


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """What the plane must know at start.

    ``capacity``: most samples held at once, None unlimited. ``preallocate``: least room a new partition makes.
    ``producer_grace_s``: how long a dead producer may be replaced before those who wait for its fields are told.
    """

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    sampler_modules: tuple[str, ...] = ()
    capacity: int | None = None
    preallocate: int = 1
    producer_grace_s: float = 5.0


class PlaneState:
    """Mutated by the verbs; only ``touched`` lanes are looked at again after a request."""

    def __init__(self, config: PlaneConfig) -> None:
        self.config = config
        self.partitions: dict[str, Partition] = {}
        self.tasks = Tasks(config.sampler, config.sampler_modules)
        self.allocator = IndexAllocator()
        self.waiters = Waiters()
        self.producers = Producers(config.producer_grace_s)
        self.touched: dict[str, str | None] = {}
        self.cut_off: list[Parked] = []
        self.orphans: list[Indexes] = []
        self._holders: dict[str, int] = {}
        self._num_holders = 0
        self._stranded: dict[int, deque[Indexes]] = {}
        self.incarnations = 0
        self.frozen = Frozen()
        self.answered = Answered()
        self.staged: dict[str, list[Indexes]] = {}
        """By client: indexes of samples whose values it stores for a restore."""

    def touch(self, partition: str, task: str | None = None) -> None:
        """Something in this partition may have decided a parked fetch, of this task (None: of any)."""
        self.touched[partition] = task if self.touched.get(partition, task) == task else None

    def get(self, name: str) -> Partition:
        """Raises UnknownPartitionError naming those that exist."""
        partition = self.partitions.get(name)
        if partition is None:
            known = ", ".join(map(repr, list(self.partitions)[:10])) or "none yet"
            raise UnknownPartitionError(f"partition {name!r} not found; it was cleared or never used. Known: {known}.")
        return partition

    def create(self, name: str, num_samples: int | None = None) -> Partition:
        """A new partition; the name must be free."""
        self.incarnations += 1
        partition = Partition(name, self.incarnations, self.allocator, self.config.preallocate, num_samples)
        self.partitions[name] = partition
        return partition

    def find(self, name: str, incarnation: int) -> Partition | None:
        """The very partition that was meant, None when it was cleared since."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.incarnation == incarnation else None

    def get_or_create(self, name: str) -> Partition:
        return self.partitions.get(name) or self.create(name)

    def holder(self, client: str) -> int:
        """The client's number in the rows it reserves."""
        if client not in self._holders:
            self._num_holders += 1
            self._holders[client] = self._num_holders
        return self._holders[client]

    def forget_holder(self, client: str) -> int | None:
        return self._holders.pop(client, None)

    def strand(self, unpublished: dict[int, Indexes]) -> None:
        """Clearing took these from their writers, who may store values still; their end turns them into orphans."""
        for holder, indexes in unpublished.items():
            self._stranded.setdefault(holder, deque(maxlen=_MAX_STRANDED)).append(indexes)

    def client_gone(self, client: str) -> None:
        """What it kept from being dropped, or stored for a restore, is an orphan now."""
        self.answered.forget(client)
        self.orphans += [*self.frozen.client_gone(client), *self.staged.pop(client, ())]

    def unstage(self, client: str, given_up: Indexes) -> None:
        """These samples won't be restored."""
        left = [part for part in self.staged.pop(client, ()) if not np.isin(part, given_up).all()]
        if left:
            self.staged[client] = left

    def take_stranded(self, holder: int) -> list[Indexes]:
        return list(self._stranded.pop(holder, ()))

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes some partition has."""
        found = np.zeros(len(indexes), dtype=np.bool_)
        first, last = int(indexes.min()), int(indexes.max())
        for partition in self.partitions.values():
            if partition.table.spans(first, last):
                found |= partition.table.find(indexes)[1]
        return found

    def room(self) -> int | None:
        """Samples that may still be inserted, None: unlimited."""
        return None if self.config.capacity is None else self.config.capacity - self.allocator.num_used
