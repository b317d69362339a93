# SPDX-License-Identifier: Apache-2.0
"""Groups built anew from a saved partition: their columns and tags are the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transfer_queue.control.group_record import LEFT, READY, TRAINED, UNDER_WORK, Group
from transfer_queue.control.group_work import groups_of
from transfer_queue.control.groups import COLUMNS, HEAD, PART, TERMS, Groups
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import RowState
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
        groups.count_rejected(state, reasons[-1] if reasons else "")
        return
    group = Group(index, terms, seq, tags.get("group.version"))
    group.attempts, group.worker_attempts, group.passed = attempts, worker_attempts, bool(passed)
    group.closed, group.reasons = set(closed), reasons
    group.is_complete, group.is_ready = state not in UNDER_WORK, state == READY
    groups.enter(group)
    groups.update(group)
    for task in terms.tasks if state == TRAINED else ():
        groups.drawn(task, [group], None)
