# SPDX-License-Identifier: Apache-2.0
"""Converts the state of a control plane to plain data and back, for checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from transfer_queue.control.draw import foreign
from transfer_queue.control.indexes import MAX_INDEX, IndexAllocator
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import Rows, RowState, one_of
from transfer_queue.control.saved import FORMAT, SavedPartition, SavedQueue, SavedSampler, SavedTask
from transfer_queue.control.state import PlaneState
from transfer_queue.control.tasks import Task, Tasks
from transfer_queue.errors import CheckpointError, StorageFullError
from transfer_queue.protocol import Indexes, pack_indexes, unpack_indexes
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve

_SAVED = one_of(RowState.LIVE, RowState.FREE)
_PUT_COLUMNS = ("put_offset", "put_size", "put_number")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedQueue)


class _Format(msgspec.Struct):
    format: int


# ---- saving ----


def snapshot(state: PlaneState, now: float) -> bytes:
    """Save everything that affects later requests, except the state of sessions (waits, reservations, producers).

    Raises:
        CheckpointError: a sampler's state is not plain data.
    """
    saved = SavedQueue(
        FORMAT, state.allocator.next_index, state.incarnations,
        [_save_partition(partition, now) for partition in state.partitions.values()],
        [_save_task(task, state.tasks.default) for task in state.tasks], _save_sampler(state.tasks.default),
    )  # fmt: skip
    try:
        return _encoder.encode(saved)
    except (TypeError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"what a sampler remembers can't be saved: {error}. Its save_checkpoint() must return plain data: numbers, "
            f"strings, lists, dicts."
        ) from error


def live_indexes(state: PlaneState) -> Indexes:
    """Samples of all partitions, ascending within each."""
    parts = [np.empty(0, dtype=np.int64)]
    for partition in state.partitions.values():
        table = partition.table
        parts.append(table.column("index")[table.column("state") == RowState.LIVE])
    return np.concatenate(parts)


def _save_partition(partition: Partition, now: float) -> SavedPartition:
    table, last = partition.table, partition.last_published
    state = table.column("state")
    rows = _SAVED[state].nonzero()[0]
    index = table.column("index")[rows]
    live = set(index[state[rows] == RowState.LIVE].tolist()) if len(partition.keys) else ()
    named = [(key, at) for key, at in partition.keys.items() if at in live]
    tagged, tags = partition.tags.save(rows)
    offset, size, number = (table.column(name)[rows].astype("<i4").tobytes() for name in _PUT_COLUMNS)
    return SavedPartition(
        partition.name, partition.incarnation, partition.sealed, partition.num_samples, partition.num_published,
        partition.num_puts, partition.preallocate, pack_indexes(index), state[rows].tobytes(),
        offset, size, number, partition.schema.save(rows),
        [consumer.save(rows) for consumer in partition.consumers.values()],
        keys=[key for key, _ in named], key_indexes=pack_indexes([at for _, at in named]),
        tagged=pack_indexes(tagged), tags=tags, published_ago_s=None if last is None else now - last,
        missing_free=0 if partition.sealed else int(np.count_nonzero(state == RowState.HELD_FREE)),
    )  # fmt: skip


def _save_task(task: Task, default: BaseSampler) -> SavedTask:
    own = None if task.sampler is default else _save_sampler(task.sampler)
    return SavedTask(task.name, task.spec, task.dp_size, task.tail, own)


def _save_sampler(sampler: BaseSampler) -> SavedSampler:
    with foreign(sampler):
        return SavedSampler(_kind(sampler), sampler.save_checkpoint())


def _kind(sampler: BaseSampler) -> str:
    return f"{type(sampler).__module__}:{type(sampler).__qualname__}"


# ---- restoring ----


def decode(data: bytes) -> SavedQueue:
    """Raises CheckpointError for data that is not a saved state, or has a newer version."""
    try:
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found == FORMAT:
            return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"the saved state of the queue can't be read: {error}.") from error
    raise CheckpointError(
        f"the saved state of the queue has format {found}, this version reads {FORMAT}. Update lightning-tq, or save "
        f"again with the version that runs here."
    )


def saved_indexes(saved: SavedQueue) -> Indexes:
    """All indexes of the saved rows."""
    return np.concatenate([np.empty(0, np.int64), *(unpack_indexes(each.index) for each in saved.partitions)])


class Restored:
    """A plane's new state, built separately, so that nothing has changed if that fails."""

    def __init__(self, saved: SavedQueue, state: PlaneState, shift: int, now: float) -> None:
        """Build the new state.

        Raises:
            CheckpointError: the saved state contradicts itself, or needs a missing sampler.
            StorageFullError: it holds more samples than the queue may.
        """
        first = max(state.allocator.next_index, saved.next_index + shift)
        if not 0 <= first < MAX_INDEX:
            raise CheckpointError(f"the saved state's next index is out of range: {saved.next_index}.")
        self.allocator = IndexAllocator(first)
        # No token may contain this number yet: tokens issued since the save must not match.
        self.incarnations = max(state.incarnations, saved.incarnations) + 1
        self.tasks = _restore_tasks(saved, state, shift)
        self.partitions: dict[str, Partition] = {}
        try:
            for each in saved.partitions:
                self.partitions[each.name] = _restore_partition(each, self.incarnations, self.allocator, shift, now)
            if len(self.partitions) < len(saved.partitions) or any(each.missing_free < 0 for each in saved.partitions):
                raise ValueError("a partition is there twice, or lacks less than nothing")
            for each in saved.partitions:  # with new indexes, which must come after all others of their partition
                self.partitions[each.name].make_free(each.missing_free)
            _check(self.partitions, self.allocator)
        except (ValueError, LookupError, msgspec.DecodeError, AssertionError, RecursionError) as error:
            raise CheckpointError(f"the saved state of the queue contradicts itself: {error}.") from error
        capacity = state.config.capacity
        if capacity is not None and self.allocator.num_used > capacity:
            raise StorageFullError(
                f"Storage capacity exceeded: the checkpoint holds {self.allocator.num_used} samples, the queue takes "
                f"{capacity} (total_storage_size). Load it into a queue that takes more."
            )


def _restore_partition(
    saved: SavedPartition, restored: int, allocator: IndexAllocator, shift: int, now: float
) -> Partition:
    partition = Partition(saved.name, saved.incarnation, allocator, saved.preallocate, saved.num_samples, restored)
    table, state = partition.table, np.frombuffer(saved.state, dtype=np.uint8)
    if not _SAVED[state].all():
        raise ValueError(f"a row of partition {saved.name!r} has an unknown state")
    rows = table.append(unpack_indexes(saved.index) + shift, RowState.LIVE)
    table.column("state")[:] = state
    for name in _PUT_COLUMNS:
        table.column(name)[:] = np.frombuffer(getattr(saved, name), dtype="<i4")
    partition.sealed, partition.num_published, partition.num_puts = saved.sealed, saved.num_published, saved.num_puts
    partition.last_published = None if saved.published_ago_s is None else now - saved.published_ago_s
    partition.num_live = int(np.count_nonzero(state == RowState.LIVE))
    partition.num_free = len(rows) - partition.num_live
    allocator.num_used += partition.num_live
    partition.schema.load(saved.fields)
    for key, index in zip(saved.keys, (unpack_indexes(saved.key_indexes) + shift).tolist(), strict=True):
        partition.keys.bind(key, index)
    partition.tags.load(unpack_indexes(saved.tagged), saved.tags)
    for each in saved.consumers:
        partition.consumer(each.task).load(each, shift)
    return partition


def _check(partitions: Mapping[str, Partition], allocator: IndexAllocator) -> None:
    indexes = np.concatenate([np.empty(0, np.int64), *(each.table.column("index") for each in partitions.values())])
    indexes.sort()
    if (np.diff(indexes) < 1).any() or (len(indexes) and indexes[-1] >= allocator.next_index):
        raise ValueError("an index is there twice, or was never handed out")
    for partition in partitions.values():
        partition.check_invariants()


def _restore_tasks(saved: SavedQueue, state: PlaneState, shift: int) -> Tasks:
    """The saved tasks, and those that only this queue has. Samplers are new objects."""
    default = _restore_sampler(_copy(state.tasks.default), saved.sampler, shift)
    tasks = Tasks(default, state.config.sampler_modules)
    for task in state.tasks:
        sampler = default if task.sampler is state.tasks.default else _copy(task.sampler)
        tasks.add(Task(task.name, sampler, task.dp_size, task.tail, task.spec))
    for each in saved.tasks:
        sampler = default if each.sampler is None else _sampler_of(each, tasks, state)
        if each.sampler is not None:
            sampler = _restore_sampler(sampler, each.sampler, shift)
        tasks.add(Task(each.name, sampler, each.dp_size, each.tail, each.spec))
    return tasks


def _sampler_of(saved: SavedTask, tasks: Tasks, state: PlaneState) -> BaseSampler:
    if saved.spec is not None:
        with foreign(f"the sampler of task {saved.name!r}"):
            return resolve(saved.spec, state.config.sampler_modules)
    sampler = tasks.get(saved.name).sampler  # a sampler that was given as an object can't be rebuilt
    if saved.sampler is not None and _kind(sampler) != saved.sampler.kind:
        raise CheckpointError(
            f"task {saved.name!r} drew with a {saved.sampler.kind}, here it has {_kind(sampler)}. Give the task the "
            f"same sampler before the checkpoint is loaded."
        )
    return _copy(sampler)


def _copy(sampler: BaseSampler) -> BaseSampler:
    with foreign(sampler):
        return copy.deepcopy(sampler)


def _restore_sampler(sampler: BaseSampler, saved: SavedSampler, shift: int) -> BaseSampler:
    """Load the saved state if the class is the same; another class couldn't read it."""
    if _kind(sampler) != saved.kind:
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
    """Whether it contains anything but empty containers."""
    if isinstance(value, Mapping):
        return any(map(_leaves, value.values()))
    return any(map(_leaves, value)) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else True


def rows_with(saved: SavedPartition) -> tuple[Indexes, dict[str, Rows]]:
    """Samples of a saved partition, and by field the positions of the samples that have it."""
    live = np.frombuffer(saved.state, dtype=np.uint8) == RowState.LIVE
    has = {each.name: np.frombuffer(each.has, dtype=np.bool_)[live].nonzero()[0] for each in saved.fields}
    return unpack_indexes(saved.index)[live], {name: rows for name, rows in has.items() if len(rows)}
