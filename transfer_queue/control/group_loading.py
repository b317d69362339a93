# SPDX-License-Identifier: Apache-2.0
"""Groups built anew from a saved partition, whose columns and tags are the record; and what tasks had drawn of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from transfer_queue.control import group_work
from transfer_queue.control.consumer import Consumer
from transfer_queue.control.group_record import LEFT, READY, TRAINED, UNDER_WORK, Group
from transfer_queue.control.group_work import groups_of
from transfer_queue.control.groups import COLUMNS, HEAD, PART, TERMS, Groups
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import RowState
from transfer_queue.control.state import PlaneState
from transfer_queue.protocol import Tags, Terms


def load(partition: Partition, columns: Mapping[str, bytes], terms: Sequence[Terms], start: int, shift: int) -> None:
    """Build the groups of the rows from ``start`` on, whose states and tags are loaded. No lease is held.

    Args:
        shift: How much greater the samples' indexes are than when they were saved.
    Raises:
        ValueError: these contradict each other.
    """
    table, groups = partition.table, groups_of(partition)
    groups.fresh = {each: ReadySet() for each in terms}
    for name, dtype in COLUMNS:
        table.column(name)[start:] = np.frombuffer(columns[name], dtype)
    index, numbers, state, heads, parts = (table.column(name)[start:] for name in ("index", TERMS, "state", HEAD, PART))
    heads[heads > 0] += shift
    np.abs(parts, out=parts)  # older queues saved those of closed parts as negative ones
    if not ((numbers != 0) == (state == RowState.HEAD)).all() or (np.abs(numbers) > len(terms)).any():
        raise ValueError("heads of groups have terms, and other rows have none")
    begun = (numbers < 0).nonzero()[0]
    tags = partition.tags.of(index[begun], start + begun)
    for row in begun.tolist():
        _load(groups, index.item(row), terms[-numbers.item(row) - 1], tags[index.item(row)])
    for row in heads.nonzero()[0].tolist():
        group, part = groups.live.get(heads.item(row) - 1), parts.item(row)
        if group is None or not part:
            raise ValueError("a member belongs to no group")
        group.members.setdefault(part - 1, []).append(index.item(row))
        group.num_members += 1


def _load(groups: Groups, index: int, terms: Terms, tags: Tags) -> None:
    seq, attempts, worker_attempts, passed, *closed = tags["group.record"]
    state, reasons = tags["group.state"], list(tags.get("group.reason", ()))
    if state in LEFT:
        groups.counts[state] += 1
        groups.count_left(state, reasons[-1] if reasons else "")
        return
    group = Group(index, terms, seq, tags.get("group.version"))
    group.attempts, group.worker_attempts, group.passed = attempts, worker_attempts, bool(passed)
    group.closed, group.reasons = set(closed), reasons
    group.is_complete, group.is_ready = state not in UNDER_WORK, state == READY
    groups.enter(group)
    groups.update(group)
    for task in terms.tasks if state == TRAINED else ():
        groups.drawn(task, [group], None)


def restored(state: PlaneState, versions: Mapping[str, int], next_token: int) -> None:
    """The plane has other partitions: what their groups hold slots for, and what was drawn of them, is known again."""
    state.leases.restored(versions, next_token + state.config.gap)
    for partition in [each for each in state.partitions.values() if each.groups is not None]:
        groups = groups_of(partition)
        groups.rebuild()
        groups.has_ended = partition.is_final
        groups.order()
        for consumer in partition.consumers.values():
            _find_drawn(state, partition, groups, consumer)
        for group in groups.live.values():
            for task in groups.left_by.intersection(group.terms.tasks).difference(group.drawn):
                groups.acked(task, [group])
        for group in groups.live.values():
            if group.state != TRAINED:
                state.leases.charge(group)
            if group.is_under_work or not group.passed:
                group_work.watch_deadline(state, partition, group)
        known = [group.version for group in groups.unfinished.values() if group.version is not None]
        state.leases.went_back |= known != sorted(known)
        group_work.settle(state, partition)


def _find_drawn(state: PlaneState, partition: Partition, groups: Groups, consumer: Consumer) -> None:
    """What a task was given before the queue was saved. What it has not acknowledged, it may have trained."""
    task, ledger = consumer.task, consumer.ledger
    given, over = set[Group](), list[Group]()
    draws_any = state.leases.sampler(task) is not None
    for group in groups.live.values():
        is_for = task in group.terms.tasks or (draws_any and group.is_for(task))
        number = group_work.number_given(partition, consumer, group) if is_for and group.is_complete else 0
        if number and not ledger.is_open(number):
            over.append(group)
        elif number and task not in group.drawn:
            given.add(group)
    groups.acked(task, over)
    rounds: dict[Hashable, list[tuple[Hashable, int | None, list[Group]]]] = {}
    for entry in ledger.open_entries() if given else ():
        own = [group for group in groups.of(entry.indexes) if group in given]
        if own:
            rounds.setdefault(entry.key if entry.dp_size is None else entry.key[1], []).append((*entry.key, own))
    for batches in rounds.values():
        group_work.was_given(state, partition, task, batches)
