# SPDX-License-Identifier: Apache-2.0
"""Partitions and tasks of a control plane, built from a saved state a slice at a time, before they replace its own."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from transfer_queue.calls import Calls
from transfer_queue.control import group_loading, group_work
from transfer_queue.control.draw import Task, Tasks, foreign
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import MAX_INDEX, IndexAllocator, RowState, one_of
from transfer_queue.control.saved import SavedPartition, SavedQueue, SavedSampler, SavedTask
from transfer_queue.control.snapshot import FrozenPartition, kind_of, planned, slice_of
from transfer_queue.control.state import PlaneConfig, PlaneState
from transfer_queue.errors import CheckpointError, StorageFullError
from transfer_queue.protocol import Indexes, unpack_indexes
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve

_PUT_COLUMNS = ("put_offset", "put_size", "put_number")
_LOADED = one_of(RowState.LIVE, RowState.FREE, RowState.HEAD)


def recut(whole: SavedQueue) -> Iterator[SavedQueue]:
    """The slices of a saved queue that was not cut. Raises CheckpointError where it contradicts itself."""
    restored = Restored(PlaneState(PlaneConfig(), Calls()), 0, 0.0)
    restored.add(whole)
    for number, sections in enumerate(planned(FrozenPartition(each, 0.0) for each in restored.partitions.values())):
        yield slice_of(whole, [partition.save(section) for partition, section in sections], number)


class Restored:
    """``partitions``, ``tasks``, ``allocator`` and ``incarnations`` of the plane to be, once all slices are in."""

    def __init__(self, state: PlaneState, shift: int, now: float) -> None:
        self.partitions: dict[str, Partition] = {}
        self.allocator = IndexAllocator()
        self._state, self._shift, self._now = state, shift, now
        self._head: SavedQueue | None = None
        self.incarnations = 0
        self._given: dict[str, Counter[int]] = {}
        """Samples of each batch by task, in the partition that is being loaded."""

    def add(self, saved: SavedQueue) -> None:
        """The next slice. Raises CheckpointError where the saved state contradicts itself."""
        with _contradictions():
            if self._head is None:
                self._head = saved
                self._take_number(saved)
            for each in saved.partitions:
                self._add(each)

    def _add(self, saved: SavedPartition) -> None:
        partition = self._partition(saved)
        state, index = np.frombuffer(saved.state, dtype=np.uint8), unpack_indexes(saved.index) + self._shift
        table, start = partition.table, partition.table.size
        last = table.column("index").item(start - 1) if start else -1
        if (np.diff(index, prepend=last) < 1).any():
            raise ValueError(f"samples of partition {saved.name!r} are there twice, or in no order")
        if not _LOADED[state].all():
            raise ValueError(f"a row of partition {saved.name!r} has an unknown state")
        for each in saved.consumers:
            partition.consumer(each.task)
        rows = table.append(index, RowState.LIVE)
        table.column("state")[start:] = state
        for name in _PUT_COLUMNS:
            table.column(name)[start:] = np.frombuffer(getattr(saved, name), dtype="<i4")
        num_live = int(np.count_nonzero(state == RowState.LIVE))
        free = rows[state == RowState.FREE]
        partition.num_live += num_live
        partition.free.add(free)
        self.allocator.num_used += len(rows) - len(free)
        partition.schema.load(saved.fields, start)
        self._name(partition, saved, index)
        tagged = unpack_indexes(saved.tagged)
        if len(tagged) and not 0 <= int(tagged.min()) <= int(tagged.max()) < len(rows):
            raise ValueError(f"tags of partition {saved.name!r} belong to no row")
        partition.tags.load(tagged + start, saved.tags)
        for consumer in partition.consumers.values():
            consumer.inserted(num_live)
        if saved.groups:
            group_loading.load(partition, saved.groups, saved.terms, start, self._shift)
            group_work.groups_of(partition).left_by.update(saved.left_by)
        for each in saved.consumers:
            given = self._given.setdefault(each.task, Counter())
            given.update(partition.consumer(each.task).load(each, self._shift, start).tolist())

    def _partition(self, saved: SavedPartition) -> Partition:
        """That of the last slice, or a new one."""
        partition = self.partitions.get(saved.name)
        if partition is None:
            self._is_whole()
            partition = Partition(saved.name, saved.incarnation, self.allocator, saved.preallocate, saved.num_samples)
            partition.sealed, partition.num_published = saved.sealed, saved.num_published
            partition.num_puts, partition.num_heads = saved.num_puts, saved.num_heads
            partition.last_published = None if saved.published_ago_s is None else self._now - saved.published_ago_s
            partition.missing_free = saved.missing_free
            partition.has_lost({name: unpack_indexes(own) + self._shift for name, own in saved.lost.items()})
            self.partitions[saved.name] = partition
        elif next(reversed(self.partitions)) != saved.name:
            raise ValueError(f"partition {saved.name!r} is there twice")
        if saved.missing_free < 0:
            raise ValueError(f"partition {saved.name!r} lacks less than nothing")
        return partition

    def _take_number(self, saved: SavedQueue) -> None:
        """One that is in no token: acks of batches that were drawn since the save must not match here."""
        self.incarnations = max(self._state.incarnations, saved.incarnations) + 1 + self._state.config.server

    def _is_whole(self) -> None:
        """All rows of the last partition are in. Raises ValueError for contradictions between its slices."""
        for partition in itertools.islice(reversed(self.partitions.values()), 1):
            for task, given in self._given.items():
                if not partition.consumers[task].ledger.finish_loading(given):
                    raise ValueError(
                        f"batches of task {task!r} in partition {partition.name!r} are others than its samples say"
                    )
            partition.restored_as(self.incarnations)
        self._given = {}

    def _name(self, partition: Partition, saved: SavedPartition, index: Indexes) -> None:
        if not saved.keys and not saved.key_indexes:
            return
        named = unpack_indexes(saved.key_indexes) + self._shift
        if (np.diff(named) < 1).any() or not np.isin(named, index).all():
            raise ValueError(f"keys of partition {saved.name!r} belong to no sample, or two to one")
        for key, at in zip(saved.keys, named.tolist(), strict=True):
            if partition.keys.index_of(key) is not None:
                raise ValueError(f"key {key!r} of partition {saved.name!r} is there twice")
            partition.keys.bind(key, at)
        partition.listed.named(partition.rows_of(named))

    def finish(self) -> None:
        """All slices are in.

        Raises:
            CheckpointError: the saved state contradicts itself, or needs a sampler that isn't there.
            StorageFullError: it holds more samples than the queue may.
        """
        saved, state = self._head, self._state
        assert saved is not None, "a restore has one slice at least"
        first = max(state.allocator.next_index, saved.next_index + self._shift)
        if not 0 <= first < MAX_INDEX:
            raise CheckpointError(f"the saved state's next index is out of range: {saved.next_index}.")
        self.allocator.next_index = first
        self.tasks = _restore_tasks(saved, state, self._shift)
        self.versions, self.next_lease = saved.versions, saved.next_lease
        with _contradictions():
            self._is_whole()
            self._check()
            if state.incarnations >= self.incarnations:  # another restore came first, or new partitions
                self._take_number(saved)
                for partition in self.partitions.values():
                    partition.restored_as(self.incarnations)
            self.allocator.next_index += state.config.gap
            for partition in self.partitions.values():
                if partition.missing_free:
                    partition.make_free(partition.missing_free)  # their indexes must come after all others
                    partition.missing_free = 0
        check_fits(state, self.allocator.num_used)

    def _check(self) -> None:
        """Raises ValueError for indexes that are there twice, or in no queue."""
        columns = [each.table.column("index") for each in self.partitions.values()]
        together = np.concatenate([np.full(1, -1, dtype=np.int64), *columns])
        if len(columns) > 1:
            together.sort(kind="stable")
            if (np.diff(together) < 1).any():
                raise ValueError("an index is there twice")
        if together[-1] >= self.allocator.next_index:
            raise ValueError("an index was never handed out")

    def drop(self) -> None:
        """Discard what was built."""
        self._state.discard_all(self.partitions)


def check_fits(state: PlaneState, count: int) -> None:
    """Raises StorageFullError for a checkpoint of more samples than the queue may hold."""
    capacity = state.config.capacity
    if capacity is not None and count > capacity:
        raise StorageFullError(
            f"Storage capacity exceeded: the checkpoint holds {count} samples, the queue takes {capacity} "
            f"(total_storage_size). Load it into a queue that takes more."
        )


@contextmanager
def _contradictions() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, msgspec.DecodeError, AssertionError, RecursionError) as error:
        raise CheckpointError(f"the saved state of the queue contradicts itself: {error}.") from error


def _restore_tasks(saved: SavedQueue, state: PlaneState, shift: int) -> Tasks:
    """Tasks as they were saved, and those that only this queue knows. Samplers are new objects."""
    default = _restore_sampler(_copy(state.tasks.default), saved.sampler, shift)
    tasks = Tasks(default, state.config.sampler_modules)
    for task in state.tasks.by_name.values():
        sampler = default if task.sampler is state.tasks.default else _copy(task.sampler)
        tasks.by_name[task.name] = replace(task, sampler=sampler)
    for each in saved.tasks:
        sampler = default
        if each.sampler is not None:
            sampler = _restore_sampler(_sampler_of(each, tasks, state), each.sampler, shift)
        tasks.by_name[each.name] = Task(each.name, sampler, each.dp_size, each.tail, each.spec)
    return tasks


def _sampler_of(saved: SavedTask, tasks: Tasks, state: PlaneState) -> BaseSampler:
    if saved.spec is not None:
        with foreign(f"the sampler of task {saved.name!r}"):
            return resolve(saved.spec, state.config.sampler_modules)
    sampler = tasks.get(saved.name).sampler  # one that was given as an object can't be made anew
    if saved.sampler is not None and kind_of(sampler) != saved.sampler.kind:
        raise CheckpointError(
            f"task {saved.name!r} drew with a {saved.sampler.kind}, here it has {kind_of(sampler)}. Give the task the "
            f"same sampler before the checkpoint is loaded."
        )
    return _copy(sampler)


def _copy(sampler: BaseSampler) -> BaseSampler:
    with foreign(sampler):
        return copy.deepcopy(sampler)


def _restore_sampler(sampler: BaseSampler, saved: SavedSampler, shift: int) -> BaseSampler:
    """With the state that was saved, if it is of the same class: another one couldn't read it."""
    if kind_of(sampler) != saved.kind:
        return sampler
    with foreign(sampler):
        fresh = sampler.save_checkpoint()
        if shift and not _is_bare(saved.state, fresh):
            raise CheckpointError(
                f"{saved.kind} remembers samples by their index, and here the saved ones get others, for their "
                f"indexes were in use. Load the checkpoint into a new queue."
            )
        sampler.load_checkpoint(saved.state)
    return sampler


def _is_bare(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> bool:
    return all(not _leaves(value) or value == fresh.get(name) for name, value in saved.items())


def _leaves(value: Any) -> bool:
    """Is there anything but empty containers?"""
    if isinstance(value, Mapping):
        return any(map(_leaves, value.values()))
    return any(map(_leaves, value)) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else True
