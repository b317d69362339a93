# SPDX-License-Identifier: Apache-2.0
"""The verbs of workers and trainers of groups: lease, end a lease, renew, advance, retry, reject."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, islice
from operator import itemgetter

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import MORE, Call, Holding, More, Steps, Wait
from transfer_queue.control import group_work
from transfer_queue.control.filtered import FilteredSet
from transfer_queue.control.group_numbers import group_numbers
from transfer_queue.control.group_record import REJECTED, Group, HeldLease
from transfer_queue.control.groups import FEW, Groups
from transfer_queue.control.leases import LEASES, RENEWALS, is_of, is_pattern
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.serving import describe
from transfer_queue.control.state import PlaneState
from transfer_queue.control.tag_filter import parse_filter
from transfer_queue.diagnosis import no_work, why_no_work
from transfer_queue.errors import BatchTimeoutError, GroupStateError, LeaseLostError, UnknownPartitionError


class Unconfirmed(Holding):
    """Leases that their worker may not have heard of. If it never does, the work is for others, and nobody's fault."""

    def __init__(self, state: PlaneState, leases: list[HeldLease]) -> None:
        self._state, self._leases = state, leases

    def undo(self) -> bool:
        for lease in self._leases:
            group_work.give_up(self._state, lease, "its worker never got it", None)
        return True


def lease(state: PlaneState, call: Call, request: p.LeaseGroups) -> p.Reply | Wait:
    """Lease what can be worked on now, or wait for it. Equal requests are served in order of arrival."""
    line = (LEASES, tuple(request.partitions), request.where, request.by_part)

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | More | None:
        late = wait.late if wait is not None else request.wait_s <= 0
        if has_turn or late:
            found = _Grants(state, call, request).reply()
            if found is not None:
                return found
        if _is_over(state, request.partitions):
            for partition in matching(state, request.partitions):
                if partition.groups is not None:
                    partition.groups.has_ended = True
            return p.Ended(request.id, "sealed")
        waited_s = 0.0 if wait is None else state.calls.now - wait.since
        return _too_late(state, call, request, waited_s) if late else None

    reply = answer(None, True) if state.waits.would_be_first(line, 0.0) else MORE
    if isinstance(reply, p.Reply):
        return reply
    return Wait(line, state.calls.now + request.wait_s, answer, due=reply is MORE)


class _Grants:
    """One request, which takes what it can."""

    def __init__(self, state: PlaneState, call: Call, request: p.LeaseGroups) -> None:
        self._state, self._call, self._request = state, call, request
        if request.where is not None:
            parse_filter(request.where)  # it may be wrong, whether there is something to lease or not
        self._leases: list[HeldLease] = []
        self._granted: list[p.GrantedLease] = []
        self._unused: list[int] = []
        """Rows of earlier holders that it doesn't go on with. They go last, since other rows may then move."""
        self._heads: list[p.Batch] = []
        self._has_avoided = False

    def reply(self) -> p.Reply | More | None:
        """None: there is nothing to work on.

        Groups whose heads were lost are only granted where there are no others, to name the loss to a reader.
        """
        found = self._reply(avoids_lost=True)
        return self._reply(avoids_lost=False) if found is None and self._has_avoided else found

    def _reply(self, avoids_lost: bool) -> p.Reply | More | None:
        for partition in matching(self._state, self._request.partitions):
            groups = partition.groups
            if groups is None:
                continue
            among = None if self._request.where is None else partition.listed.matching(self._request.where)
            if isinstance(among, FilteredSet) and not among.finish(self._state.calls.turn):
                if not self._leases:
                    return MORE
                break
            num_before = len(self._leases)
            avoided = partition.lost_heads() if avoids_lost else set()
            self._has_avoided |= bool(avoided)
            self._take_begun(partition, groups, among, avoided)
            if self._num_missing:
                self._take_fresh(partition, groups, among, avoided)
            if made := self._leases[num_before:]:
                self._state.producers.announced(self._call, groups.member_fields)
                group_work.clear(self._state, partition, self._unused)
                self._unused.clear()
                group_work.settle(self._state, partition)
                self._heads += self._described(partition, np.array([each.group.index for each in made], np.int64))
            if not self._num_missing:
                break
        if not self._leases:
            return None
        self._state.calls.hold(self._call, Unconfirmed(self._state, self._leases))
        return p.LeasedGroups(self._request.id, self._granted, self._heads)

    def _described(self, partition: Partition, heads: p.Indexes) -> Iterator[p.Batch]:
        """Those with equal fields together."""
        rows, schema = partition.rows_of(heads), partition.schema
        common = schema.fields_of(rows)
        differ = schema.fields_of_some(rows, common)
        alike: dict[tuple[str, ...], list[int]] = {}
        for at in range(len(rows)):
            alike.setdefault(tuple(schema.fields_of(rows[at : at + 1]) if differ else common), []).append(at)
        for fields, own in alike.items():
            lost = partition.lost_of(heads[own])  # so reading it names the loss
            yield describe(self._request.id, partition, heads[own], [*fields, *lost], rows[own])

    @property
    def _num_missing(self) -> int:
        return self._request.count - len(self._leases)

    def _take_begun(self, partition: Partition, groups: Groups, among: ReadySet | None, avoided: set[int]) -> None:
        """Work that others have left comes first. It has its slot."""
        begun = list(groups.with_free_parts.values())
        if among is not None and begun:
            rows = partition.rows_of(np.array([group.index for group in begun], np.int64))
            begun = list(compress(begun, among.contains(rows)))
        for group in begun:
            if not self._num_missing:
                return
            if group.index not in avoided:
                self._grant(partition, groups, group)

    def _take_fresh(self, partition: Partition, groups: Groups, among: ReadySet | None, avoided: set[int]) -> None:
        leases, version = self._state.leases, self._state.leases.version_of(partition.name)
        rows, index = [], partition.table.column("index")
        if avoided:
            avoided = set(partition.table.find(np.array(sorted(avoided), np.int64))[0].tolist())
        fresh = self._first_fresh(groups, among, avoided)
        share_slots = len({terms for _, terms in fresh}) > 1
        for row, terms in fresh:
            if not self._num_missing:
                break
            if share_slots and not leases.room(terms):  # others of them took it
                continue
            rows.append(row)
            group = Group(index.item(row), terms, leases.next_token, version)
            groups.enter(group)
            leases.charge(group)
            group_work.watch_deadline(self._state, partition, group)
            for task in groups.left_by.intersection(terms.tasks):
                groups.acked(task, [group])
            self._grant(partition, groups, group)
        if rows:
            groups.have_begun(np.array(rows, dtype=np.intp))

    def _first_fresh(self, groups: Groups, among: ReadySet | None, avoided: set[int]) -> list[tuple[int, p.Terms]]:
        """(row, terms) of the first heads that wait for their first lease and have a slot, oldest ones first.

        ``among``: only heads of this set. ``avoided``: rows of heads that are left out.
        """
        found: list[tuple[int, p.Terms]] = []
        for terms, fresh in groups.fresh.items():
            if fresh.count and (room := self._state.leases.room(terms)):
                most = min(self._num_missing, room)
                rows = fresh.first(most + len(avoided)).tolist() if among is None else (
                    row for block in among.blocks() for row in block[fresh.contains(block)].tolist()
                )  # fmt: skip
                found += islice(((row, terms) for row in rows if row not in avoided), most)
        return sorted(found, key=itemgetter(0))

    def _grant(self, partition: Partition, groups: Groups, group: Group) -> None:
        leases, request = self._state.leases, self._request
        if request.keep == "none" and group.closed and not group.leases():
            group.closed.clear()
            self._unused += group.all_members()
        free = group.free_parts()
        key = partition.keys.key_of(group.index) or ""
        for parts in [[part] for part in free[: self._num_missing]] if request.by_part else [free]:
            lease = leases.grant(self._call, partition.name, group, parts, request.lease_s)
            self._leases.append(lease)
            members: dict[int, bytes] = {}
            if group.members and request.keep == "all":
                members = {part: p.pack_indexes(own) for part in parts if (own := group.members.get(part))}
            elif group.members:
                self._unused += group.members_of(parts)
            self._granted.append(
                p.GrantedLease(
                    lease.token, partition.name, group.index, key, group.attempt, group.version, parts, members
                )
            )
        groups.update(group)


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


def _too_late(state: PlaneState, call: Call, request: p.LeaseGroups, waited_s: float) -> p.Failed:
    """There was nothing to lease."""
    groups = {own.name: group_numbers(state, own, state.calls.now) for own in matching(state, request.partitions)}
    why = why_no_work(request.where, groups, state.holds())
    found = no_work(call.client, ", ".join(request.partitions), request.where, waited_s, why)
    return p.Failed(request.id, BatchTimeoutError.__name__, str(found))


def end_lease(state: PlaneState, call: Call, request: p.EndLease) -> p.Reply:
    """Close parts whose rows are there, release them for another attempt, or reject the group."""
    members = request.members
    own = group_work.check_members(state, call, request.partition, members, 0)
    partition = state.partitions[request.partition]
    if request.how == "close":
        closing = p.Members(members.lease, members.head, members.parts, True)
        group_work.joined(state, call, partition, closing, np.empty(0, dtype=np.int64))
    elif request.how == "reject":
        group_work.leave(state, partition, own.group, REJECTED, request.reason)
        group_work.settle(state, partition)
    else:
        if not own.is_held:
            raise LeaseLostError("this lease was lost before it was released: its attempt counts already.")
        group_work.give_up(state, own, request.reason, None if request.blame == "nobody" else request.blame)
    return p.Done(request.id)


def renew(state: PlaneState, call: Call, request: p.RenewLeases) -> p.Reply | Wait:
    """Work on these leases goes on. It waits for one that is lost."""
    worker = state.leases.workers.get(call.client)
    held = {} if worker is None else worker.leases
    for token in held.keys() & request.leases:
        held[token].renewed = state.calls.now

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | None:
        gone = [token for token in request.leases if token not in held]
        return p.Done(request.id, gone) if gone or (wait is not None and wait.late) else None

    return answer(None, True) or Wait((RENEWALS, call.client), state.calls.now + request.wait_s, answer)


def advance(state: PlaneState, call: Call, request: p.Advance) -> p.Reply:
    """What was drawn for earlier steps has been trained, and what is too old now leaves."""
    leases = state.leases
    leases.advance(request.partition, request.version, request.resumed)
    for partition in list(matching(state, [request.partition])):
        if partition.groups is None:
            continue
        for task, trainer in list(leases.trainers.items()):
            own = [batch for batch in trainer.open_batches() if batch.partition == partition.name]
            group_work.trained(state, partition, task, [batch for batch in own if batch.step < request.version])
            group_work.drop_stale(state, partition, task, request.version)
        group_work.settle(state, partition)
    state.waits.wake_first((LEASES,))
    return p.Done(request.id)


def trained(state: PlaneState, call: Call, request: p.Trained) -> p.Reply:
    """The slots of what a reader has trained are free."""
    partition = state.partitions.get(request.partition)
    if partition is not None:
        group_work.heard_of_trained(state, partition, request.task, request.dp_rank, request.before)
    return p.Done(request.id)


def move_on(state: PlaneState, call: Call, request: p.MoveOn) -> Steps:
    """What a task won't draw in the partitions that it has left holds no slots."""
    back = state.partitions.get(request.partition)
    if back is not None and back.groups is not None:
        back.groups.left_by.discard(request.task)
    for name in request.left:
        partition = state.partitions.get(name)
        if partition is not None and partition.groups is not None:
            group_work.left_batches(state, partition, request.task, request.dp_rank)
            yield from group_work.left(state, partition, request.task)
            state.changed(partition)
    return p.Done(request.id)


def retry(state: PlaneState, call: Call, request: p.RetryGroups) -> Steps:
    """Groups that have left and match wait again."""
    partition = state.get(request.partition)
    groups, count, num_left = partition.groups, 0, 0
    if groups is None:
        return p.Done(request.id, 0)
    for task, consumer in partition.consumers.items():
        if state.leases.sampler(task) is not None and consumer.has_ended:
            raise GroupStateError(
                f"partition {partition.name!r} is sealed, and task {task!r} was answered that nothing more comes: a "
                f"group that waits again would never be trained. Add it to another partition."
            )
    among = partition.listed.matching(request.where)
    while isinstance(among, FilteredSet) and not among.finish(state.calls.turn):
        yield None
    indexes = partition.table.column("index")[among.all_rows()]
    for start in range(0, len(indexes), FEW):
        _check_there(state, partition)
        rows, found = partition.table.find(indexes[start : start + FEW])
        for row in rows[found].tolist():
            terms = groups.terms_of_left(row)
            if terms is not None and groups.are_left(terms):
                num_left += 1
            elif terms is not None:
                groups.retry(row, terms)
                groups.has_ended = False
                count += 1
        group_work.settle(state, partition)
        yield None
    if num_left and not count:
        raise GroupStateError(
            f"all tasks that were to train {num_left} group{'s' * (num_left != 1)} of partition {partition.name!r} "
            f"have gone on to other partitions: what waits again would never be trained. Add it to another partition."
        )
    return p.Done(request.id, count)


def _check_there(state: PlaneState, partition: Partition) -> None:
    if state.partitions.get(partition.name) is not partition:
        raise UnknownPartitionError(f"partition {partition.name!r} was cleared meanwhile, and its groups with it.")


def reject(state: PlaneState, call: Call, request: p.RejectGroups) -> p.Reply:
    """The trainer has no use for these groups, which it was given."""
    partition = state.get(request.partition)
    if partition.groups is None:
        raise GroupStateError(f"partition {request.partition!r} has no groups.")
    own = partition.groups.of(p.unpack_indexes(request.indexes))
    for group in own:
        group_work.leave(state, partition, group, REJECTED, request.reason)
    group_work.settle(state, partition)
    return p.Done(request.id, len(own))
