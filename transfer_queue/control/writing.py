# SPDX-License-Identifier: Apache-2.0
"""The verbs of producers: reserve, insert, name by key, check, publish; and producers that wait for room."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import nlargest

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Effect, Holding, Steps, Until, Wait, replied
from transfer_queue.control import group_work
from transfer_queue.control.commits import Commits
from transfer_queue.control.group_record import check_tags, check_terms
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import Rows, RowState
from transfer_queue.control.serving import describe
from transfer_queue.control.state import SAVING, WRITERS, PlaneState
from transfer_queue.diagnosis import TOTAL, is_internal, keepers, no_room, samples_of, to_acknowledge
from transfer_queue.errors import CheckpointError, GroupStateError, InvalidRequestError, StorageFullError
from transfer_queue.finding import Finding

Writer = p.Reserve | p.Insert | p.ResolveKeys
Rewrite = p.CheckFields | p.ResolveKeys
_MOST_AT_ONCE = 2**24
"""Samples of one request: more is a mistake, and would take gigabytes before it failed."""
_MOST_NAMED = 5
"""Writers that a reply names."""
_MOST_LOOKED_AT = 8
"""Partitions in which a reply looks for the tasks that keep the queue full."""

# ---- what a write holds ----


class Reservation(Holding):
    """Samples of a write under way. Nobody else knows their indexes, unless they are ``keyed``."""

    until = Until.DONE

    def __init__(self, state: PlaneState, partition: Partition, indexes: p.Indexes, keyed: bool = False) -> None:
        self._state, self.partition, self.serial, self.indexes = state, partition.name, partition.serial, indexes
        self.keyed = keyed

    def undo(self) -> bool:
        self._release(self.indexes)
        return True

    def complete(self, published: bytes) -> None:
        """The write is visible; what it reserved and didn't publish is released."""
        if p.pack_indexes(self.indexes) != published:
            self._release(self.indexes[~np.isin(self.indexes, p.unpack_indexes(published))])

    def _release(self, indexes: p.Indexes) -> None:
        """Release samples. They may have stored values, even after a clear; another writer may have published some."""
        if not len(indexes):
            return
        state = self._state
        partition = state.find(self.partition, self.serial)
        if partition is not None:
            rows, found = partition.table.find(indexes)
            partition.release_reserved(rows[found])
            state.freed(partition)
            indexes = indexes[~partition.table.find(indexes)[1]]
        state.delete(state.freezes.keep(indexes))  # another writer may have published them, and a save may hold them


class Permit(Holding):
    """A write to samples that others may write to, too: its values are stored aside. While it would replace some,
    freezes wait. Whether it does may change with each publish of another.
    """

    until = Until.DONE

    def __init__(self, state: PlaneState, write: p.WriteName, request: Rewrite) -> None:
        self.state, self.write, self.request = state, write, request

    def replaces(self) -> bool:
        """Whether it would replace values now."""
        return len(replaced(self.state, self.request)) > 0

    def keep(self) -> None:
        """The write is over."""
        self.state.waits.wake_first(SAVING)

    def undo(self) -> bool:
        self._end([])
        return True

    def _end(self, published: list[p.WriteName]) -> None:
        self.state.ended_writes.append((self.write, published))
        self.state.waits.wake_first(SAVING)


class Committing(Permit):
    """A write to samples that exist is published, and its client commits the values."""

    until = Until.RECEIVED

    def __init__(self, permit: Permit, commits: Commits, earlier: list[p.WriteName]) -> None:
        """``earlier``: what units commit before it."""
        super().__init__(permit.state, permit.write, permit.request)
        self._commits, self._earlier = commits, earlier

    def keep(self) -> None:
        self._commits.pop(self.write, None)
        super().keep()

    def undo(self) -> bool:
        self._end([*self._earlier, self.write])  # it keeps its place until units have heard of it
        return False


class NewSamples(Holding):
    """Samples with their values, as a put leaves them. If its session ends, they stay."""

    outlives_session = True

    def __init__(self, state: PlaneState, partition: Partition, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial = state, partition.name, partition.serial
        self._num_rewrites, self._indexes = partition.num_rewrites, indexes

    def undo(self) -> bool:
        """Delete the samples, unless somebody has got one or written to it: a put is whole or not there."""
        state = self._state
        partition = state.find(self._partition, self._serial)
        if partition is None or not partition.take_back(self._indexes, self._num_rewrites):
            return False
        state.delete(state.freezes.keep(self._indexes))
        state.freed(partition)
        return True


class Insertion(Holding):
    """New samples without values."""

    def __init__(self, state: PlaneState, partition: Partition, indexes: p.Indexes) -> None:
        self._state, self._partition, self._serial, self._indexes = state, partition.name, partition.serial, indexes

    def undo(self) -> bool:
        partition = self._state.find(self._partition, self._serial)
        if partition is not None:
            partition.uninsert(self._indexes)
            self._state.freed(partition)
        return True


# ---- writers that need room ----


def write(state: PlaneState, call: Call, request: Writer) -> p.Reply | Wait:
    """Serve a writer at once if no other waits or it needs no room; otherwise it waits."""
    count = check(state, request)
    if not count or has_room(state, count):
        reply = _admit(state, call, request, count)
        if reply is not None:
            return reply

    def answer(wait: Wait, has_turn: bool) -> p.Reply | None:
        count = check(state, request)
        reply = _admit(state, call, request, count) if has_turn or not count else None
        if reply is None:
            state.waits.resize(wait, count)  # its keys may have been created or cleared
        return reply or (_full(state, call, request, count, state.calls.now - wait.since) if wait.late else None)

    keys: list[Hashable] = [(WRITERS, request.partition)]
    if isinstance(request, p.ResolveKeys):
        keys += [(WRITERS, request.partition, key) for key in dict.fromkeys(request.keys)]
    return Wait(WRITERS, call.since + request.wait_s, answer, size=count, keys=tuple(keys))


def takes_now(state: PlaneState, call: Call, request: p.Reserve) -> bool:
    """Whether these samples can be added whole, in one step: they need no room of others, and no rows made before.

    Raises for errors that waiting can't resolve.
    """
    partition = state.partitions.get(request.partition)
    if partition is None or not partition.takes_whole_puts:
        return False
    if request.role is not None:
        group_work.check_members(state, call, request.partition, request.role, request.count)
    return has_room(state, check(state, request))


def has_room(state: PlaneState, count: int) -> bool:
    """Whether there is room for so many samples now, and no writer waits that must come first."""
    return count <= state.room() and WRITERS not in state.waits.occupied


def add(
    state: PlaneState, call: Call, request: p.Reserve, indexes: p.Indexes, tags: Mapping[int, p.Tags]
) -> p.Reserved:
    """New samples whose values are stored, readable from now on. ``tags``: by index. Call ``takes_now`` first."""
    partition, members = state.partitions[request.partition], request.role
    held: Holding = Effect()
    if tags:
        check_tags(tags.values())
    dtypes = partition.schema.dtypes_with(request.fields)
    partition.add(indexes, request.fields, tags, state.calls.now, members)
    if members is None:
        held = NewSamples(state, partition, indexes)
    elif not members.closes:  # which can't be undone
        held = group_work.NewRows(state, partition, members, indexes)
    state.calls.hold(call, held)  # first, so that an error in what follows undoes it
    _appeared(state, call, partition, members, indexes)
    state.producers.published(call, request.fields)
    return p.Reserved(request.id, p.pack_indexes(indexes), dtypes)


def check(state: PlaneState, request: Writer) -> int:
    """The number of samples that the request would add.

    Raises for errors that waiting can't resolve, before anything is reserved.
    """
    count = len(_new_keys(state, request)) if isinstance(request, p.ResolveKeys) else request.count
    if count < 1 and not isinstance(request, p.ResolveKeys):
        raise InvalidRequestError(f"a put needs at least one sample, got {count}.")
    if count > _MOST_AT_ONCE:
        raise InvalidRequestError(f"a put takes at most {_MOST_AT_ONCE} samples at once, got {count}. Put fewer.")
    capacity = state.config.capacity
    if capacity is not None and count > capacity:
        raise StorageFullError(
            f"Storage capacity exceeded: {count} samples were put at once, the queue holds {capacity} at most "
            f"(total_storage_size). Put fewer at a time, or raise it."
        )
    partition = state.partitions.get(request.partition)
    if isinstance(request, p.ResolveKeys) and request.role is not None:
        _check_groups(state, request, request.role, partition)
    if partition is None:
        return count
    if count and not (isinstance(request, p.Reserve) and request.role is not None):
        partition.check_open(count)
    if not isinstance(request, p.Insert):
        num_rows = len(request.keys) if isinstance(request, p.ResolveKeys) else count
        partition.schema.check(request.fields, request.partition, num_rows)
    return count


def _check_groups(state: PlaneState, request: p.ResolveKeys, terms: p.Terms, partition: Partition | None) -> None:
    """Raises for new groups that can't be made."""
    check_terms(terms)
    state.leases.check_budgets(terms.tasks)
    if len(set(request.keys)) < len(request.keys):
        raise GroupStateError("two of these groups have the same key. Give each its own, or no keys.")
    known = [] if partition is None else [key for key in request.keys if partition.keys.index_of(key) is not None]
    if known:
        raise GroupStateError(
            f"{len(known)} of {len(request.keys)} keys exist in partition {request.partition!r} already, first "
            f"{known[0]!r}; no group was added. Give new keys, or none."
        )


def _admit(state: PlaneState, call: Call, request: Writer, count: int) -> p.Reply | None:
    """Serve the request if there is room; None if there isn't. Done: values that it replaces are being saved by now."""
    if count > state.room():
        return None
    if isinstance(request, p.ResolveKeys):
        return p.Done(request.id) if _must_wait(state, request) else _bind_keys(state, call, request)
    members = request.role if isinstance(request, p.Reserve) else None
    if members is not None:
        group_work.check_members(state, call, request.partition, members, request.count)
    partition = state.get_or_create(request.partition)
    rows = partition.reserve(request.count, for_group=members is not None)
    indexes = partition.table.column("index")[rows]
    if isinstance(request, p.Reserve):
        state.calls.hold(call, Reservation(state, partition, indexes))
        state.producers.announced(call, request.fields)
        return p.Reserved(request.id, p.pack_indexes(indexes), partition.schema.dtypes_with(request.fields))
    for name in request.fields:
        partition.schema.expect(name)
    partition.make_live(rows)
    state.changed(partition)
    state.calls.hold(call, Insertion(state, partition, indexes))
    return describe(request.id, partition, indexes, request.fields, rows)


def _full(state: PlaneState, call: Call, request: Writer, count: int, waited_s: float) -> p.Failed:
    """The reply to a writer that waited too long."""
    free = f"{state.room():,} of {state.config.capacity:,} are free"
    found = no_room(call.client, samples_of(count, request.partition), TOTAL, waited_s, (free,))
    return p.Failed(request.id, StorageFullError.__name__, f"Storage capacity exceeded: {found}")


def held_up_by(state: PlaneState) -> str:
    """Names the tasks that keep most samples, how many no task keeps, and how many heads of groups that have left."""
    partitions = [partition for partition in state.partitions.values() if not is_internal(partition.name)]
    largest = nlargest(_MOST_LOOKED_AT, partitions, key=lambda partition: partition.num_live)
    kept = keepers(
        (partition.num_live, {
            task: (consumer.num_unconsumed, consumer.ledger.num_open_samples)
            for task, consumer in partition.consumers.items()
        })
        for partition in largest
    )  # fmt: skip
    where = f"In the {len(largest)} largest partitions," if len(largest) < len(partitions) else "In the queue,"
    to_do = tuple(to_acknowledge(kept, filter(state.tasks.is_follower, state.tasks.by_name)))
    said = f" {Finding(kind='full', what=where, held_up_by=kept, to_do=to_do)}" if kept else ""
    for partition in state.partitions.values():
        groups = partition.groups
        left = 0 if groups is None else partition.num_heads_held - len(groups.live) - groups.num_fresh
        if left:
            said += (
                f" {left:,} heads of groups that have left (rejected, failed, expired or stale) take room in partition "
                f"{partition.name!r}: kv_clear the keys of those that you need no more."
            )
    return said


def writers_of(state: PlaneState, partition: Partition) -> list[str]:
    """Some clients that have reserved samples of this partition, not published and not cleared since."""
    names: list[str] = []
    for call, held in state.calls.holdings(Reservation):
        if len(names) == _MOST_NAMED:
            break
        if held.serial == partition.serial and call.client not in names and partition.has_reserved(held.indexes):
            names.append(call.client)
    return names


# ---- keys ----


def _new_keys(state: PlaneState, request: p.ResolveKeys) -> list[str]:
    if not request.create:
        return []
    partition = state.partitions.get(request.partition)
    unique = list(dict.fromkeys(request.keys))
    if partition is None:
        return unique
    return [key for key, index in zip(unique, partition.keys.indexes_of(unique), strict=True) if index is None]


def _bind_keys(state: PlaneState, call: Call, request: p.ResolveKeys) -> p.Reply:
    new = _new_keys(state, request)
    partition = state.get_or_create(request.partition) if new else state.partitions.get(request.partition)
    if partition is None:
        return p.Batch(request.id, request.partition, b"", {}, b"")
    if new:
        rows = partition.reserve(len(new))
        indexes = partition.table.column("index")[rows]
        for key, index in zip(new, indexes.tolist(), strict=True):
            partition.keys.bind(key, index)
            state.waits.wake_key((WRITERS, request.partition, key))
        if request.hold:
            state.calls.hold(call, Reservation(state, partition, indexes, keyed=True))
        else:
            partition.make_live(rows)
            state.changed(partition)
            state.calls.hold(call, Insertion(state, partition, indexes))
    if request.hold or request.writes:
        state.producers.announced(call, request.fields)
        # For new ones, too: others may name their keys by now.
        state.calls.hold(call, Permit(state, (call.client, call.number), request))
    return describe_keys(partition, request.id, request.keys)


def describe_keys(partition: Partition, request_id: int, keys: Sequence[str]) -> p.Batch:
    """The samples of the known keys, with every field that all of them have, and the names of those that some lack."""
    known = zip(keys, partition.keys.indexes_of(keys), strict=True)
    found = [(key, index) for key, index in known if index is not None]
    indexes = np.array([index for _, index in found], dtype=np.int64)
    rows = partition.rows_of(indexes)
    fields = partition.schema.fields_of(rows) if found else []
    described = describe(request_id, partition, indexes, fields, rows)
    partial = partition.schema.fields_of_some(rows, besides=fields)
    return msgspec.structs.replace(described, keys=[key for key, _ in found], partial=partial)


# ---- writers to samples that exist ----


def rewrite(state: PlaneState, call: Call, request: Rewrite) -> p.Reply | Wait | Steps:
    """Serve a request that may replace values; it waits while they are being saved."""
    if _must_wait(state, request):
        return _after(state, call, request, _for_saving(state, call, request))
    if isinstance(request, p.CheckFields):
        return _check_fields(state, call, request)
    result = write(state, call, request)
    return _after(state, call, request, result) if isinstance(result, Wait) else result


def _after(state: PlaneState, call: Call, request: Rewrite, wait: Wait) -> Steps:
    """A save may begin while it waits for room, and the queue may be full again when that is over."""
    reply = yield wait
    return (yield from replied(rewrite(state, call, request))) if isinstance(reply, p.Done) else reply


def _for_saving(state: PlaneState, call: Call, request: Rewrite) -> Wait:
    def answer(wait: Wait, has_turn: bool) -> p.Reply | None:
        if not _must_wait(state, request):
            return p.Done(request.id)
        return _kept_waiting(request, state.calls.now - wait.since) if wait.late else None

    return Wait(SAVING, call.since + request.wait_s, answer, order=1.0)


def _must_wait(state: PlaneState, request: Rewrite) -> bool:
    """Whether values that it replaces are being saved, or a freeze waits, which comes first."""
    about_to_be = not state.waits.would_be_first(SAVING, 0.0)
    if not (about_to_be or state.freezes):
        return False
    indexes = replaced(state, request)
    return len(indexes) > 0 and (about_to_be or bool(state.freezes.holds(indexes).any()))


def replaced(state: PlaneState, request: Rewrite) -> p.Indexes:
    """The samples with values that the request would replace."""
    partition = state.partitions.get(request.partition)
    fields = request.writes if isinstance(request, p.ResolveKeys) else list(request.fields)
    if partition is None or not fields:
        return p.NO_INDEXES
    if isinstance(request, p.CheckFields):
        indexes = p.unpack_indexes(request.indexes)
    else:
        known = partition.keys.indexes_of(request.keys)
        indexes = np.array([index for index in known if index is not None], dtype=np.int64)
    rows, found = partition.table.find(indexes)
    has_any = np.zeros(np.count_nonzero(found), dtype=np.bool_)
    for name in fields:
        has_any |= partition.schema.has(name)[rows[found]]
    return indexes[found][has_any]


def _kept_waiting(request: Rewrite, waited_s: float) -> p.Failed:
    """The reply to a writer that waited too long."""
    return p.Failed(request.id, CheckpointError.__name__, _being_saved(request, waited_s))


def _being_saved(request: Rewrite, waited_s: float) -> str:
    return (
        f"values of partition {request.partition!r} that this put replaces are being saved in a checkpoint; it waited "
        f"{waited_s:.1f} s. Put again later, or raise put_timeout_s."
    )


def _check_not_saved(state: PlaneState, first: Call) -> None:
    """Raises for a write that took so long that a save no longer waited for it."""
    for each in first.holdings:
        if isinstance(each, Permit) and state.freezes.holds(replaced(state, each.request)).any():
            raise CheckpointError(_being_saved(each.request, state.calls.now - first.since))


def _check_fields(state: PlaneState, call: Call, request: p.CheckFields) -> p.Reply:
    """Check that these fields may be written to these samples."""
    partition = state.get(request.partition)
    rows = partition.rows_of(p.unpack_indexes(request.indexes))
    partition.schema.check(request.fields, request.partition, len(rows))
    state.producers.announced(call, request.fields)
    state.calls.hold(call, Permit(state, (call.client, call.number), request))
    return p.Done(request.id, partition.schema.dtypes_with(request.fields))


# ---- the end of a write ----


def publish(state: PlaneState, call: Call, request: p.Publish) -> p.Reply:
    """Make fields visible: all of them, or none and an error. It ends what the first call of the write holds."""
    partition = state.get(request.partition)
    for spec in request.fields.values():
        if spec.units is not None:
            state.units.check(spec)
    indexes = p.unpack_indexes(request.indexes)
    if request.tags:
        check_tags(request.tags.values())
    first: Call | None = call
    if not call.is_registered or request.completes != call.number:
        first = state.calls.find(call.client, request.completes)
    if state.freezes and first is not None:
        _check_not_saved(state, first)
    earlier = partition.commits.first_for(indexes) if partition.commits else []
    rows = _published(state, call, request, partition, indexes)
    state.producers.published(call, request.fields)
    if first is None or not first.holdings or not _complete(state, call, request, first, earlier):
        state.calls.hold(call, Effect())
    if request.describe:
        described = describe(request.id, partition, indexes, partition.schema.fields_of(rows), rows)
        return msgspec.structs.replace(described, committing=earlier)
    return p.Published(request.id, earlier)


def _commits_at_once(state: PlaneState, request: p.Publish) -> bool:
    """Whether there is nothing to commit, or the unit of this process alone does, as soon as this is published."""
    return not request.fields or (0 in state.units.by_number and all(f.units is None for f in request.fields.values()))


def _published(state: PlaneState, call: Call, request: p.Publish, partition: Partition, indexes: p.Indexes) -> Rows:
    """Make the fields visible, and new samples what they are besides. Returns the rows."""
    role, now = request.role, state.calls.now
    if isinstance(role, p.Terms):
        rows = partition.publish(indexes, request.fields, request.tags, now, RowState.HEAD)
        group_work.added(state, partition, rows, role)
        return rows
    if role is not None:
        group_work.check_members(state, call, request.partition, role, len(indexes))
        group_work.groups_of(partition).mark(role, partition.rows_of(indexes), len(indexes), request.fields)
    rows = partition.publish(indexes, request.fields, request.tags, now)
    _appeared(state, call, partition, role, indexes)
    if request.tags and role is None and partition.groups is not None:
        group_work.look_again(state, partition, request.tags)
    return rows


def _appeared(
    state: PlaneState, call: Call, partition: Partition, members: p.Members | None, indexes: p.Indexes
) -> None:
    """These samples can be read: what waits for them is woken, and their group goes on."""
    if members is None:
        state.changed(partition)
    else:
        group_work.joined(state, call, partition, members, indexes)


def _complete(state: PlaneState, call: Call, request: p.Publish, first: Call, earlier: list[p.WriteName]) -> bool:
    """End what the first call holds. Returns whether the publish now holds something that keeps its answer."""
    partition = state.get(request.partition)
    keeps = False
    indexes = p.unpack_indexes(request.indexes)
    for own in list(first.holdings):
        if isinstance(own, Reservation):
            own.complete(request.indexes)
            if request.role is not None:
                keeps = isinstance(request.role, p.Terms) or not request.role.closes  # a close can't be undone
                if keeps:
                    state.calls.hold(call, group_work.NewRows(state, partition, request.role, indexes))
            elif request.uncommitted and not own.keyed:
                state.calls.hold(call, NewSamples(state, partition, indexes))
                keeps = True
        elif isinstance(own, Permit) and request.uncommitted:
            if len(indexes) and not _commits_at_once(state, request):
                partition.commits[own.write] = indexes
            state.calls.hold(call, Committing(own, partition.commits, earlier))
            keeps = True
        elif isinstance(own, Permit):
            own.keep()
        else:
            continue
        first.holdings.remove(own)
    if first.number != call.number:
        state.calls.forget_if_over(first)
    return keeps
