# SPDX-License-Identifier: Apache-2.0
"""What becomes of groups: rows that join them, leases that end, gates, draws, training, acks, and rows that go."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Holding, Until
from transfer_queue.control.consumer import UNLEDGERED, Consumer
from transfer_queue.control.gate import parse_gate
from transfer_queue.control.group_record import (
    CLOSED,
    DRAWN,
    EXPIRED,
    FAILED,
    READY,
    REJECTED,
    STALE,
    TRAINED,
    Group,
)
from transfer_queue.control.groups import Groups
from transfer_queue.control.leases import LEASES, STARVED_AFTER, HeldLease, Trainer
from transfer_queue.control.ledger import Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.ready_groups import ready_groups
from transfer_queue.control.rows import Rows
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import GateStarvedError, InvalidRequestError, LeaseLostError
from transfer_queue.sampler.group_sampler import GroupSampler


def groups_of(partition: Partition) -> Groups:
    """The partition's groups; made at their first use."""
    if partition.groups is None:
        partition.groups = Groups(partition)
    return partition.groups


def settle(state: PlaneState, partition: Partition) -> None:
    """End a change of groups: what it emptied is dealt with, tags are written, and those that wait are woken."""
    groups = groups_of(partition)
    for group in groups.emptied():
        if group.state in (DRAWN, TRAINED):
            finish(state, partition, group)
        else:
            leave(state, partition, group, REJECTED, "all its rows were cleared")
    groups.flush()
    state.freed(partition)
    state.waits.wake_first((LEASES,))


# ---- new groups and members ----


class NewRows(Holding):
    """Heads of groups, or members of an open part, as a put leaves them. If the session ends, they stay."""

    outlives_session = True
    __slots__ = ("_indexes", "_partition", "_role", "_serial", "_state")

    def __init__(self, state: PlaneState, partition: Partition, role: p.Role, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial = state, partition.name, partition.serial
        self._role, self._indexes = role, indexes

    def undo(self) -> bool:
        """Delete them, unless work on a head has begun, or the part was closed or is another lease's by now."""
        partition, role = self._state.find(self._partition, self._serial), self._role
        if partition is None or not groups_of(partition).may_undo(role, self._indexes):
            return False
        partition.num_heads -= len(self._indexes) if isinstance(role, p.Terms) else 0
        delete(self._state, partition, self._indexes.tolist())
        settle(self._state, partition)
        return True


def check_members(state: PlaneState, call: Call, partition: Partition, members: p.Members, count: int) -> Group:
    """The group, if the call's session may add so many rows. Raises as ``Groups.check``."""
    if partition.groups is None:
        raise LeaseLostError(f"partition {partition.name!r} has no groups (any more); nothing was written.")
    lease = state.leases.held.get(members.lease)
    if lease is not None and (lease.worker.client != call.client or lease.group.index != members.head):
        raise LeaseLostError(f"this lease is another one, of client {lease.worker.client!r}; nothing was written.")
    return partition.groups.check(members, count)


def joined(state: PlaneState, call: Call, partition: Partition, members: p.Members, indexes: p.Indexes) -> None:
    """Rows that were just published, if any, belong to a group; the last ones of a part close it."""
    groups, lease = groups_of(partition), state.leases.held.get(members.lease)
    group = groups.live[members.head]
    groups.join(group, members, indexes.tolist())
    if lease is not None and not members.closes:
        state.changed(partition)  # nothing but its rows has
        return
    if lease is None and not members.closes:
        state.leases.revive(call, members.lease)
    if lease is not None and members.closes:
        lease.parts = [part for part in lease.parts if part not in group.closed]
        if not lease.parts:
            state.leases.end(lease)
    _note_holders(state, groups, group)
    judge(state, partition, group)
    settle(state, partition)


# ---- work that ends ----


def give_up(state: PlaneState, lease: HeldLease, reason: str, blame: str | None) -> None:
    """A lease ends for good: nothing can come of it any more."""
    if state.leases.end(lease):
        lease.group.void(lease.token)
        lost(state, lease, reason, blame)


def lost(state: PlaneState, lease: HeldLease, reason: str, blame: str | None) -> None:
    """A lease has ended, and its parts are for others."""
    group, groups = lease.group, groups_of(lease.partition)
    if groups.released(group, reason, blame):
        leave(state, lease.partition, group, FAILED, reason)
    else:
        _note_holders(state, groups, group)
    settle(state, lease.partition)


def _note_holders(state: PlaneState, groups: Groups, group: Group) -> None:
    """Leases of it have changed."""
    if group.is_under_work:
        groups.held(group, bool(state.leases.holders(group)), bool(state.leases.free_parts(group)))


def leave(state: PlaneState, partition: Partition, group: Group, into: str, reason: str) -> None:
    """The group is not trained. Its slot is free, its rows are gone, and those who work on it hear of that."""
    state.leases.dismiss(group)
    gone(state, groups_of(partition).leave(group, into, reason))


def finish(state: PlaneState, partition: Partition, group: Group) -> None:
    """The group is done: it is deleted, with its head. A task that follows another may still hold its members."""
    readers = [own for name, own in partition.consumers.items() if state.tasks.is_follower(name)]
    if readers:
        rows = partition.rows_of(np.array(group.all_members()[:1], dtype=np.int64)).tolist()
        if any(own.ledger.is_open(own.given.item(row)) for own in readers for row in rows):
            return
    state.leases.dismiss(group)
    groups_of(partition).forget(group)
    delete(state, partition, [*group.all_members(), group.index])


def delete(state: PlaneState, partition: Partition, indexes: list[int]) -> None:
    """Delete rows and their values."""
    gone(state, partition.clear(np.array(indexes, dtype=np.int64)))


def gone(state: PlaneState, indexes: p.Indexes) -> None:
    """These rows were cleared: their values are deleted, unless a save is still to read them."""
    if len(indexes):
        state.delete(state.freezes.keep(indexes))


def clearing(state: PlaneState, partition: Partition, indexes: p.Indexes) -> p.Indexes:
    """A client deletes these rows. Returns them with the members of heads among them, whose groups are forgotten."""
    groups = partition.groups
    if groups is None:
        return indexes
    more = []
    for index in indexes.tolist():
        group = groups.live.get(index)
        if group is not None:
            more += group.all_members()
            state.leases.dismiss(group)
            groups.forget(group)
    return np.union1d(indexes, np.array(more, dtype=np.int64)) if more else indexes


def partition_gone(state: PlaneState, partition: Partition) -> None:
    """The partition was cleared."""
    if partition.groups is None:
        return
    if partition.sealed:
        state.leases.partition_ended(partition.name)
    for group in list(partition.groups.live.values()):
        state.leases.dismiss(group)
    state.waits.wake_first((LEASES,))


def rows_gone(state: PlaneState, partition: Partition) -> None:
    """A client has deleted rows: some groups may have none left, or only such as a gate waited for."""
    if partition.groups is not None:
        _judge_all(state, partition)
        settle(state, partition)


def registered(state: PlaneState, task: str) -> None:
    """A task was registered. Raises before anything else changes, if its budget or its gate can't be."""
    sampler = state.leases.sampler(task)
    if sampler is None:
        return
    if sampler.gate is not None:
        parse_gate(sampler.gate)
    state.leases.trainers[task].accepts()  # the gate may be another one
    partitions = [partition for partition in state.partitions.values() if partition.groups is not None]
    for terms in [terms for partition in partitions for terms in groups_of(partition).fresh]:
        if task in terms.tasks:
            state.leases.check_budgets(terms.tasks)
    for partition in partitions:
        _judge_all(state, partition)
        settle(state, partition)


class GroupReader(Holding):
    """A session that reads groups without batch numbers. What it was given and not trained ends with it."""

    until = Until.SESSION
    __slots__ = ("_client", "_state")

    def __init__(self, state: PlaneState, client: str) -> None:
        self._state, self._client = state, client

    def end(self, died: bool) -> bool:
        for partition in list(self._state.partitions.values()):
            for task, reader in [] if partition.groups is None else list(partition.groups.batches):
                if reader == self._client:
                    heard_of_trained(self._state, partition, task, reader, None)
        return False


def reads(state: PlaneState, call: Call) -> None:
    """The call's session was given a batch without a number."""
    if not state.calls.of_session(call.client, GroupReader):
        state.calls.hold(call, GroupReader(state, call.client))


def deadline(state: PlaneState, partition: Partition, group: Group) -> None:
    """The patience with this group is over: it is closed with the parts that it has, or expires."""
    groups = groups_of(partition)
    if state.partitions.get(partition.name) is not partition or groups.live.get(group.index) is not group:
        return
    patience = f"in {group.terms.deadline_s:.4g} s"
    if group.is_under_work and len(group.closed) >= (group.terms.min_parts or group.terms.parts):
        state.leases.abort_all(group)
        gone(state, groups.late(group))
        judge(state, partition, group)
        watch_deadline(state, partition, group)  # now for its gate's tags
    elif group.is_under_work:
        text = f"{len(group.closed)} of {group.terms.parts} parts were closed {patience}"
        leave(state, partition, group, EXPIRED, text)
    elif group.terms.tasks and group.state == CLOSED and not group.passed:
        leave(state, partition, group, EXPIRED, f"its rows did not get the tags of its gate {patience}")
    settle(state, partition)


def watch_deadline(state: PlaneState, partition: Partition, group: Group) -> None:
    """The patience with this group begins now, if it has an end."""
    if group.terms.deadline_s is not None:
        state.calls.at(state.calls.now + group.terms.deadline_s, partial(deadline, state, partition, group))


def restored(state: PlaneState, versions: Mapping[str, int], next_token: int) -> None:
    """The plane has other partitions: what their groups hold slots for, and what was drawn of them, is known again."""
    parts = [(each, each.groups) for each in state.partitions.values() if each.groups is not None]
    state.leases.restored(versions, next_token)
    for partition, groups in parts:
        for group in groups.live.values():
            if group.state != TRAINED:
                state.leases.charge(group)
            if group.is_under_work:
                watch_deadline(state, partition, group)
        for task, consumer in partition.consumers.items():
            if state.leases.sampler(task) is not None:
                _find_drawn(state, partition, consumer)
        settle(state, partition)
    state.waits.wake_first((LEASES,))


def _find_drawn(state: PlaneState, partition: Partition, consumer: Consumer) -> None:
    """Batches that were not acknowledged when the queue was saved. Their groups may be trained, or not."""
    rounds: dict[Hashable, list[tuple[Hashable, int | None, list[Group]]]] = {}
    for entry in consumer.ledger.open_entries():
        own = groups_of(partition).of_rows(partition.rows_of(entry.indexes))
        if drawn := [group for group in own if group.state == DRAWN]:
            same_round = entry.key if entry.dp_size is None else entry.key[1]
            rounds.setdefault(same_round, []).append((*entry.key, drawn))
    for batches in rounds.values():
        _was_given(state, partition, consumer.task, batches)


# ---- gates ----


def retagged(state: PlaneState, partition: Partition, indexes: Iterable[int]) -> None:
    """Tags of these rows have changed: a gate may have waited for them."""
    groups = partition.groups
    if groups is None or not groups.counts[CLOSED]:
        return
    rows, found = partition.table.find(np.fromiter(indexes, dtype=np.int64))
    for group in groups.of_rows(rows[found]):
        judge(state, partition, group)
    settle(state, partition)


def _judge_all(state: PlaneState, partition: Partition) -> None:
    """Gates judge what they have not judged."""
    groups = groups_of(partition)
    # Each clear of samples asks for this, and there may be many live groups.
    closed = [each for each in groups.live.values() if each.state == CLOSED] if groups.counts[CLOSED] else []
    for group in closed:
        judge(state, partition, group)


def judge(state: PlaneState, partition: Partition, group: Group) -> None:
    """A closed group passes the gates of its tasks, or is rejected, once all its rows have the tags that they name."""
    if group.state != CLOSED or group.passed:
        return
    tasks = group.terms.tasks or partition.consumers
    samplers = [(task, sampler) for task in tasks if (sampler := state.leases.sampler(task)) is not None]
    if not samplers and not group.terms.tasks:
        return  # nobody has said yet which task draws it
    gates = [(task, parse_gate(sampler.gate)) for task, sampler in samplers if sampler.gate is not None]
    tags = groups_of(partition).tags_of_members(group) if gates else []
    if any(not gate.tags <= own.keys() for _, gate in gates for own in tags):
        return
    for task, gate in gates:
        try:
            passes, seen, reason = gate.judge(tags), gate.seen(tags), gate.text
        except InvalidRequestError as error:  # a tag is no number: whose call this is can't help that
            passes, seen, reason = False, {}, str(error)
        if not passes:
            texts = [f"{name} was {value:.3g}" for name, value in seen.items()]
            state.leases.trainers[task].rejects(texts or [reason])
            leave(state, partition, group, REJECTED, reason)
            return
    for task, _ in gates:
        state.leases.trainers[task].accepts()
    group.passed = True
    groups_of(partition).changed(group)


def _check_starved(task: str, sampler: GroupSampler, trainer: Trainer) -> None:
    """Raises GateStarvedError if the task's gate rejects everything."""
    if trainer.rejected >= STARVED_AFTER * sampler.groups:
        seen = ", ".join(f"{text} ({count}x)" for text, count in trainer.seen.most_common())
        raise GateStarvedError(
            f"the gate {sampler.gate!r} of task {task!r} has rejected {trainer.rejected} groups in a row: {seen}. "
            f"Loosen the gate, or look at what the workers put."
        )


# ---- draws and training ----


def before_draw(state: PlaneState, partition: Partition, task: str, ready: Callable[[], ReadySet]) -> None:
    """What is too old leaves, and from then on the groups that the task may draw follow what is ready for it."""
    groups, sampler, trainer = groups_of(partition), state.leases.sampler(task), state.leases.trainers[task]
    assert sampler is not None
    _check_starved(task, sampler, trainer)
    if ready().follower is None:  # of a new reader, whose gate may be the first one for groups that name no task
        _judge_all(state, partition)
        ready_groups(ready(), groups, sampler, task)  # only what is ready may be too old for it
    step = state.leases.step_of(task, partition.name)
    if step is not None:
        drop_stale(state, partition, task, step, is_drawing=True)
    groups.flush()
    ready_groups(ready(), groups, sampler, task).step = step


def drew(
    state: PlaneState, partition: Partition, task: str, batches: Iterable[tuple[Hashable, int | None, Rows]]
) -> None:
    """A round of the task: by reader and batch, the rows. ``batch`` None: the reader's next one."""
    groups = groups_of(partition)
    given = [(reader, batch, groups.of_rows(rows)) for reader, batch, rows in batches]
    _was_given(state, partition, task, given)
    groups.flush()
    sampler = state.leases.sampler(task)
    if sampler is not None and sampler.window is not None:
        groups.overtaking[task] = sorted([
            *groups.overtaking.get(task, ()), *(group.seq for _, _, own in given for group in own),
        ])  # fmt: skip


def _was_given(
    state: PlaneState, partition: Partition, task: str, batches: list[tuple[Hashable, int | None, list[Group]]]
) -> None:
    """By reader and batch, the groups that train in the task's next step."""
    groups, step = groups_of(partition), state.leases.step_of(task, partition.name) or 0
    state.leases.trainers[task].has_drawn(step, [group.index for _, _, own in batches for group in own])
    for reader, batch, own in batches:
        groups.keep_batch((task, reader), batch, own)
        for group in own:
            groups.drawn(group, task)


def undrew(state: PlaneState, partition: Partition, task: str, drawn: Iterable[Group]) -> None:
    """The task never got these groups, or begins anew: it may draw them once more."""
    for group in drawn:
        if task in group.drawn_by:
            state.leases.trainers[task].is_over(group.index)
            groups_of(partition).undrawn(group, task)
    settle(state, partition)


def reset(state: PlaneState, partition: Partition, task: str) -> None:
    """The task begins anew with what is here."""
    if partition.groups is not None:
        undrew(state, partition, task, list(partition.groups.live.values()))


def drop_stale(state: PlaneState, partition: Partition, task: str, step: int, is_drawing: bool) -> None:
    """With ``stale="drop"``, what is too old for this step leaves. ``is_drawing``: only what might be drawn for it."""
    sampler = state.leases.sampler(task)
    if sampler is None or sampler.stale != "drop" or sampler.max_staleness is None:
        return
    oldest = step - sampler.max_staleness
    too_old = []
    for group in groups_of(partition).unfinished.values():
        if group.version is not None and group.version >= oldest and not state.leases.went_back:
            break  # later ones are not older
        if group.version is not None and group.version < oldest and group.is_for(task) and task not in group.drawn_by:
            too_old.append(group)
    for group in too_old:
        if group.drawn_by:
            _skip(state, partition, group, task)
        elif group.state == READY or not is_drawing:
            leave(state, partition, group, STALE, f"version {group.version} is too old for step {step}")


def _skip(state: PlaneState, partition: Partition, group: Group, task: str) -> None:
    """One task trains without this group, which others have been given."""
    groups = groups_of(partition)
    groups.drawn(group, task)
    partition.consumer(task).give(partition.rows_of(np.array(group.all_members(), dtype=np.int64)), UNLEDGERED)
    if groups.trained(group, task):
        state.leases.free(group)
    if groups.acked(group, task):
        finish(state, partition, group)


def heard_of_trained(state: PlaneState, partition: Partition, task: str, reader: Hashable, before: int | None) -> None:
    """A reader asks for more, so it has trained its batches before this one; None: all of them."""
    drawn = [] if partition.groups is None else partition.groups.take_trained((task, reader), before)
    if drawn:
        trained(state, partition, task, drawn)


def trained(state: PlaneState, partition: Partition, task: str, drawn: Iterable[Group]) -> None:
    """A task has trained these groups. The slots of those that all their tasks have trained are free."""
    groups, trainer = groups_of(partition), state.leases.trainers[task]
    for group in drawn:
        if groups.live.get(group.index) is group:  # else it has left since, and may wait again
            trainer.is_over(group.index)
            if groups.trained(group, task):
                state.leases.free(group)
    settle(state, partition)


def acked(state: PlaneState, partition: Partition, task: str, entries: Sequence[Entry]) -> None:
    """A task has acknowledged these batches, so it has trained their groups. What all have acknowledged is deleted."""
    groups = partition.groups
    follows = state.tasks.is_follower(task)
    if groups is None or not entries or (state.leases.sampler(task) is None and not follows):
        return
    rows, found = partition.table.find(np.concatenate([entry.indexes for entry in entries]))
    own = groups.of_rows(rows[found])
    trained(state, partition, task, [] if follows else own)
    for group in own:
        if groups.live.get(group.index) is group and groups.acked(group, task):
            finish(state, partition, group)
    settle(state, partition)
