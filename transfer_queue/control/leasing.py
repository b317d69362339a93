# SPDX-License-Identifier: Apache-2.0
"""The verbs of workers and trainers of groups: lease, end a lease, renew, advance, retry, reject."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import MORE, PIECE, Call, Holding, More, Steps, Wait
from transfer_queue.control import group_work
from transfer_queue.control.filtered import FilteredSet
from transfer_queue.control.group_record import REJECTED, Group
from transfer_queue.control.groups import Groups
from transfer_queue.control.leases import LEASES, HeldLease, is_of, is_pattern, queue_of
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.serving import describe
from transfer_queue.control.state import PlaneState
from transfer_queue.control.tag_filter import parse_filter
from transfer_queue.errors import BatchTimeoutError, GroupStateError, LeaseLostError


class Unconfirmed(Holding):
    """Leases that their worker may not have heard of. If it never does, the work is for others, and nobody's fault."""

    __slots__ = ("_leases", "_state")

    def __init__(self, state: PlaneState, leases: list[HeldLease]) -> None:
        self._state, self._leases = state, leases

    def undo(self) -> bool:
        for lease in self._leases:
            if self._state.leases.end(lease):
                lease.groups.void(lease.group, lease.token)
                group_work.lost(self._state, lease, "its worker never got it", None)
        return True


def lease(state: PlaneState, call: Call, request: p.LeaseGroups) -> p.Reply | Wait:
    """Lease what can be worked on now, or wait for it. Equal requests are served in order of arrival."""
    if request.where is not None:
        parse_filter(request.where)
    line = queue_of(request.partitions, request.where, request.by_part)

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | More | None:
        late = wait.late if wait is not None else request.wait_s <= 0
        if has_turn or late:
            found = _Grants(state, call, request).reply()
            if found is not None:
                return found
        if _is_over(state, request.partitions):
            return p.Ended(request.id, "sealed")
        waited_s = 0.0 if wait is None else state.calls.now - wait.since
        return p.Failed(request.id, BatchTimeoutError.__name__, _too_late(state, request, waited_s)) if late else None

    reply = answer(None, True) if state.waits.would_be_first(line, 0.0) else MORE
    if isinstance(reply, p.Reply):
        return reply
    return Wait(line, state.calls.now + request.wait_s, answer, due=reply is MORE)


class _Grants:
    """One request, which takes what it can."""

    def __init__(self, state: PlaneState, call: Call, request: p.LeaseGroups) -> None:
        self._state, self._call, self._request = state, call, request
        self._where = None if request.where is None else parse_filter(request.where)
        self._leases: list[HeldLease] = []

    def reply(self) -> p.Reply | More | None:
        """None: there is nothing to work on."""
        for partition in matching(self._state, self._request.partitions):
            groups = partition.groups
            if groups is None:
                continue
            among = None if self._where is None else partition.listed.matching(self._request.where)
            if isinstance(among, FilteredSet) and not among.finish(self._state.calls.turn):
                if not self._leases:
                    return MORE
                break
            before = len(self._leases)
            self._take_begun(partition, groups)
            self._take_fresh(partition, groups, among)
            if len(self._leases) > before:
                self._state.producers.announced(self._call, groups.member_fields)
                groups.flush()
                self._state.changed(partition)
            if not self._num_missing:
                break
        if not self._leases:
            return None
        self._state.calls.hold(self._call, Unconfirmed(self._state, self._leases))
        return p.LeasedGroups(self._request.id, [self._described(each) for each in self._leases], self._heads())

    def _heads(self) -> list[p.Batch]:
        by_partition: dict[str, list[int]] = {}
        for made in self._leases:
            by_partition.setdefault(made.groups.partition.name, []).append(made.group.index)
        found = []
        for name, heads in by_partition.items():
            partition, indexes = self._state.get(name), np.array(heads, dtype=np.int64)
            rows = partition.rows_of(indexes)
            fields = [*partition.schema.fields_of(rows), *partition.lost_of(indexes)]  # so reading it names the loss
            found.append(describe(self._request.id, partition, indexes, fields, rows))
        return found

    @property
    def _num_missing(self) -> int:
        return self._request.count - len(self._leases)

    def _take_begun(self, partition: Partition, groups: Groups) -> None:
        """Work that others have left comes first. It has its slot."""
        for group in list(groups.with_free_parts.values()):
            if not self._num_missing:
                return
            if self._where is None or self._where.matches(partition.tags[group.index]):
                self._grant(partition, groups, group)

    def _take_fresh(self, partition: Partition, groups: Groups, among: ReadySet | None) -> None:
        leases = self._state.leases
        terms = [each for each in groups.terms_waiting() if leases.room(each)] if self._num_missing else []
        rows, version = [], leases.version_of(partition.name)
        for row, each in groups.first_fresh(terms, self._num_missing, among) if terms else ():
            if not self._num_missing:
                break
            if not leases.room(each):  # another of them took it
                continue
            rows.append(row)
            group = groups.begin(row, each, leases.next_seq(), version)
            leases.charge(group)
            group_work.watch_deadline(self._state, groups, group)
            self._grant(partition, groups, group)
        if rows:
            groups.have_begun(np.array(rows, dtype=np.intp))

    def _grant(self, partition: Partition, groups: Groups, group: Group) -> None:
        leases, request = self._state.leases, self._request
        if request.keep == "none" and group.closed and not leases.holders(group):
            group_work.gone(self._state, groups.begin_anew(group))
        free = leases.free_parts(group)
        shares = [[part] for part in free[: self._num_missing]] if request.by_part else [free]
        for parts in shares:
            made = leases.grant(self._call, groups, group, parts, request.lease_s)
            self._leases.append(made)
            group_work.gone(self._state, groups.take(group, parts, made.token, request.keep))
        groups.note_free_parts(group, request.by_part and len(shares) < len(free))

    def _described(self, made: HeldLease) -> p.GrantedLease:
        group, partition = made.group, made.groups.partition
        members = {part: p.pack_indexes(np.array(own)) for part in made.parts if (own := group.members.get(part))}
        return p.GrantedLease(
            made.token, partition.name, group.index, partition.keys.key_of(group.index) or "", group.attempt,
            group.version, list(made.parts), members,
        )  # fmt: skip


def matching(state: PlaneState, names: list[str]) -> Iterator[Partition]:
    """The partitions of these names and patterns: as they were named, and the oldest first."""
    for name in names:
        if is_pattern(name):
            yield from [each for each in state.partitions.values() if is_of(each.name, name)]
        elif name in state.partitions:
            yield state.partitions[name]


def _is_over(state: PlaneState, names: list[str]) -> bool:
    """Whether no group there can need work any more: each name has partitions, and all of them are final."""
    for name in names:
        found = list(matching(state, [name]))
        if not (found or state.leases.has_ended(name)) or not all(partition.is_final for partition in found):
            return False
    return True


def _too_late(state: PlaneState, request: p.LeaseGroups, waited_s: float) -> str:
    """Why there is nothing to lease."""
    found = list(matching(state, request.partitions))
    names = ", ".join(map(repr, request.partitions))
    matching_it = "" if request.where is None else f" that matches {request.where!r}"
    text = f"no group of {names}{matching_it} could be leased in {waited_s:.1f} s: "
    if not found:
        return f"{text}there is no such partition. Add groups to one, or check the name."
    parts = []
    for partition in found:
        if partition.groups is None:
            parts.append(f"{partition.name!r} has no groups")
            continue
        numbers = partition.groups.numbers()
        parts.append(f"{partition.name!r} has " + (", ".join(f"{n} {s}" for s, n in numbers.items()) or "none"))
        for task in sorted({task for terms in partition.groups.terms_waiting() for task in terms.tasks}):
            parts.append(_slots(state, task))
    return f"{text}{'; '.join(parts)}. Add groups, wait longer (timeout_s), or look at the trainer."


def _slots(state: PlaneState, task: str) -> str:
    sampler = state.leases.sampler(task)
    if sampler is None:
        return f"task {task!r}, which is to train them, is not registered with a GroupSampler yet"
    return f"task {task!r} has {state.leases.trainer(task).charged} of {sampler.budget} slots in use"


def end_lease(state: PlaneState, call: Call, request: p.EndLease) -> p.Reply:
    """Close parts whose rows are there, release them for another attempt, or reject the group."""
    partition, members = state.get(request.partition), request.members
    group = group_work.check_members(state, call, partition, members, 0)
    if request.how == "close":
        closing = p.Members(members.lease, members.head, members.parts, True)
        group_work.joined(state, call, partition, closing, np.empty(0, dtype=np.int64))
    elif request.how == "reject":
        group_work.leave(state, partition, group, REJECTED, request.reason)
        group_work.settle(state, partition)
    else:
        own = state.leases.get(members.lease)
        if own is None:
            raise LeaseLostError("this lease was lost before it was released: its attempt counts already.")
        state.leases.end(own)
        own.groups.void(group, own.token)
        group_work.lost(state, own, request.reason, None if request.blame == "nobody" else request.blame)
    return p.Done(request.id)


def renew(state: PlaneState, call: Call, request: p.RenewLeases) -> p.Reply | Wait:
    """See ``Leases.renew``."""
    return state.leases.renew(call, request)


def advance(state: PlaneState, call: Call, request: p.Advance) -> p.Reply:
    """What was drawn for earlier steps has been trained, and what is too old now leaves."""
    leases = state.leases
    leases.advance(request.partition, request.version, request.resumed)
    for task, trainer in leases.trainers():
        over = [
            (groups, groups.live[index])
            for step, drawn in trainer.rounds.items() if step < request.version
            for index, groups in drawn.items()
            if index in groups.live and is_of(groups.partition.name, request.partition)
        ]  # fmt: skip
        group_work.trained(state, task, over)
    for partition in list(matching(state, [request.partition])):
        if partition.groups is None:
            continue
        for task, _ in leases.trainers():
            group_work.drop_stale(state, partition, task, request.version, is_drawing=False)
        group_work.settle(state, partition)
    state.waits.wake_first((LEASES,))
    return p.Done(request.id)


def trained(state: PlaneState, call: Call, request: p.Trained) -> p.Reply:
    """The slots of what a reader has trained are free."""
    partition = state.partitions.get(request.partition)
    if partition is not None:
        group_work.heard_of_trained(state, partition, request.task, request.dp_rank, request.before)
    return p.Done(request.id)


def retry(state: PlaneState, call: Call, request: p.RetryGroups) -> Steps:
    """Groups that have left and match wait again."""
    partition = state.get(request.partition)
    groups, count = partition.groups, 0
    if groups is None:
        return p.Done(request.id, 0)
    for task, consumer in partition.consumers.items():
        if state.leases.sampler(task) is not None and consumer.end_of(None) is not None:
            raise GroupStateError(
                f"partition {partition.name!r} is sealed, and task {task!r} was answered that nothing more comes: a "
                f"group that waits again would never be trained. Add it to another partition."
            )
    among = partition.listed.matching(request.where)
    while isinstance(among, FilteredSet) and not among.finish(state.calls.turn):
        yield None
    indexes = partition.table.column("index")[among.all_rows()]
    for start in range(0, len(indexes), PIECE):
        rows, found = partition.table.find(indexes[start : start + PIECE])
        count += sum(groups.retry(row) for row in rows[found].tolist())
        group_work.settle(state, partition)
        yield None
    return p.Done(request.id, count)


def reject(state: PlaneState, call: Call, request: p.RejectGroups) -> p.Reply:
    """The trainer has no use for these groups, which it was given."""
    partition = state.get(request.partition)
    if partition.groups is None:
        raise GroupStateError(f"partition {request.partition!r} has no groups.")
    rows, found = partition.table.find(p.unpack_indexes(request.indexes))
    own = partition.groups.of_rows(rows[found])
    for group in own:
        group_work.leave(state, partition, group, REJECTED, request.reason)
    group_work.settle(state, partition)
    return p.Done(request.id, len(own))
