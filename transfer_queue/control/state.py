# SPDX-License-Identifier: Apache-2.0
"""The state that the plane's verbs share: partitions, tasks, sessions, parked requests, dirty partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transfer_queue.config import QueueConfig
from transfer_queue.control.draw import Tasks
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import IndexAllocator
from transfer_queue.control.sessions import Calls, Freezes, Producers
from transfer_queue.control.waiters import Parked, Waiters
from transfer_queue.errors import UnknownPartitionError, to_wire
from transfer_queue.protocol import Failed, Indexes, Reply
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.utils.wait_queue import WaitQueue

_SLICE = 10_000
"""Keys and tags freed at a time, which takes a few milliseconds."""


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: Reply


def reply_or_error(call: int, answer: Callable[[], Reply | None]) -> Reply | None:
    """An error of one request is the answer to that request only."""
    try:
        return answer()
    except Exception as error:  # the plane's guard: neither user code nor a bug of ours may lose the replies to others
        return Failed(call, *to_wire(error))


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """The plane's settings.

    ``capacity``: most samples stored at once, None unlimited. ``preallocate``: the fewest samples a new partition makes
    room for.
    ``producer_grace_s``: how long a dead producer may be replaced before fetches of its fields fail.
    """

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    sampler_modules: tuple[str, ...] = ()
    capacity: int | None = None
    preallocate: int = 1
    producer_grace_s: float = 5.0


def plane_config(config: QueueConfig, sampler: Any, preallocate: int) -> PlaneConfig:
    """The plane's part of a queue's configuration. ``sampler``: a name, a spec, an instance or a class."""
    controller = config.controller
    return PlaneConfig(
        sampler=resolve(sampler, controller.sampler_modules),
        sampler_modules=tuple(controller.sampler_modules),
        capacity=config.backend.SimpleStorage.total_storage_size,
        preallocate=preallocate,
        producer_grace_s=controller.producer_grace_s,
    )


class PlaneState:
    """The verbs change it. After a request, only dirty partitions are examined again."""

    def __init__(self, config: PlaneConfig) -> None:
        self.config = config
        self.partitions: dict[str, Partition] = {}
        self.tasks = Tasks(config.sampler, config.sampler_modules)
        self.allocator = IndexAllocator()
        self.waiters = Waiters()
        self.writers: WaitQueue[Parked] = WaitQueue()
        """The parked requests that need room for samples."""
        self.producers = Producers(config.producer_grace_s)
        self.dirty: dict[str, str | None] = {}
        self.cut_off: list[Parked] = []
        self.unused: list[Indexes] = []
        """Values to be deleted: they may be in storage, and belong to no sample any more."""
        self._discarded: list[Partition] = []
        self.incarnations = 0
        self.freezes = Freezes()
        self.snapshots: set[object] = set()
        """Those of which slices are still to be made."""
        self.calls = Calls()

    def mark_dirty(self, partition: str, task: str | None = None) -> None:
        """Mark a partition as dirty: a parked fetch of this task (None: of any) may be decided now."""
        self.dirty[partition] = task if self.dirty.get(partition, task) == task else None

    def mark_all_dirty(self, task: str | None = None) -> None:
        """Examine all parked fetches again, of this task or of all tasks."""
        for queue in self.waiters.queues():
            if not queue.startswith("\0"):
                self.mark_dirty(queue, task)

    def get(self, name: str) -> Partition:
        """Raises UnknownPartitionError that names the existing ones."""
        partition = self.partitions.get(name)
        if partition is None:
            known = ", ".join(map(repr, list(self.partitions)[:10])) or "none yet"
            raise UnknownPartitionError(f"partition {name!r} not found; it was cleared or never used. Known: {known}.")
        return partition

    def create(self, name: str, num_samples: int | None = None) -> Partition:
        """Create a partition; the name must be free."""
        self.incarnations += 1
        partition = Partition(name, self.incarnations, self.allocator, self.config.preallocate, num_samples)
        self.partitions[name] = partition
        return partition

    def find(self, name: str, serial: int) -> Partition | None:
        """The partition with this serial; None if it was cleared or replaced since."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.serial == serial else None

    def get_or_create(self, name: str) -> Partition:
        return self.partitions.get(name) or self.create(name)

    def discard(self, partition: Partition) -> None:
        """Free a deleted partition. Many keys and tags are freed in slices, so that no client waits for it."""
        if partition.table.size > _SLICE and partition.has_objects():
            self._discarded.append(partition)

    def tidy(self) -> None:
        """Free a slice of the partitions that are gone."""
        if not self.is_tidy and not self._discarded[-1].shrink(_SLICE):
            self._discarded.pop()

    @property
    def is_tidy(self) -> bool:
        return not self._discarded or bool(self.snapshots)  # these may still read what is gone

    def delete(self, indexes: Indexes) -> None:
        """Delete the values of these samples, none of which is in a partition now."""
        if len(indexes):
            self.unused.append(indexes)

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes are in some partition."""
        found = np.zeros(len(indexes), dtype=np.bool_)
        if not len(indexes):
            return found
        first, last = int(indexes.min()), int(indexes.max())
        for partition in self.partitions.values():
            if partition.table.spans(first, last):
                found |= partition.table.find(indexes)[1]
        return found

    def room(self) -> int | None:
        """The number of samples that may still be inserted; None: unlimited."""
        return None if self.config.capacity is None else self.config.capacity - self.allocator.num_used
