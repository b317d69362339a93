# SPDX-License-Identifier: Apache-2.0
"""Tasks that follow another one: each batch that it is given is theirs, too, until they acknowledge it themselves."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from transfer_queue.control.consumer import UNLEDGERED
from transfer_queue.control.ledger import BatchKey, Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import RowState
from transfer_queue.control.state import PlaneState


def begin(state: PlaneState, task: str, leader: str) -> None:
    """The task follows from now on: it gets the leader's open batches. Again, it changes nothing where it does."""
    for partition in state.partitions.values():
        if leader in partition.consumers:
            _joined(partition, task, leader)


def wrote(state: PlaneState, partition: Partition, leader: str, keys: list[BatchKey]) -> None:
    """The leader was given these batches."""
    for task in state.tasks.followers(leader) if keys else ():
        if not _joined(partition, task, leader):
            _copy(partition, task, [partition.consumers[leader].ledger.get(key) for key in keys])


def gave_back(state: PlaneState, partition: Partition, leader: str, key: BatchKey) -> None:
    """The leader never received this batch, and will draw another one in its place."""
    for task in state.tasks.followers(leader):
        own = partition.consumers.get(task)
        entry = None if own is None else own.ledger.get(key)
        if own is not None and entry is not None:
            own.ledger.close(entry)
            rows, found = partition.table.find(entry.consumes)
            own.release(rows[found], entry.number)


def _joined(partition: Partition, task: str, leader: str) -> bool:
    """Whether the task has followed here only since now. What the leader is done with counts as consumed."""
    if task in partition.consumers:
        return False
    own, given = partition.consumer(task), partition.consumers[leader]
    _copy(partition, task, given.ledger.open_entries())
    is_live = partition.table.column("state") == RowState.LIVE
    own.give((is_live & (given.given != 0) & (own.given == 0)).nonzero()[0], UNLEDGERED)
    return True


def _copy(partition: Partition, task: str, entries: Iterable[Entry | None]) -> None:
    own = partition.consumers[task]
    for entry in entries:
        if entry is None or not partition.table.find(entry.indexes)[1].any():  # all its groups have left
            continue
        before = own.ledger.get(entry.key)
        if before is not None:  # the leader's consumption was reset, so it was given something else under this number
            own.ledger.close(before)
        copy = own.ledger.write(entry.key, entry.indexes, entry.consumes, entry.padding, entry.dp_size)
        copy.batch_size, copy.cut = entry.batch_size, entry.cut
        rows, found = partition.table.find(entry.consumes)
        copy.owned = int(np.count_nonzero(own.give(rows[found], copy.number)))
