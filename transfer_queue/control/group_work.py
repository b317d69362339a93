# SPDX-License-Identifier: Apache-2.0
"""What becomes of groups: rows that join them, leases that end, gates, draws, training, acks, and rows that go."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Holding, Until
from transfer_queue.control.consumer import UNLEDGERED, Consumer
from transfer_queue.control.gate import parse_gate
from transfer_queue.control.group_record import CLOSED, DRAWN, EXPIRED, READY, REJECTED, STALE, TRAINED, Group
from transfer_queue.control.groups import Groups
from transfer_queue.control.leases import LEASES, STARVED_AFTER, HeldLease
from transfer_queue.control.ledger import Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import Rows
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import GateStarvedError, InvalidRequestError, LeaseLostError


class PartitionWork:
    """See ``Work``."""

    def __init__(self, state: PlaneState, partition: Partition) -> None:
        self._state, self._partition = state, partition
        self._readers: dict[str, Consumer] = {}

    @property
    def _groups(self) -> Groups:
        assert self._partition.groups is not None
        return self._partition.groups

    def step_of(self, task: str) -> int | None:
        return self._state.leases.step_of(task, self._partition.name)

    def overtook(self, task: str, seq: int) -> list[int]:
        drawn = self._state.leases.trainer(task).drawn
        own = drawn[self._partition.serial] = [at for at in drawn.get(self._partition.serial, ()) if at > seq]
        return own

    def before_draw(self, task: str) -> None:
        state, groups = self._state, self._groups
        check_starved(state, task)
        reader = self._partition.consumer(task)
        if self._readers.get(task) is not reader:  # its gate may be the first one for groups that name no task
            self._readers[task] = reader
            _judge_all(state, self._partition)
        step = self.step_of(task)
        if step is not None:
            drop_stale(state, self._partition, task, step, is_drawing=True)
        groups.flush()

    def drew(self, task: str, batches: Sequence[tuple[Hashable, int | None, list[Group]]]) -> None:
        groups, trainer = self._groups, self._state.leases.trainer(task)
        step = self.step_of(task) or 0
        for reader, batch, own in batches:
            trainer.has_drawn(step, (self._partition.serial, reader), batch, [(groups, group) for group in own])
            for group in own:
                groups.drawn(group, task)
        groups.flush()
        sampler = self._state.leases.sampler(task)
        if sampler is not None and sampler.window is not None:
            places = trainer.drawn.setdefault(self._partition.serial, [])
            places.extend(group.seq for _, _, own in batches for group in own)
            places.sort()

    def gave_back(self, task: str, heads: list[int]) -> None:
        groups, trainer = self._groups, self._state.leases.trainer(task)
        for head in heads:
            group = groups.live.get(head)
            trainer.gives_back(head)
            if group is not None:
                trainer.undrawn(self._partition.serial, group.seq)
                groups.undrawn(group, task)
        groups.flush()


def groups_of(state: PlaneState, partition: Partition) -> Groups:
    """The partition's groups; made at their first use."""
    if partition.groups is None:
        partition.groups = Groups(partition, PartitionWork(state, partition))
    return partition.groups


def settle(state: PlaneState, partition: Partition) -> None:
    """End a change of groups: what it emptied is dealt with, tags are written, and those that wait are woken."""
    groups = partition.groups
    assert groups is not None
    emptied, groups.emptied = list(groups.emptied.values()), {}
    for group in emptied:
        if group.state in (DRAWN, TRAINED):
            finish(state, partition, group)
        elif group.state in (CLOSED, READY):
            leave(state, partition, group, REJECTED, "all its rows were cleared")
    groups.flush()
    state.freed(partition)
    state.waits.wake_first((LEASES,))


# ---- new groups and members ----


class NewGroups(Holding):
    """Heads of groups, as ``add_groups`` leaves them. If the session ends, they stay."""

    outlives_session = True
    __slots__ = ("_indexes", "_partition", "_serial", "_state")

    def __init__(self, state: PlaneState, partition: Partition, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial, self._indexes = state, partition.name, partition.serial, indexes

    def undo(self) -> bool:
        """Delete them, unless work on one has begun."""
        partition = self._state.find(self._partition, self._serial)
        if partition is None or partition.groups is None or not partition.groups.are_fresh(self._indexes):
            return False
        partition.num_heads -= len(self._indexes)
        delete(self._state, partition, self._indexes.tolist())
        settle(self._state, partition)
        return True


class NewMembers(Holding):
    """Rows of a part that is still open. If the session ends, they stay as its lease says."""

    outlives_session = True
    __slots__ = ("_indexes", "_members", "_partition", "_serial", "_state")

    def __init__(self, state: PlaneState, partition: Partition, members: p.Members, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial = state, partition.name, partition.serial
        self._members, self._indexes = members, indexes

    def undo(self) -> bool:
        """Delete them, unless the part was closed, or is another lease's by now."""
        partition = self._state.find(self._partition, self._serial)
        if partition is None or partition.groups is None:
            return False
        try:
            partition.groups.check(self._members, 0)
        except (LeaseLostError, ValueError):
            return False
        delete(self._state, partition, self._indexes.tolist())
        settle(self._state, partition)
        return True


def holding_of(state: PlaneState, partition: Partition, role: p.Role, indexes: p.Indexes) -> Holding | None:
    """What a put holds whose samples have this role. None: it can't be undone, because it has closed a part."""
    if isinstance(role, p.Terms):
        return NewGroups(state, partition, indexes)
    return None if role.closes else NewMembers(state, partition, role, indexes)


def added(state: PlaneState, partition: Partition, rows: Rows, terms: p.Terms) -> None:
    """These heads were just published."""
    groups_of(state, partition).add(rows, terms)
    settle(state, partition)


def check_members(state: PlaneState, call: Call, partition: Partition, members: p.Members, count: int) -> Group:
    """The group, if the call's session may add so many rows. Raises as ``Groups.check``."""
    if partition.groups is None:
        raise LeaseLostError(f"partition {partition.name!r} has no groups (any more); nothing was written.")
    lease = state.leases.get(members.lease)
    if lease is not None and (lease.client != call.client or lease.group.index != members.head):
        raise LeaseLostError(f"this lease is another one, of client {lease.client!r}; nothing was written.")
    return partition.groups.check(members, count)


def joined(state: PlaneState, call: Call, partition: Partition, members: p.Members, indexes: p.Indexes) -> None:
    """Rows that were just published, if any, belong to a group; the last ones of a part close it."""
    groups = partition.groups
    assert groups is not None
    group = groups.live[members.head]
    lease = state.leases.get(members.lease)
    groups.join(group, members, indexes.tolist())
    if lease is not None and not members.closes:
        state.changed(partition)  # nothing but its rows has
        return
    if lease is None and not members.closes:
        state.leases.revive(call, members.lease, groups, group)
    if lease is not None and members.closes:
        lease.parts = [part for part in lease.parts if part not in group.closed]
        if not lease.parts:
            state.leases.end(lease)
    _note_holders(state, groups, group)
    judge(state, partition, group)
    settle(state, partition)


# ---- work that ends ----


def lost(state: PlaneState, lease: HeldLease, reason: str, blame: str | None) -> None:
    """A lease has ended, and its parts are for others."""
    group, groups = lease.group, lease.groups
    partition = state.find(groups.partition.name, groups.partition.serial)
    if partition is None or groups.live.get(group.index) is not group:
        return
    failed = groups.released(group, reason, blame)
    if failed is not None:
        leave(state, partition, group, failed, reason)
    else:
        _note_holders(state, groups, group)
    settle(state, partition)


def _note_holders(state: PlaneState, groups: Groups, group: Group) -> None:
    """Leases of it have changed."""
    if not group.is_under_work:
        return
    groups.note_free_parts(group, bool(state.leases.free_parts(group)))
    groups.rest(group, bool(state.leases.holders(group)))


def leave(state: PlaneState, partition: Partition, group: Group, into: str, reason: str) -> None:
    """The group is not trained. Its slot is free, its rows are gone, and those who work on it hear of that."""
    groups = partition.groups
    assert groups is not None
    state.leases.dismiss(group)
    gone(state, groups.leave(group, into, reason))


def finish(state: PlaneState, partition: Partition, group: Group) -> None:
    """The group is done: it is deleted, with its head. A task that follows another may still hold its members."""
    assert partition.groups is not None
    readers = [own for name, own in partition.consumers.items() if state.tasks.is_follower(name)]
    if readers:
        rows = partition.rows_of(np.array(group.all_members()[:1], dtype=np.int64)).tolist()
        if any(own.ledger.is_open(own.given.item(row)) for own in readers for row in rows):
            return
    state.leases.dismiss(group)
    indexes = [*group.all_members(), group.index]
    partition.groups.forget(group)
    delete(state, partition, indexes)


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
    groups = partition.groups
    if groups is None:
        return
    if partition.sealed:
        state.leases.partition_ended(partition.name)
    for _, trainer in state.leases.trainers():
        trainer.partition_gone(partition.serial)
    for group in list(groups.live.values()):
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
    state.leases.trainer(task).accepts()  # the gate may be another one
    partitions = [partition for partition in state.partitions.values() if partition.groups is not None]
    for partition in partitions:
        for terms in partition.groups.terms:  # type: ignore[union-attr]
            if task in terms.tasks:
                state.leases.check_budgets(terms.tasks)
    for partition in partitions:
        _judge_all(state, partition)
        settle(state, partition)


def reset(state: PlaneState, partition: Partition, task: str) -> None:
    """The task begins anew with what is here: it may draw all groups once more."""
    groups = partition.groups
    if groups is None:
        return
    trainer = state.leases.trainer(task)
    for group in list(groups.live.values()):
        if task in group.drawn_by:
            trainer.gives_back(group.index)
            groups.undrawn(group, task)
    settle(state, partition)


class GroupReader(Holding):
    """A session that reads groups without batch numbers. What it was given and not trained ends with it."""

    until = Until.SESSION
    __slots__ = ("_client", "_state")

    def __init__(self, state: PlaneState, client: str) -> None:
        self._state, self._client = state, client

    def end(self, died: bool) -> bool:
        for task, trainer in self._state.leases.trainers():
            for reader in [each for each in trainer.batches if each[1] == self._client]:
                trained(self._state, task, trainer.take_trained(reader, None))
        return False


def reads(state: PlaneState, call: Call) -> None:
    """The call's session was given a batch without a number."""
    if not state.calls.of_session(call.client, GroupReader):
        state.calls.hold(call, GroupReader(state, call.client))


def deadline(state: PlaneState, groups: Groups, group: Group) -> None:
    """The patience with this group is over: it is closed with the parts that it has, or expires."""
    partition = state.find(groups.partition.name, groups.partition.serial)
    if partition is None or groups.live.get(group.index) is not group:
        return
    patience = f"in {group.terms.deadline_s:.4g} s"
    lacks_tags = bool(group.terms.tasks) and group.index in groups.unjudged
    if group.is_under_work and len(group.closed) >= (group.terms.min_parts or group.terms.parts):
        state.leases.abort_all(group)
        gone(state, groups.late(group))
        judge(state, partition, group)
        watch_deadline(state, groups, group)  # now for its gate's tags
    elif group.is_under_work:
        text = f"{len(group.closed)} of {group.terms.parts} parts were closed {patience}"
        leave(state, partition, group, EXPIRED, text)
    elif lacks_tags:
        leave(state, partition, group, EXPIRED, f"its rows did not get the tags of its gate {patience}")
    settle(state, partition)


def watch_deadline(state: PlaneState, groups: Groups, group: Group) -> None:
    """The patience with this group begins now, if it has an end."""
    if group.terms.deadline_s is not None:
        at = state.calls.now + group.terms.deadline_s
        state.calls.at(at, partial(deadline, state, groups, group))


def restored(state: PlaneState, versions: Mapping[str, int], next_token: int) -> None:
    """The plane has other partitions: what their groups hold slots for, and what was drawn of them, is known again."""
    parts = [(each, each.groups) for each in state.partitions.values() if each.groups is not None]
    seqs = [group.seq for _, groups in parts for group in groups.live.values()]
    state.leases.restored(versions, next_token, max(seqs, default=0))
    for partition, groups in parts:
        for group in groups.live.values():
            if group.state != TRAINED:
                state.leases.charge(group)
            if group.is_under_work:
                watch_deadline(state, groups, group)
        for task, consumer in partition.consumers.items():
            if state.leases.sampler(task) is not None:
                for entry in consumer.ledger.open_entries():
                    _drawn_before(state, partition, groups, task, entry)
        settle(state, partition)
    state.waits.wake_first((LEASES,))


def _drawn_before(state: PlaneState, partition: Partition, groups: Groups, task: str, entry: Entry) -> None:
    """A batch that was not acknowledged when the queue was saved. Its groups may be trained, or not."""
    own = groups.of_rows(partition.rows_of(entry.indexes))
    drawn = [(groups, group) for group in own if group.state == DRAWN]
    if drawn:
        trainer, (rank, batch) = state.leases.trainer(task), entry.key
        step = state.leases.step_of(task, partition.name) or 0
        trainer.has_drawn(step, (partition.serial, rank), batch, drawn)


# ---- gates ----


def retagged(state: PlaneState, partition: Partition, indexes: Iterable[int]) -> None:
    """Tags of these rows have changed: a gate may have waited for them."""
    groups = partition.groups
    if groups is None or not groups.unjudged:
        return
    rows, found = partition.table.find(np.fromiter(indexes, dtype=np.int64))
    for head in set(groups.heads_of(rows[found]).tolist()) & groups.unjudged.keys():
        judge(state, partition, groups.unjudged[head])
    settle(state, partition)


def _judge_all(state: PlaneState, partition: Partition) -> None:
    """Gates judge what they have not judged."""
    assert partition.groups is not None
    for group in list(partition.groups.unjudged.values()):
        judge(state, partition, group)


def judge(state: PlaneState, partition: Partition, group: Group) -> None:
    """A closed group passes the gates of its tasks, or is rejected, once all its rows have the tags that they name."""
    groups = partition.groups
    assert groups is not None
    if group.state != CLOSED or group.passed:
        return
    tasks = group.terms.tasks or [task for task in partition.consumers if state.leases.sampler(task) is not None]
    samplers = [(task, sampler) for task in tasks if (sampler := state.leases.sampler(task)) is not None]
    if not samplers and not group.terms.tasks:
        return  # nobody has said yet which task draws it
    gates = [(task, parse_gate(sampler.gate)) for task, sampler in samplers if sampler.gate is not None]
    tags = groups.tags_of_members(group) if gates else []
    if any(not gate.tags <= own.keys() for _, gate in gates for own in tags):
        return
    for task, gate in gates:
        try:
            passes, seen, reason = gate.judge(tags), gate.seen(tags), gate.text
        except InvalidRequestError as error:  # a tag is no number: whose call this is can't help that
            passes, seen, reason = False, {}, str(error)
        if not passes:
            state.leases.trainer(task).rejects(seen, reason)
            leave(state, partition, group, REJECTED, reason)
            return
    for task, _ in gates:
        state.leases.trainer(task).accepts()
    groups.passes(group)


def check_starved(state: PlaneState, task: str) -> None:
    """Raises GateStarvedError if the task's gate rejects everything."""
    sampler = state.leases.sampler(task)
    if sampler is None or sampler.gate is None:
        return
    trainer = state.leases.trainer(task)
    if trainer.rejected >= STARVED_AFTER * sampler.groups:
        seen = (
            "; ".join(
                f"{name} was {', '.join(f'{value} ({count}x)' for value, count in counter.most_common(8))}"
                for name, counter in trainer.seen.items()
            )
            or trainer.last_reason
        )
        raise GateStarvedError(
            f"the gate {sampler.gate!r} of task {task!r} has rejected {trainer.rejected} groups in a row: {seen}. "
            f"Loosen the gate, or look at what the workers put."
        )


# ---- draws and training ----


def drop_stale(state: PlaneState, partition: Partition, task: str, step: int, is_drawing: bool) -> None:
    """With ``stale="drop"``, what is too old for this step leaves. ``is_drawing``: only what might be drawn for it."""
    sampler, groups = state.leases.sampler(task), partition.groups
    if groups is None or sampler is None or sampler.stale != "drop" or sampler.max_staleness is None:
        return
    oldest = step - sampler.max_staleness
    too_old = []
    for group in groups.unfinished.values():
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
    groups = partition.groups
    assert groups is not None
    groups.drawn(group, task)
    partition.consumer(task).give(partition.rows_of(np.array(group.all_members(), dtype=np.int64)), UNLEDGERED)
    if groups.trained(group, task):
        state.leases.free(group)
    if groups.acked(group, task):
        finish(state, partition, group)


def heard_of_trained(state: PlaneState, partition: Partition, task: str, reader: Hashable, before: int | None) -> None:
    """A reader asks for more, so it has trained its batches before this one; None: all of them."""
    if partition.groups is None:
        return
    trainer = state.leases.trainer(task)
    if trainer.batches:
        trained(state, task, trainer.take_trained((partition.serial, reader), before))


def trained(state: PlaneState, task: str, drawn: Iterable[tuple[Groups, Group]]) -> None:
    """A task has trained these groups. The slots of those that all their tasks have trained are free."""
    trainer = state.leases.trainer(task)
    touched: dict[int, Groups] = {}
    for groups, group in drawn:
        known = groups.live.get(group.index)
        if known is None or known is group:  # else it has left since, and waits again
            trainer.is_over(group.index)
        if known is group:
            if groups.trained(group, task):
                state.leases.free(group)
            touched[id(groups)] = groups
    for groups in touched.values():
        partition = state.find(groups.partition.name, groups.partition.serial)
        if partition is not None:
            settle(state, partition)


def acked(state: PlaneState, partition: Partition, task: str, entries: Sequence[Entry]) -> None:
    """A task has acknowledged these batches, so it has trained their groups. What all have acknowledged is deleted."""
    groups = partition.groups
    follows = state.tasks.is_follower(task)
    if groups is None or not entries or (state.leases.sampler(task) is None and not follows):
        return
    rows, found = partition.table.find(np.concatenate([entry.indexes for entry in entries]))
    own = groups.of_rows(rows[found])
    trained(state, task, [] if follows else [(groups, group) for group in own])
    for group in own:
        if groups.live.get(group.index) is group and groups.acked(group, task):
            finish(state, partition, group)
    settle(state, partition)
