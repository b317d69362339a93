# SPDX-License-Identifier: Apache-2.0
"""The state of a control plane at one moment, as plain data: what a checkpoint holds besides the values.

The moment itself takes a few milliseconds: columns of numbers are copied. Slices are made one by one later, while the
queue goes on. Keys and tags that change or are deleted before that are kept for them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.control.consumer import Consumer
from transfer_queue.control.draw import Task, foreign
from transfer_queue.control.ledger import save_entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import RowState, one_of
from transfer_queue.control.saved import (
    BATCHES,
    FORMAT,
    ROWS,
    SavedConsumer,
    SavedPartition,
    SavedQueue,
    SavedSampler,
    SavedTask,
    grouped,
    later,
    num_cuts,
)
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import Indexes, pack_indexes
from transfer_queue.sampler.base import BaseSampler

_SAVED = one_of(RowState.LIVE, RowState.FREE)
_encoder = msgspec.msgpack.Encoder()


class Snapshot:
    """Everything that decides about later requests, except what sessions wait for, reserved, or produce."""

    def __init__(self, state: PlaneState, now: float) -> None:
        """
        Raises:
            CheckpointError: what a sampler remembers is no plain data.
        """
        self._head = SavedQueue(
            FORMAT, state.allocator.next_index, state.incarnations, [],
            [_save_task(task, state.tasks.default) for task in state.tasks], save_sampler(state.tasks.default),
        )  # fmt: skip
        _check(self._head)
        self._state = state
        self._partitions = [_Frozen(partition, now) for partition in state.partitions.values()]
        self._slices = grouped(
            (_Section(each, at), each.section_rows) for each in self._partitions for at in range(each.num_sections)
        )

        self.num_parts = len(self._slices)
        state.snapshots.add(self)

    def part(self, number: int) -> bytes:
        """One slice. Raises IndexError where there are fewer."""
        partitions = [section.partition.save(section.number) for section in self._slices[number]]
        head = self._head
        return _encoder.encode(
            later(head, partitions) if number else msgspec.structs.replace(head, partitions=partitions)
        )

    def live(self) -> Indexes:
        """Samples of all partitions, ascending."""
        parts = [np.empty(0, dtype=np.int64), *(each.live() for each in self._partitions)]
        together = np.concatenate(parts)
        together.sort(kind="stable")  # the quick way to merge what is sorted already
        return together

    def close(self) -> None:
        """Release everything; no further slice is needed. Idempotent."""
        for each in self._partitions:
            each.close()
        self._partitions, self._slices = [], []
        self._state.snapshots.discard(self)


class _Frozen:
    """One partition as it is now."""

    def __init__(self, partition: Partition, now: float) -> None:
        last = partition.last_published
        self._keys, self._tags = partition.keys, partition.tags
        self._gone, self._changed = partition.keys.watch(), partition.tags.watch()
        self._table = partition.table.frozen()
        self._schema = partition.schema.frozen(self._table)
        self._consumers = [_FrozenConsumer(each) for each in partition.consumers.values()]
        state = self._table.column("state")
        self._head = SavedPartition(
            partition.name, partition.incarnation, partition.sealed, partition.num_samples, partition.num_published,
            partition.num_puts, partition.preallocate, b"", b"", b"", b"", b"", [], [],
            published_ago_s=None if last is None else now - last,
            missing_free=0 if partition.sealed else int(np.count_nonzero(state == RowState.RESERVED_FREE)),
        )  # fmt: skip
        self.num_sections = num_cuts(self._table.size, (len(each.entries) for each in self._consumers))

    def live(self) -> Indexes:
        live: Indexes = self._table.column("index")[self._table.column("state") == RowState.LIVE]
        return live

    @property
    def section_rows(self) -> int:
        """Rows of one section, or what is as much work."""
        return ROWS if self.num_sections > 1 else self._table.size

    def save(self, number: int) -> SavedPartition:
        """One section."""
        table, start = self._table, number * ROWS
        rows = _SAVED[table.column("state")[start : start + ROWS]].nonzero()[0] + start
        index, state = table.column("index")[rows], table.column("state")[rows]
        is_live = state == RowState.LIVE
        offset, size, put = (
            np.where(is_live, table.column(name)[rows], 0).astype("<i4").tobytes()
            for name in ("put_offset", "put_size", "put_number")
        )
        keys, named = self._keys.names_of(index[is_live], self._gone)
        tagged, tags = self._tags.save(index, self._changed)
        return msgspec.structs.replace(
            self._head, index=pack_indexes(index), state=state.tobytes(),
            put_offset=offset, put_size=size, put_number=put, fields=self._schema.save(rows),
            consumers=[each.save(number, table.column(each.given)[rows], table.column(each.consumed)[rows])
                       for each in self._consumers],
            keys=keys, key_indexes=pack_indexes(named), tagged=pack_indexes(tagged), tags=tags,
            missing_free=0 if number else self._head.missing_free,
        )  # fmt: skip

    def close(self) -> None:
        self._keys.unwatch(self._gone)
        self._tags.unwatch(self._changed)


class _Section(NamedTuple):
    partition: _Frozen
    number: int


class _FrozenConsumer:
    """One task's view of a partition as it is now. ``given``, ``consumed``: names of its columns."""

    def __init__(self, consumer: Consumer) -> None:
        self._head = consumer.save()
        self.given, self.consumed = consumer.columns
        self.entries = consumer.ledger.entries()

    def save(self, number: int, given: npt.NDArray[np.int32], consumed: npt.NDArray[np.bool_]) -> SavedConsumer:
        """One section: these rows, and the next batches."""
        batches = self.entries[number * BATCHES : (number + 1) * BATCHES]
        ledger = msgspec.structs.replace(
            self._head.ledger,
            entries=[save_entry(*each) for each in batches],
            ranks=[] if number else self._head.ledger.ranks,
        )
        columns = {"given": given.astype("<i4").tobytes(), "consumed": consumed.tobytes()}
        return msgspec.structs.replace(self._head, **columns, ledger=ledger)


def _check(head: SavedQueue) -> None:
    try:
        _encoder.encode(head)
    except (TypeError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"what a sampler remembers can't be saved: {error}. Its save_checkpoint() must return plain data: numbers, "
            f"strings, lists, dicts."
        ) from error


def _save_task(task: Task, default: BaseSampler) -> SavedTask:
    own = None if task.sampler is default else save_sampler(task.sampler)
    return SavedTask(task.name, task.spec, task.dp_size, task.tail, own)


def save_sampler(sampler: BaseSampler) -> SavedSampler:
    """What the sampler remembers."""
    with foreign(sampler):
        return SavedSampler(kind_of(sampler), sampler.save_checkpoint())


def kind_of(sampler: BaseSampler) -> str:
    """Its class, as checkpoints name it."""
    return f"{type(sampler).__module__}:{type(sampler).__qualname__}"
