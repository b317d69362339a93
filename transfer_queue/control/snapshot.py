# SPDX-License-Identifier: Apache-2.0
"""The state of a control plane at one moment, cut into slices: what a checkpoint holds besides the values.

A freeze only marks the partitions. They are read where they lie, slice by slice, while the queue goes on. One that is
about to change before it was read hands its columns of numbers to the freeze first. Its keys and tags are not copied:
those that change or are deleted after that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.calls import PIECE
from transfer_queue.control.consumer import Consumer
from transfer_queue.control.draw import Task, foreign
from transfer_queue.control.groups import COLUMNS
from transfer_queue.control.ledger import save_entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import PUBLISHED, PendingCopies, RowState, one_of
from transfer_queue.control.saved import FORMAT, SavedConsumer, SavedPartition, SavedQueue, SavedSampler, SavedTask
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import Indexes, pack_indexes
from transfer_queue.sampler.base import BaseSampler

ROWS, BATCHES = PIECE, PIECE // 3
"""Rows, and batches of each ledger, of one slice. Batches take longer."""
_PARTITION, _TASK = PIECE // 20, PIECE // 80
"""A partition, and each task in it, costs as much as so many rows."""
_PREALLOCATED = one_of(RowState.FREE, RowState.RESERVED_FREE)
"""They are only counted: a restore makes others, because writers may have got their indexes since the save."""
_encoder = msgspec.msgpack.Encoder()


class Snapshot:
    """Everything that decides about later requests, except what sessions wait for, reserved, or produce.

    ``next_index``: samples with a lower index may be in it.
    """

    def __init__(self, state: PlaneState, now: float, task: str | None = None) -> None:
        """``task``: only the samples of its open batches; None: everything, except tasks that follow another.

        Raises:
            CheckpointError: what a sampler remembers is no plain data.
        """
        self._head = SavedQueue(
            FORMAT, state.allocator.next_index, state.incarnations, [],
            [_save_task(each, state.tasks.default) for each in state.tasks.by_name.values()
             if task is None and each.follows is None],
            save_sampler(state.tasks.default) if task is None else SavedSampler("", {}),
            dict(state.leases.versions), state.leases.next_token,
        )  # fmt: skip
        _check(self._head)
        self._state, self._now, self._task = state, now, task
        self._followers = frozenset(filter(state.tasks.is_follower, state.tasks.by_name))
        self._partitions = {
            id(partition.table.copies): partition
            for partition in state.partitions.values()
            if task is None or (task in partition.consumers and len(partition.consumers[task].ledger))
        }
        self._frozen: dict[int, FrozenPartition] = {}
        for partition in self._partitions.values():
            if partition.groups is not None:
                partition.tags.catch_up()  # before a change of tags is one of what is saved
            partition.table.copies.append(self._copy)
        self._slices = planned(map(self._freeze, list(self._partitions)))
        self._next = next(self._slices, None)
        self.next_index = state.allocator.next_index
        self._number, self._sent = -1, b""
        state.snapshots.add(self)

    def _freeze(self, number: int) -> FrozenPartition:
        """One that is about to change, or whose turn it is. All at once would take long."""
        if number not in self._frozen:
            partition = self._partitions[number]
            self._frozen[number] = FrozenPartition(partition, self._now, *self._chosen(partition))
        return self._frozen[number]

    def _copy(self, copies: PendingCopies) -> None:
        self._freeze(id(copies)).copy()

    def _chosen(self, partition: Partition) -> tuple[list[str], Indexes | None]:
        """What is saved of a partition: its tasks, and which samples (None: all)."""
        if self._task is None:
            return [name for name in partition.consumers if name not in self._followers], None
        samples = partition.consumers[self._task].ledger.open_indexes()
        rows, found = partition.table.find(samples)
        heads = [] if partition.groups is None else [partition.groups.heads_of(rows[found])]
        return [self._task], np.concatenate([samples, *heads])

    def read(self, number: int) -> tuple[bytes, int]:
        """The next slice, or the last one again; and how many there are, of which one may be still to be made.

        The first one is number 0. After the final one, nothing is kept for further ones.

        Raises:
            CheckpointError: it is another one.
        """
        if number == self._number + 1 and self._next is not None:
            partitions = [partition.save(section) for partition, section in self._next]
            self._number, self._sent = number, _encoder.encode(slice_of(self._head, partitions, number))
            for partition, section in self._next:
                if partition.ends_with(section):
                    self._release(partition.number)
            self._next = next(self._slices, None)
            if self._next is None:
                self.close()
        elif number != self._number:
            raise CheckpointError(f"part {number} of a frozen state comes after part {self._number}. Save again.")
        return self._sent, self._number + 1 + (self._next is not None)

    def _release(self, number: int) -> None:
        """Let a partition change without a copy. Each when it is read, because all at once would take long."""
        copies = self._partitions.pop(number).table.copies
        if self._copy in copies:
            copies.remove(self._copy)
        if number in self._frozen:
            self._frozen.pop(number).end()

    def close(self) -> None:
        """Release everything; no further slice is needed. Idempotent."""
        for number in list(self._partitions):
            self._release(number)
        self._next = None
        self._state.snapshots.discard(self)
        self._state.tidy()


def slice_of(head: SavedQueue, partitions: list[SavedPartition], number: int) -> SavedQueue:
    """A slice; only the first one has tasks and samplers."""
    if number:
        return SavedQueue(FORMAT, head.next_index, head.incarnations, partitions, [], SavedSampler("", {}))
    return msgspec.structs.replace(head, format=FORMAT, partitions=partitions)


Section = tuple["FrozenPartition", int]
"""A partition, and which of its sections."""


def planned(partitions: Iterable[FrozenPartition]) -> Iterator[list[Section]]:
    """The sections of each slice. There is at least one slice, and a partition is looked at when it is its turn."""
    group: list[Section] = []
    room = ROWS
    for partition in partitions:
        count = partition.num_sections()
        cost = partition.cost + (ROWS if count > 1 else partition.table.size)
        for number in range(count):
            if group and cost > room:
                yield group
                group, room = [], ROWS
            group.append((partition, number))
            room -= cost
    yield group


class FrozenPartition:
    """One partition as it was at the freeze. It is read where it lies until it changes."""

    def __init__(
        self, partition: Partition, now: float, tasks: Iterable[str] | None = None, wanted: Indexes | None = None
    ) -> None:
        """``tasks``, ``wanted``: those of its tasks and samples that are saved; None: all."""
        self._partition, self._now, self._wanted = partition, now, wanted
        self.number = id(partition.table.copies)
        self._tasks = partition.consumers.keys() if tasks is None else tasks
        self.table, self._schema = partition.table, partition.schema
        self._gone: dict[int, str] = {}
        self._changed: dict[int, bytes | None] = {}
        self._head: SavedPartition | None = None
        self._consumers: list[_FrozenConsumer] = []
        self._num_sections = 0

    @property
    def cost(self) -> int:
        """That of one section without its rows."""
        return _PARTITION + _TASK * len(self._consumers)

    def num_sections(self) -> int:
        """Into how many it is cut. It has one at least. What is not in columns is kept when this is asked first."""
        if self._num_sections:
            return self._num_sections
        partition, last, state = self._partition, self._partition.last_published, self.table.column("state")
        self._consumers = [_FrozenConsumer(partition.consumers[name]) for name in self._tasks]
        missing = 0 if partition.sealed else int(np.count_nonzero(_PREALLOCATED[state]))
        self._head = SavedPartition(
            partition.name, partition.incarnation, partition.sealed, partition.num_samples, partition.num_published,
            partition.num_puts, partition.preallocate, b"", b"", b"", b"", b"", [], [],
            published_ago_s=None if last is None else self._now - last, missing_free=partition.missing_free + missing,
            terms=[] if partition.groups is None else list(partition.groups.fresh),
            num_heads=partition.num_heads,
            left_by=[] if partition.groups is None else sorted(partition.groups.left_by),
            lost={name: pack_indexes(indexes) for name, indexes in partition.lost().items()},
        )  # fmt: skip
        cuts = (-(-len(each.entries) // BATCHES) for each in self._consumers)
        self._num_sections = max(1, -(-self.table.size // ROWS), *cuts)
        return self._num_sections

    def copy(self) -> None:
        """The partition is about to change."""
        self.num_sections()
        self.table = self.table.frozen()
        self._schema = self._schema.frozen(self.table)
        self._partition.keys.watches[self], self._partition.tags.watches[self] = self._gone, self._changed

    def save(self, number: int) -> SavedPartition:
        """One section."""
        table, start, head = self.table, number * ROWS, self._head
        assert head is not None, "a partition is planned before it is saved"
        rows = PUBLISHED[table.column("state")[start : start + ROWS]].nonzero()[0] + start
        if self._wanted is not None:
            rows = rows[np.isin(table.column("index")[rows], self._wanted)]
        index = table.column("index")[rows]
        offset, size, put = (
            table.column(name)[rows].astype("<i4").tobytes() for name in ("put_offset", "put_size", "put_number")
        )
        keys, named = self._partition.keys.names_of(index, self._gone)
        tagged, tags = self._partition.tags.save(index, self._changed)
        return msgspec.structs.replace(
            head, index=pack_indexes(index), state=table.column("state")[rows].tobytes(),
            put_offset=offset, put_size=size, put_number=put, fields=self._schema.save(rows),
            consumers=[each.save(number, table.column(each.given)[rows], table.column(each.consumed)[rows])
                       for each in self._consumers],
            groups={name: table.column(name)[rows].astype(dtype).tobytes() for name, dtype in COLUMNS
                    if table.has_column(name)},
            keys=keys, key_indexes=pack_indexes(named), tagged=pack_indexes(tagged), tags=tags,
            missing_free=0 if number else head.missing_free, lost={} if number else head.lost,
        )  # fmt: skip

    def ends_with(self, number: int) -> bool:
        """Whether this section is the last one."""
        return number + 1 == self._num_sections

    def end(self) -> None:
        """Nothing more is read of it."""
        self._partition.keys.watches.pop(self, None)
        self._partition.tags.watches.pop(self, None)


class _FrozenConsumer:
    """One task's view of a partition at the freeze. ``given``, ``consumed``: names of its columns."""

    def __init__(self, consumer: Consumer) -> None:
        self._head = consumer.save()
        self.given, self.consumed = consumer.columns
        # With what may change about each.
        self.entries = [(each, each.token, each.owned) for each in consumer.ledger.open_entries()]

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
