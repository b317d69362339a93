# SPDX-License-Identifier: Apache-2.0
"""What becomes of groups: rows that join them, leases that end, gates, draws, training, acks, and rows that go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Alarm, Call, Holding, Until
from transfer_queue.control.consumer import UNLEDGERED, Consumer
from transfer_queue.control.gate import parse_gate
from transfer_queue.control.group_record import (
    CLOSED,
    EXPIRED,
    FAILED,
    GONE,
    REJECTED,
    STALE,
    TRAINED,
    Drawn,
    Group,
    HeldLease,
)
from transfer_queue.control.groups import FEW, Groups
from transfer_queue.control.leases import LEASES, STARVED_AFTER
from transfer_queue.control.ledger import Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.ready_groups import ReadyGroups, ready_groups
from transfer_queue.control.rows import Rows
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import GateStarvedError, InvalidRequestError, LeaseLostError

_MOST_UNWRITTEN = 256


def groups_of(partition: Partition) -> Groups:
    """The partition's groups; made at their first use."""
    if partition.groups is None:
        partition.groups = Groups(partition)
    return partition.groups


def settle(state: PlaneState, partition: Partition) -> None:
    """End a change of groups: what follows from it is done, and those that wait are woken."""
    groups = groups_of(partition)
    while groups.touched:
        touched, groups.touched = groups.touched, {}
        for group in touched.values():
            _go_on(state, partition, groups, group)
    if len(groups.unwritten) > _MOST_UNWRITTEN and not groups.is_writing:
        groups.is_writing = True
        state.calls.later(groups.writing())
    state.freed(partition)
    state.waits.wake_first((LEASES,))


def clear(state: PlaneState, partition: Partition, indexes: Iterable[int], unsettled: Collection[str] = ()) -> None:
    """Delete these rows and their values. A ``settle`` follows. ``unsettled``: see ``Partition.clear``."""
    wanted = np.fromiter(indexes, dtype=np.int64)
    if len(wanted):
        state.delete(state.freezes.keep(partition.clear(wanted, unsettled)))  # unless a save is still to read them


def _go_on(state: PlaneState, partition: Partition, groups: Groups, group: Group) -> None:
    """Its record has changed: it fails, is judged, leaves or is done, if that says so."""
    if not group.is_complete:
        if group.has_failed:
            leave(state, partition, group, FAILED, group.reasons[-1] if group.reasons else "")
    elif not group.num_members:
        if group.drawn:
            finish(state, partition, group)
        else:
            leave(state, partition, group, REJECTED, "all its rows were cleared")
    elif not group.passed:
        judge(state, partition, group)
    elif group.state == TRAINED:
        state.leases.charge(group, by=-1)
        if group.terms.tasks and group.is_done_by_all(group.acked):
            finish(state, partition, group)


# ---- new groups and members ----


class NewRows(Holding):
    """Heads of groups, or members of an open part, as a put leaves them. If the session ends, they stay."""

    outlives_session = True

    def __init__(self, state: PlaneState, partition: Partition, role: p.Role, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial = state, partition.name, partition.serial
        self._role, self._indexes = role, indexes

    def undo(self) -> bool:
        """Delete them, unless a task was given one, work on a head has begun, or the lease is over or has closed it."""
        partition, role = self._state.find(self._partition, self._serial), self._role
        if partition is None or partition.has_given(self._indexes):
            return False
        if not groups_of(partition).may_undo(role, self._indexes):
            return False
        partition.num_heads -= len(self._indexes) if isinstance(role, p.Terms) else 0
        clear(self._state, partition, self._indexes.tolist())
        settle(self._state, partition)
        return True


def check_members(state: PlaneState, call: Call, name: str, members: p.Members, count: int) -> HeldLease:
    """The lease, if the call's session may add so many rows to its group. Raises as ``Groups.check``."""
    partition = state.partitions.get(name)
    if partition is None or partition.groups is None:
        raise LeaseLostError(f"partition {name!r} has no groups (any more); nothing was written.")
    lease = partition.groups.check(members, count)
    if lease.is_held and lease.worker.client != call.client:
        raise LeaseLostError(f"this lease is another one, of client {lease.worker.client!r}; nothing was written.")
    return lease


def joined(state: PlaneState, call: Call, partition: Partition, members: p.Members, indexes: p.Indexes) -> None:
    """Rows that were just published, if any, belong to a group; the last ones of a part close it."""
    groups = groups_of(partition)
    group = groups.live[members.head]
    lease = group.holders[members.parts[0]]
    groups.join(group, members, indexes.tolist())
    if lease.is_held and not members.closes:
        state.changed(partition)  # nothing but its rows has
        return
    if not members.closes:
        if call.client == lease.worker.client:
            state.leases.revive(lease)
    elif lease.is_held and not lease.parts():
        state.leases.end(lease)
    groups.update(group)
    settle(state, partition)


# ---- work that ends ----


def give_up(state: PlaneState, lease: HeldLease, reason: str, blame: str | None) -> None:
    """A lease ends for good: nothing can come of it any more."""
    if state.leases.end(lease):
        for part in lease.parts():
            del lease.group.holders[part]
        lost(state, lease, reason, blame)


def lost(state: PlaneState, lease: HeldLease, reason: str, blame: str | None) -> None:
    """A lease has ended, and its parts are for others. ``blame``: whose attempt that counts as; None: nobody's."""
    partition, group = state.partitions[lease.partition], lease.group
    if blame is not None and reason:
        group.note(reason)
    group.attempts += blame == "sample"
    group.worker_attempts += blame == "worker"
    groups_of(partition).update(group)
    settle(state, partition)


def make_again(state: PlaneState, partition: Partition, lost: p.Indexes, reason: str) -> None:
    """These rows have lost values. Their groups begin anew, if no task that trains them was given any of their rows.

    They fail if nobody is left who would make or train them.
    """
    groups = partition.groups
    if groups is None:
        return
    is_over = groups.has_ended or any(consumer.has_ended for consumer in partition.consumers.values())
    gone: list[int] = []
    for group in [each for each in groups.of(lost) if not _is_given(state, partition, each)]:
        if is_over:
            leave(state, partition, group, FAILED, reason)
            continue
        was_complete = group.is_complete
        group.note(reason)
        group.worker_attempts += was_complete or bool(group.leases())  # else this attempt counts already
        state.leases.abort_all(group)
        state.leases.charge(group)
        gone += group.all_members()
        groups.begin_anew(group)
        if was_complete:
            watch_deadline(state, partition, group)
    clear(state, partition, gone)
    settle(state, partition)


def _is_given(state: PlaneState, partition: Partition, group: Group) -> bool:
    """Whether a task that trains it was given one of its rows.

    Where its terms name none, these are the tasks that draw groups, or all if none of those has come yet.
    """
    consumers = partition.consumers
    rows = partition.rows_of(np.array(group.all_members(), dtype=np.int64))
    draws = [task for task in consumers if state.leases.sampler(task) is not None]
    tasks = set(group.terms.tasks or draws or consumers).difference(group.skipped)
    return any(task in consumers and consumers[task].given[rows].any() for task in tasks)


def leave(state: PlaneState, partition: Partition, group: Group, into: str, reason: str = "") -> None:
    """The group goes. Its slot is free, its rows are gone, and those who work on it hear of that.

    Its head stays, unless ``into`` is ``GONE``.
    """
    state.leases.dismiss(group)
    groups_of(partition).drop(group, into, reason)
    if into == GONE:
        clear(state, partition, [*group.all_members(), group.index])
    else:  # who draws groups asks for its batch until it has acknowledged it, whatever is left of it
        clear(state, partition, group.all_members(), unsettled=group.drawn)


def finish(state: PlaneState, partition: Partition, group: Group) -> None:
    """The group is done: it is deleted, with its head. A task that follows another may still hold its members."""
    for name, own in partition.consumers.items():
        if state.tasks.is_follower(name) and own.ledger.is_open(number_given(partition, own, group)):
            return
    leave(state, partition, group, GONE)


def clearing(state: PlaneState, partition: Partition, indexes: p.Indexes) -> p.Indexes:
    """A client deletes these rows. Returns them with the members of heads among them, whose groups are forgotten."""
    groups = partition.groups
    if groups is None:
        return indexes
    more = []
    for group in [groups.live[index] for index in indexes.tolist() if index in groups.live]:
        more += group.all_members()
        state.leases.dismiss(group)
        groups.drop(group, GONE)
    return np.union1d(indexes, np.array(more, dtype=np.int64)) if more else indexes


def partition_gone(state: PlaneState, partition: Partition) -> None:
    """The partition was cleared."""
    if partition.groups is None:
        return
    if partition.sealed:
        state.leases.partition_ended(partition.name)
    for group in list(partition.groups.live.values()):
        state.leases.dismiss(group)
    partition.groups.unwritten.clear()
    state.waits.wake_first((LEASES,))


def registered(state: PlaneState, task: str) -> None:
    """A task was registered. Raises before anything else changes, if its budget or its gate can't be."""
    sampler = state.leases.sampler(task)
    if sampler is None:
        return
    if sampler.gate is not None:
        parse_gate(sampler.gate)
    partitions = [partition for partition in state.partitions.values() if partition.groups is not None]
    for terms in [terms for partition in partitions for terms in groups_of(partition).fresh if task in terms.tasks]:
        state.leases.check_budgets(terms.tasks)
    state.leases.trainers[task].accepts()  # the gate may be another one
    for partition in partitions:
        look_again(state, partition)


class GroupReader(Holding):
    """A session that reads groups without batch numbers. What it was given and not trained ends with it."""

    until = Until.SESSION

    def __init__(self, state: PlaneState, client: str) -> None:
        self._state, self._client = state, client

    def end(self, died: bool) -> None:
        for task in list(self._state.leases.trainers):
            has_trained_all(self._state, task, self._client)


def reads(state: PlaneState, call: Call) -> None:
    """The call's session was given a batch without a number."""
    if not state.calls.of_session(call.client, GroupReader):
        state.calls.hold(call, GroupReader(state, call.client))


def watch_deadline(state: PlaneState, partition: Partition, group: Group) -> None:
    """The patience with this group begins now, if it has an end."""
    if group.terms.deadline_s is None:
        return
    groups = groups_of(partition)
    groups.be_patient(group, state.calls.now + group.terms.deadline_s)
    if groups.alarm is None:  # by names, or a partition that was cleared would stay in memory until then
        groups.alarm = Alarm(state.calls, partial(_look_at_deadlines, state, partition.name, partition.serial))
    groups.alarm.set(group.patience_ends)


def _look_at_deadlines(state: PlaneState, name: str, serial: int) -> None:
    """The patience with some groups is over. As many as a turn has time for are looked at, each once."""
    partition = state.find(name, serial)
    if partition is None:
        return
    groups = groups_of(partition)
    assert groups.alarm is not None, "it has rung"
    while (group := groups.out_of_patience(state.calls.now)) is not None:
        _deadline(state, partition, group)
        if not state.calls.turn.has_time():
            break
    settle(state, partition)
    groups.alarm.set(groups.next_patience())


def _deadline(state: PlaneState, partition: Partition, group: Group) -> None:
    """It is closed with the parts that it has, or expires."""
    groups, patience = groups_of(partition), f"in {group.terms.deadline_s:.4g} s"
    if group.is_under_work and len(group.closed) >= (group.terms.min_parts or group.terms.parts):
        state.leases.abort_all(group)
        group.is_complete = True
        clear(state, partition, group.members_of(group.open_parts()))
        groups.update(group)
        watch_deadline(state, partition, group)  # now for its gate's tags
    elif group.is_under_work:
        text = f"{len(group.closed)} of {group.terms.parts} parts were closed {patience}"
        leave(state, partition, group, EXPIRED, text)
    elif group.state == CLOSED and group.terms.tasks:  # else nobody has looked at it yet
        leave(state, partition, group, EXPIRED, f"its rows did not get the tags of its gate {patience}")


def number_given(partition: Partition, consumer: Consumer, group: Group) -> int:
    """The number of the batch in which a task was given this group; 0: in none."""
    first = np.array(group.all_members()[:1], dtype=np.int64)
    return int(consumer.given[partition.rows_of(first)].sum())


# ---- gates ----


def look_again(state: PlaneState, partition: Partition, tagged: Iterable[int] | None = None) -> None:
    """Gates judge what they have not judged: these rows have other tags; None: rows are gone, or a task is new.

    A lease may have waited for a head with such tags.
    """
    groups = partition.groups
    if groups is None:
        return
    indexes = None if tagged is None else np.fromiter(tagged, dtype=np.int64)
    if groups.counts[CLOSED]:  # each clear of samples asks for this, and there may be many live groups
        some = groups.live.values() if indexes is None else groups.of(indexes)
        groups.touched.update((group.index, group) for group in some if group.state == CLOSED)
    if indexes is None or groups.touched or groups.have_heads(indexes):
        settle(state, partition)


def judge(state: PlaneState, partition: Partition, group: Group) -> None:
    """A closed group passes the gates of its tasks, or is rejected, once all its rows have the tags that they name."""
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
    groups_of(partition).update(group)
    groups_of(partition).offer([group])


def check_starved(state: PlaneState, task: str) -> None:
    """Before a fetch waits. Raises GateStarvedError if the task's gate rejects everything."""
    sampler, trainer = state.leases.sampler(task), state.leases.trainers[task]
    assert sampler is not None
    if trainer.rejected >= STARVED_AFTER * sampler.groups:
        seen = ", ".join(f"{text} ({count}x)" for text, count in trainer.seen.most_common())
        raise GateStarvedError(
            f"the gate {sampler.gate!r} of task {task!r} has rejected {trainer.rejected} groups in a row: {seen}. "
            f"Loosen the gate, or look at what the workers put."
        )


# ---- draws and training ----


def before_draw(state: PlaneState, partition: Partition, task: str, ready: Callable[[], ReadySet]) -> None:
    """What is too old leaves, and from then on the groups that the task may draw follow what is ready for it."""
    groups, sampler = groups_of(partition), state.leases.sampler(task)
    assert sampler is not None
    if ready().follower is None:  # of a new reader, whose gate may be the first one for groups that name no task
        look_again(state, partition)
    queue = ready_groups(ready(), groups, sampler, task)  # only what is ready may be too old for it
    step, version = state.leases.step_of(task, partition.name), state.leases.version_of(partition.name)
    early = 0
    if step is not None and version is not None and sampler.stale == "drop" and sampler.max_staleness is not None:
        # Even what is leased now would be too old for the step. Each group would be dropped as soon as it is ready, and
        # one more be leased. So the draw waits for that many versions.
        early = max(0, step - sampler.max_staleness - version)
        drop_stale(state, partition, task, step - early, queue)
    if groups.touched:
        settle(state, partition)
    queue = ready_groups(ready(), groups, sampler, task)
    queue.step, queue.is_early = step, early > 0


def drew(
    state: PlaneState, partition: Partition, task: str, batches: Iterable[tuple[Hashable, int | None, Rows]]
) -> None:
    """A round of the task: by reader and batch, the rows. ``batch`` None: the reader's next one."""
    groups = groups_of(partition)
    given = [(reader, batch, groups.of_rows(rows)) for reader, batch, rows in batches]
    was_given(state, partition, task, given)
    sampler = state.leases.sampler(task)
    if sampler is not None and sampler.window is not None:
        groups.overtaking[task] = sorted(groups.overtaking[task] + [group.seq for _, _, own in given for group in own])


def was_given(
    state: PlaneState, partition: Partition, task: str, batches: list[tuple[Hashable, int | None, list[Group]]]
) -> None:
    """By reader and batch, the groups that train in the task's next step."""
    step = state.leases.step_of(task, partition.name) or 0
    for reader, number, own in batches:
        batch = state.leases.trainers[task].has_drawn(partition.name, reader, number, step, own)
        groups_of(partition).drawn(task, own, batch)


def undrew(state: PlaneState, partition: Partition, task: str, some: Iterable[Group]) -> None:
    """The task never got these groups, or begins anew: it may draw them once more."""
    back = [group for group in some if task in group.drawn]
    for group in back:
        state.leases.trainers[task].is_over(group, group.drawn[task])
    groups_of(partition).undrawn(task, back)
    lost = partition.all_lost()
    if len(lost):
        own = np.array([index for group in back for index in group.all_members()], dtype=np.int64)
        make_again(state, partition, own[np.isin(own, lost)], "its rows were lost with a storage unit")
    settle(state, partition)
    _wake_early(state, task)


def reset(state: PlaneState, partition: Partition, task: str) -> None:
    """The task begins anew with what is here. Batches that it has not acknowledged keep theirs."""
    if partition.groups is not None:
        partition.groups.left_by.discard(task)
        consumer, live = partition.consumers.get(task), partition.groups.live.values()
        kept = set(partition.groups.of(p.NO_INDEXES if consumer is None else consumer.ledger.open_indexes()))
        undrew(state, partition, task, [group for group in live if group not in kept])


def drop_stale(state: PlaneState, partition: Partition, task: str, step: int, among: ReadyGroups | None = None) -> None:
    """With ``stale="drop"``, what is too old for this step leaves. ``among``: only what might be drawn for it."""
    sampler = state.leases.sampler(task)
    if sampler is None or sampler.stale != "drop" or sampler.max_staleness is None:
        return
    oldest = step - sampler.max_staleness
    too_old = []
    for group in groups_of(partition).unfinished.values():
        if group.version is not None and group.version >= oldest and not state.leases.went_back:
            break  # later ones are not older
        if group.version is not None and group.version < oldest and group.is_for(task) and task not in group.drawn:
            too_old.append(group)
    for group in too_old:
        if group.drawn:
            _skip(partition, group, task)
        elif among is None or group in among:
            leave(state, partition, group, STALE, f"version {group.version} is too old for step {step}")


def left_over(state: PlaneState, partition: Partition, task: str, some: Iterable[Group], why: str) -> None:
    """This task won't draw these groups, so they hold no slots for it any more."""
    for group in some:
        others = set(group.terms.tasks).difference(groups_of(partition).left_by, [task])
        if others or (group.drawn and group.is_complete):
            _skip(partition, group, task)
        elif group.terms.tasks:
            leave(state, partition, group, EXPIRED, f"left over: {why}")
    settle(state, partition)


def left(state: PlaneState, partition: Partition, task: str) -> Iterator[None]:
    """The task draws no more from this partition. What no other task will train leaves, or never begins."""
    groups, why = groups_of(partition), f"task {task!r} has gone on to another partition"
    groups.left_by.add(task)
    own = [group for group in groups.unfinished.values() if group.is_for(task) and task not in group.drawn]
    left_over(state, partition, task, own, why)
    for terms in list(groups.fresh):
        while groups.are_left(terms) and groups.fresh[terms].count:
            _never_begin(state, partition, terms, groups.fresh[terms].first(FEW), f"left over: {why}")
            yield
            if state.partitions.get(partition.name) is not partition:
                return


def _never_begin(state: PlaneState, partition: Partition, terms: p.Terms, rows: Rows, reason: str) -> None:
    """These heads, which wait for their first lease, leave."""
    groups, heads = groups_of(partition), partition.table.column("index")[rows].tolist()
    groups.have_begun(rows)
    for index in heads:
        groups.enter(group := Group(index, terms, state.leases.next_token, None))
        leave(state, partition, group, EXPIRED, reason)
    settle(state, partition)


def added(state: PlaneState, partition: Partition, rows: Rows, terms: p.Terms) -> None:
    """These rows are heads of new groups."""
    groups = groups_of(partition)
    groups.add(rows, terms)
    if groups.are_left(terms):
        _never_begin(state, partition, terms, rows, "left over: its tasks have gone on to other partitions")
    settle(state, partition)


def _skip(partition: Partition, group: Group, task: str) -> None:
    """One task trains without this group, which others have been given."""
    groups_of(partition).acked(task, [group])
    group.skipped |= {task}
    partition.consumer(task).give(partition.rows_of(np.array(group.all_members(), dtype=np.int64)), UNLEDGERED)


def heard_of_trained(state: PlaneState, partition: Partition, task: str, reader: Hashable, before: int | None) -> None:
    """A reader asks for more, so it has trained its batches before this one; None: all of them."""
    trainer = state.leases.trainers.get(task)
    batches = [] if trainer is None else trainer.batches.get((partition.name, reader), [])
    trained(state, partition, task, [batch for batch in batches if before is None or batch.number < before])


def has_trained_all(state: PlaneState, task: str, reader: Hashable, besides: str | None = None) -> None:
    """A reader has trained all that it was given, but for what it has of the partition ``besides``."""
    for name, own in list(state.leases.trainers[task].batches):
        if own == reader and name != besides:
            heard_of_trained(state, state.partitions[name], task, reader, None)


def trained(state: PlaneState, partition: Partition, task: str, batches: Sequence[Drawn]) -> None:
    """A task has trained these batches. The slots of the groups that all their tasks have trained are free."""
    for batch in batches:
        state.leases.trainers[task].has_trained(batch)
    _are_over(state, partition, task, batches)


def left_batches(state: PlaneState, partition: Partition, task: str, reader: Hashable) -> None:
    """A reader has left the partition: what it was given there and has not said to have trained makes no step."""
    _are_over(state, partition, task, list(state.leases.trainers[task].batches.get((partition.name, reader), [])))


def _are_over(state: PlaneState, partition: Partition, task: str, batches: Sequence[Drawn]) -> None:
    for batch in batches:
        own = list(batch.groups.values())
        for group in own:
            state.leases.trainers[task].is_over(group, batch)
        groups_of(partition).drawn(task, own, None)
    if batches:
        settle(state, partition)
        _wake_early(state, task)


def _wake_early(state: PlaneState, task: str) -> None:
    """The task's next draw may be for an earlier step than before, in whatever partition."""
    sampler = state.leases.sampler(task)
    if sampler is not None and sampler.stale == "drop":
        for group in {wait.queue[:2] for wait in state.fetches_of(task)}:
            state.waits.wake_first(group)


def acked(state: PlaneState, partition: Partition, task: str, entries: Sequence[Entry]) -> None:
    """A task has acknowledged these batches, so it has trained their groups. What all have acknowledged is deleted."""
    groups = partition.groups
    if groups is None or not entries or (state.leases.sampler(task) is None and not state.tasks.is_follower(task)):
        return
    own = groups.of(np.concatenate([entry.indexes for entry in entries]))
    if state.tasks.is_follower(task):
        groups.touched.update((group.index, group) for group in own)  # they may only have waited for it
    else:
        trainer = state.leases.trainers[task]
        for batch, group in [(group.drawn.get(task), group) for group in own]:
            trainer.has_trained(batch)
            trainer.is_over(group, batch)
        groups.acked(task, own)
        _wake_early(state, task)
    settle(state, partition)
