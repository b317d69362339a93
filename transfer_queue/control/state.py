# SPDX-License-Identifier: Apache-2.0
"""The state that the plane's verbs share: partitions, tasks, producers, units; and what a change of it wakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transfer_queue.calls import PIECE, Calls, Name, Wait
from transfer_queue.config import FullConfig
from transfer_queue.control.draw import Tasks
from transfer_queue.control.dropped import Dropped
from transfer_queue.control.freezes import Freezes
from transfer_queue.control.leases import Leases
from transfer_queue.control.partition import Partition
from transfer_queue.control.producers import Producers
from transfer_queue.control.rows import MAX_INDEX, IndexAllocator
from transfer_queue.control.run_table import RunTable
from transfer_queue.control.units import UnitTable
from transfer_queue.diagnosis import holds, is_internal
from transfer_queue.errors import UnknownPartitionError
from transfer_queue.protocol import Ended, Indexes, Reply, WriteName
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve
from transfer_queue.sampler.sequential_sampler import SequentialSampler

# Wait queues. The fetches of one task with one filter stand in one; what waits for keys of a partition, too.
FETCHES = "fetches"
KEYS = "keys"
WRITERS = ("writers",)
"""For all writers that wait for room, because the capacity is the whole plane's."""
SAVING = ("saving",)
"""Freezes, which wait for writers that replace values; behind them such writers, which wait for freezes."""


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """The plane's settings.

    ``capacity``: most samples stored at once, None unlimited. ``preallocate``: the fewest samples a new partition makes
    room for.
    ``producer_grace_s``: how long a dead producer may be replaced before fetches of its fields fail.
    ``server``: a number below 2**24 of this process. Others, also if they restore the same file, have another one.
    """

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    sampler_modules: tuple[str, ...] = ()
    capacity: int | None = None
    preallocate: int = 1
    producer_grace_s: float = 5.0
    server: int = 0

    @property
    def gap(self) -> int:
        """How many indexes and tokens a restore leaves out, because others may have given them out since the save.

        They are 2**32 for the queue that was saved, and 2**16 for each server that may have restored the same file.
        """
        return 2**32 + self.server * 2**16


def plane_config(config: FullConfig, sampler: Any, preallocate: int) -> PlaneConfig:
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
    """The verbs change it, and say what changed: that wakes the calls that wait for it."""

    def __init__(self, config: PlaneConfig, calls: Calls) -> None:
        self.config = config
        self.calls = calls
        self.waits = calls.waits
        self.waits.with_sizes(WRITERS, self.room)
        self.partitions: dict[str, Partition] = {}
        self.tasks = Tasks(config.sampler, config.sampler_modules)
        self.allocator = IndexAllocator()
        self.leases = Leases(calls, lambda task: self.tasks.get(task).sampler)
        self.producers = Producers(calls, config.producer_grace_s, self.everything_changed)
        self.unused: list[Indexes] = []
        """Indexes whose values are to be deleted: they may be in storage, and belong to no sample any more."""
        self.ended_writes: list[tuple[WriteName, list[WriteName]]] = []
        """Writes in steps that end halfway; if they were published, with what units commit up to them."""
        self.incarnations = config.server  # so that no other queue has the same tokens
        self.freezes = Freezes()
        self.snapshots: set[object] = set()
        """Snapshots of which slices are still to be made."""
        self.timed_lines: set[Name] = set()
        """Queues of fetches of which the first is examined at a certain time."""
        self._discarded: list[Partition] = []
        self.units = UnitTable()
        self.runs = RunTable()
        self.dropped = Dropped(lambda task: self.tasks.is_follower(task))

    # ---- what a change wakes ----

    def changed(self, partition: Partition) -> None:
        """Samples of the partition changed, or its end came: fetches and waits for keys may be decided now.

        Of each queue of fetches, only the first may draw. The others wait for what it draws, or for an end.
        """
        waits, name = self.waits, partition.name
        if not waits.count:
            return
        if (KEYS, name) in waits.occupied and partition.listed.take_changed():
            waits.wake((KEYS, name))
        if partition.sealed:  # by now, where this was the last sample that was promised
            self.refuses(name)
        fetches = (FETCHES, name)
        if fetches in waits.occupied:
            waits.wake_first(fetches)
            for task, consumer in partition.consumers.items():
                if consumer.take_decided():
                    waits.wake((FETCHES, name, task))

    def freed(self, partition: Partition) -> None:
        """Samples of the partition are gone, and leave room for others."""
        self.changed(partition)
        self.waits.wake_first(WRITERS)

    def refuses(self, partition: str) -> None:
        """The partition takes other writes than before: those that wait for room are checked again."""
        self.waits.wake_key((WRITERS, partition))

    def everything_changed(self) -> None:
        """Any fetch or wait for keys may be decided now."""
        self.waits.wake((FETCHES,))
        self.waits.wake((KEYS,))

    def fetches_of(self, task: str) -> list[Wait]:
        """The waiting fetches of a task, in all partitions."""
        return [wait for wait in self.waits.of((FETCHES,)) if wait.queue[2] == task]

    def cut_off(self, partition: str) -> None:
        """The partition was cleared: to those that wait for something of it, that is the end of the stream."""
        for group in ((FETCHES, partition), (KEYS, partition)):
            self.waits.decide(self.waits.of(group), ended)
        self.refuses(partition)

    # ---- partitions ----

    def get(self, name: str) -> Partition:
        """Raises UnknownPartitionError that names the existing ones."""
        partition = self.partitions.get(name)
        if partition is None:
            shown = [name for name in self.partitions if not is_internal(name)]
            known = ", ".join(map(repr, shown[:10])) or "none yet"
            raise UnknownPartitionError(f"partition {name!r} not found; it was cleared or never used. Known: {known}.")
        return partition

    def find(self, name: str, serial: int) -> Partition | None:
        """The partition with this serial; None if it was cleared or replaced since."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.serial == serial else None

    def get_or_create(self, name: str) -> Partition:
        partition = self.partitions.get(name)
        if partition is None:
            self.incarnations += 1
            partition = Partition(name, self.incarnations, self.allocator, self.config.preallocate)
            self.partitions[name] = partition
            self.leases.partition_made(name)
        return partition

    def discard(self, partition: Partition) -> None:
        """Free a deleted partition. Many keys and tags are freed in pieces, so that no client waits for it."""
        if partition.table.size > PIECE and (len(partition.keys) or partition.tags.has_any()):
            self._discarded.append(partition)
            self.tidy()

    def discard_all(self, partitions: dict[str, Partition]) -> None:
        """Free all of them one by one, because all at once take long."""
        for partition in partitions.values():
            self.discard(partition)
        self.calls.later(_freeing(list(partitions.values())))

    def tidy(self) -> None:
        """Begin to free what was discarded, unless snapshots may still read it."""
        while self._discarded and not self.snapshots:
            self.calls.later(self._discarded.pop().freeing())

    # ---- samples ----

    def delete(self, indexes: Indexes) -> None:
        """Delete the values of these samples, none of which is in a partition now."""
        if len(indexes):
            self.unused.append(indexes)

    def committed(self, write: WriteName) -> None:
        """Units have heard of this write of a client that has ended."""
        for partition in self.partitions.values():
            partition.commits.pop(write, None)

    def holds(self) -> str:
        """What is in the queue, in words. Only some of many partitions are looked at."""
        named = ((name, own.num_live, own.sealed) for name, own in self.partitions.items() if not is_internal(name))
        return holds(named)

    def room(self) -> int:
        """The number of samples that may still be inserted."""
        capacity = MAX_INDEX if self.config.capacity is None else self.config.capacity
        return capacity - self.allocator.num_used


def _freeing(gone: list[Partition]) -> Iterator[None]:
    while gone:
        del gone[-1]
        yield


def ended(wait: Wait, has_turn: bool) -> Reply:
    """The answer to what waits for something that is gone."""
    return Ended(wait.owner.number, "cleared")
