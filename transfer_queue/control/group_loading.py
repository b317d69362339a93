# SPDX-License-Identifier: Apache-2.0
"""Groups built anew from a saved partition: their columns and tags are the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transfer_queue.control.group_record import CLOSED, DRAWN, LEFT, READY, RUNNING, TRAINED, WAITING, Group
from transfer_queue.control.groups import COLUMNS, HEAD, PART, TERMS, Groups
from transfer_queue.control.rows import RowState
from transfer_queue.protocol import Terms


def load(groups: Groups, columns: Mapping[str, bytes], terms: Sequence[Terms], start: int, shift: int) -> None:
    """Build the groups of the rows from ``start`` on, whose states and tags are loaded. No lease is held.

    Args:
        shift: How much greater the samples' indexes are than when they were saved.
    Raises:
        ValueError: these contradict each other.
    """
    table, groups.terms = groups.partition.table, list(terms)
    for name, dtype in COLUMNS:
        table.column(name)[start:] = np.frombuffer(columns[name], dtype)
    heads, parts = table.column(HEAD)[start:], table.column(PART)[start:]
    heads[heads > 0] += shift
    numbers, state = table.column(TERMS)[start:], table.column("state")[start:]
    if not ((numbers != 0) == (state == RowState.HEAD)).all() or (np.abs(numbers) > len(groups.terms)).any():
        raise ValueError("heads of groups have terms, and other rows have none")
    for number, each in enumerate(groups.terms, 1):
        groups.fresh(each).add((numbers == number).nonzero()[0] + start)
    index = table.column("index")[start:]
    for row in (numbers < 0).nonzero()[0].tolist():
        _load(groups, index.item(row), groups.terms[-numbers.item(row) - 1])
    for row in heads.nonzero()[0].tolist():
        group, part = groups.live.get(heads.item(row) - 1), parts.item(row)
        if group is None or not part:
            raise ValueError("a member belongs to no group")
        group.members.setdefault(abs(part) - 1, []).append(index.item(row))
        group.num_members += 1


def _load(groups: Groups, index: int, terms: Terms) -> None:
    tags = groups.partition.tags[index]
    seq, attempts, worker_attempts, passed, *closed = tags["group.record"]
    state = tags["group.state"]
    if state in LEFT:
        groups.counts[state] += 1
        groups.count_rejected(state, (tags.get("group.reason") or [""])[-1])
        return
    group = Group(index, terms, seq, tags.get("group.version"))
    group.attempts, group.worker_attempts, group.passed = attempts, worker_attempts, bool(passed)
    group.closed = set(closed)
    group.reasons = list(tags.get("group.reason", ()))
    group.state = WAITING if state == RUNNING else CLOSED if state == READY else state
    groups.enter(group)


def finish(groups: Groups) -> None:
    """All rows are in, and what each task was given."""
    for group in groups.live.values():
        for task in group.terms.tasks if group.state in (DRAWN, TRAINED) else ():
            _find_reader(groups, group, task)
    groups.order()
    groups.flush()


def _find_reader(groups: Groups, group: Group, task: str) -> None:
    consumer = groups.partition.consumers.get(task)
    rows = groups.partition.rows_of(np.array(group.all_members()[:1], dtype=np.int64))
    number = 0 if consumer is None else consumer.given.item(int(rows[0]))
    if consumer is None or not number:
        return
    groups.drawn(group, task)
    is_over = not consumer.ledger.is_open(number)
    if is_over or group.state == TRAINED:
        group.trained_by |= {task}
    if is_over:
        group.acked_by |= {task}
