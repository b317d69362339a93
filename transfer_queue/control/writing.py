# SPDX-License-Identifier: Apache-2.0
"""The verbs of producers: reserve, insert, name by key, check, publish; and producers that wait for room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control import checkpoints
from transfer_queue.control.partition import Partition
from transfer_queue.control.serving import describe
from transfer_queue.control.sessions import Record
from transfer_queue.control.state import Parked, PlaneState, To, reply_or_error
from transfer_queue.errors import InvalidRequestError, StorageFullError

WRITERS = "\0writers"
"""Wait queue of parked writers: one for the whole plane, because the capacity is the plane's."""

Writer = p.Reserve | p.Insert | p.ResolveKeys
_MOST_AT_ONCE = 2**24
"""Samples of one request: more is a mistake, and would take gigabytes before it failed."""


class Reservation(Record):
    """An active write: its reserved samples, and possibly a permit to replace values. Publish ends it."""

    holds = True
    __slots__ = ("_state", "call", "client", "indexes", "partition", "serial")

    def __init__(
        self, state: PlaneState, client: str, request: p.Reserve | checkpoints.Rewrite, reply: p.Reply,
        partition: Partition, indexes: p.Indexes,
    ) -> None:  # fmt: skip
        super().__init__(type(request), reply)
        self._state = state
        self.client, self.call = client, request.id
        self.partition, self.serial, self.indexes = partition.name, partition.serial, indexes

    def undo(self) -> bool:
        self._state.freezes.end_permit(self.client, self.call)
        self._release(self.indexes)
        return True

    def complete(self, published: bytes, uncommitted: bool) -> None:
        """The write is visible; what it reserved and didn't publish is released."""
        if not uncommitted:
            self._state.freezes.end_permit(self.client, self.call)
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
            state.mark_dirty(self.partition)
        state.delete(indexes[~state.holds(indexes)])


class UncommittedPublish(Record):
    """A publish whose values may not be committed yet: a permit to replace some lasts until then."""

    __slots__ = ("_state", "client", "first_call")

    def __init__(self, state: PlaneState, client: str, request: p.Publish, reply: p.Reply) -> None:
        super().__init__(p.Publish, reply)
        self._state, self.client, self.first_call = state, client, request.completes

    def undo(self) -> bool:
        self.received()
        return False

    def received(self) -> None:
        self._state.freezes.end_permit(self.client, self.first_call)


class CompletePut(Record):
    """New samples with their values, as the put or its publish leaves them. If its session ends, they stay: its caller
    may have the answer.
    """

    __slots__ = ("_indexes", "_num_rewrites", "_partition", "_serial", "_state")

    def __init__(
        self, state: PlaneState, request: p.Put | p.Publish, reply: p.Reply, partition: Partition, indexes: p.Indexes
    ) -> None:
        super().__init__(type(request), reply)
        self._state, self._partition, self._serial = state, partition.name, partition.serial
        self._num_rewrites, self._indexes = partition.num_rewrites, indexes

    def cancel(self) -> bool:
        """Delete the samples, unless somebody has got one or written to it: a put is whole or not there."""
        state = self._state
        partition = state.find(self._partition, self._serial)
        if partition is None or not partition.take_back(self._indexes, self._num_rewrites):
            return False
        state.delete(state.freezes.keep(self._indexes))
        state.mark_dirty(self._partition)
        return True


class Insertion(Record):
    """New samples without values."""

    __slots__ = ("_state", "indexes", "partition", "serial")

    def __init__(
        self, state: PlaneState, request: Writer, reply: p.Reply, partition: Partition, indexes: p.Indexes
    ) -> None:
        super().__init__(type(request), reply)
        self._state = state
        self.partition, self.serial, self.indexes = partition.name, partition.serial, indexes

    def undo(self) -> bool:
        partition = self._state.find(self.partition, self.serial)
        if partition is not None:
            partition.uninsert(self.indexes)
            self._state.mark_dirty(self.partition)
        return True


def write(state: PlaneState, client: str, request: Writer, now: float) -> p.Reply | None:
    """Serve a writer at once if no other waits or it needs no room; otherwise park it."""
    count = count_of(state, request)
    reply = None
    if count and len(state.writers):
        check(state, request)
    else:
        reply = admit(state, client, request)
    if reply is None:
        deadline = now + request.wait_s
        parked = state.waiters.park(client, request, now, deadline, WRITERS, 0.0, (request.partition, None))
        state.writers.add(parked, count, deadline)
    return reply


def rewrite(state: PlaneState, client: str, request: checkpoints.Rewrite, now: float) -> p.Reply | None:
    """Serve a request that may replace values; park it while they are being saved."""
    if checkpoints.park_rewrite(state, client, request, now):
        return None
    if isinstance(request, p.CheckFields):
        return check_fields(state, client, request)
    return write(state, client, request, now)


def admit_writers(state: PlaneState) -> list[To]:
    """Answer writers that fit, as the wait queue allows, and writers that can no longer succeed.

    Many take several turns. None is examined while neither the room nor their partitions change.
    """
    replies: list[To] = []
    state.writers_left = False
    while len(state.writers):
        room, partitions = state.room(), _their_partitions(state)
        seen_room, seen = state.writers_saw
        state.writers_saw = ((room, len(state.writers)), partitions)
        if any(seen.get(name) != stamp for name, stamp in partitions.items()):
            replies += _check_again(state)
        elif seen_room == (room, len(state.writers)):
            break
        if state.budget.num_answers <= 0:
            state.writers_saw, state.writers_left = (None, partitions), True
            break
        # One of them may seal the partition that others wait for.
        for parked in state.writers.admit(2**62 if room is None else room, state.budget.num_answers):
            state.budget.examined(answered=True)
            reply = reply_or_error(parked.request.id, partial(admit, state, parked.client, parked.request))
            assert reply is not None, "there is room for what the queue of writers admits"
            replies.append(_answer(state, parked, reply))
    return replies


def _their_partitions(state: PlaneState) -> dict[str, object]:
    """While this stays equal, the same of the waiting writers can succeed, and need the same room."""
    found: dict[str, object] = {}
    for name, _ in state.waiters.lines_of(WRITERS):
        partition = state.partitions.get(name)
        found[name] = partition and (
            partition.serial, partition.sealed, len(partition.keys), partition.schema.num_declared
        )  # fmt: skip
    return found


def _check_again(state: PlaneState) -> list[To]:
    replies = []
    for parked in state.writers.items():
        refused = reply_or_error(parked.request.id, partial(check, state, parked.request))
        if refused is not None:
            replies.append(_answer(state, parked, refused))
        elif isinstance(parked.request, p.ResolveKeys):  # its keys may have been created or cleared
            state.writers.resize(parked, count_of(state, parked.request))
    return replies


def _answer(state: PlaneState, parked: Parked, reply: p.Reply) -> To:
    state.waiters.remove(parked)
    state.writers.remove(parked)
    return To(parked.client, reply)


def admit_rewriters(state: PlaneState, now: float) -> list[To]:
    """Serve writers that no longer wait for a checkpoint; they may then wait for room."""
    replies = []
    for client, request in checkpoints.take_rewriters(state):
        reply = reply_or_error(request.id, partial(rewrite, state, client, request, now))
        if reply is not None:
            replies.append(To(client, reply))
    return replies


def count_of(state: PlaneState, request: Writer) -> int:
    """The number of samples that the request would add."""
    if isinstance(request, p.ResolveKeys):
        return len(_new_keys(state, request))
    return request.count


def check(state: PlaneState, request: Writer) -> None:
    """Raises for errors that waiting can't resolve, before anything is reserved."""
    count = count_of(state, request)
    if not isinstance(request, p.ResolveKeys) and count < 1:
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
    if partition is None:
        return
    if count:
        partition.check_open(count)
    if not isinstance(request, p.Insert):
        num_rows = len(request.keys) if isinstance(request, p.ResolveKeys) else request.count
        partition.schema.check(request.fields, request.partition, num_rows)


def admit(state: PlaneState, client: str, request: Writer) -> p.Reply | None:
    """Serve the request if there is room; None if there isn't."""
    check(state, request)
    count = count_of(state, request)
    room = state.room()
    if room is not None and count > room:
        return None
    if isinstance(request, p.ResolveKeys):
        return _bind_keys(state, client, request)
    partition = state.get_or_create(request.partition)
    rows = partition.reserve(request.count)
    indexes = partition.table.column("index")[rows]
    if isinstance(request, p.Reserve):
        several = partition.schema.dtypes_with(request.fields)
        reserved = p.Reserved(request.id, p.pack_indexes(indexes), several)
        state.calls.add(client, request.id, Reservation(state, client, request, reserved, partition, indexes))
        state.producers.announced(client, request.fields)
        return reserved
    for name in request.fields:
        partition.schema.expect(name)
    partition.make_live(rows)
    state.mark_dirty(request.partition)
    inserted = describe(request.id, partition, indexes, request.fields, rows)
    state.calls.add(client, request.id, Insertion(state, request, inserted, partition, indexes))
    return inserted


def full(state: PlaneState, request: Writer, waited_s: float) -> p.Failed:
    """The reply to a writer that waited too long."""
    text = (
        f"Storage capacity exceeded: {count_of(state, request)} samples for partition {request.partition!r} waited "
        f"{waited_s:.1f} s for room, {state.room()} of {state.config.capacity} are free (total_storage_size). "
        f"{held_up_by(state)}Clear consumed samples or partitions, raise it, or raise put_timeout_s."
    )
    return p.Failed(request.id, StorageFullError.__name__, text)


def held_up_by(state: PlaneState) -> str:
    """A sentence that names the tasks that keep most samples from being cleared, and says how many no task keeps."""
    consumed: Counter[str] = Counter()
    acked: Counter[str] = Counter()
    unread = done = 0
    for partition in state.partitions.values():
        unread += partition.num_live if not partition.consumers else 0
        kept = 0
        for task, consumer in partition.consumers.items():
            consumed[task] += consumer.num_unconsumed
            acked[task] += consumer.ledger.num_open_samples()
            kept += consumer.num_unconsumed + consumer.ledger.num_open_samples()
        done += max(0, partition.num_live - kept) if partition.consumers else 0  # or more: tasks may keep the same ones
    parts = [f"task {task!r} has not consumed {count} of them" for task, count in consumed.most_common(2) if count]
    parts += [f"task {task!r} has not acknowledged {count} of them" for task, count in acked.most_common(2) if count]
    parts += [f"no task reads {unread} of them"] if unread else []
    parts += [f"at least {done} of them are consumed and not cleared (clear_consumed, clear_partition)"] if done else []
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}. " if text else ""


def writers_of(state: PlaneState, partition: Partition, most: int) -> list[str]:
    """Up to ``most`` clients that have reserved samples of this partition, not published and not cleared since."""
    names: dict[str, None] = {}
    for record in state.calls:
        if (
            isinstance(record, Reservation) and record.serial == partition.serial and record.client not in names
            and partition.has_reserved(record.indexes)
        ):  # fmt: skip
            names[record.client] = None
            if len(names) == most:
                break
    return list(names)


def _new_keys(state: PlaneState, request: p.ResolveKeys) -> list[str]:
    if not request.create:
        return []
    partition = state.partitions.get(request.partition)
    unique = list(dict.fromkeys(request.keys))
    if partition is None:
        return unique
    return [key for key, index in zip(unique, partition.keys.indexes_of(unique), strict=True) if index is None]


def _bind_keys(state: PlaneState, client: str, request: p.ResolveKeys) -> p.Reply:
    new = _new_keys(state, request)
    replaces = len(checkpoints.replaced(state, request)) > 0
    partition = state.get_or_create(request.partition) if new else state.partitions.get(request.partition)
    if partition is None:
        return p.Batch(request.id, request.partition, b"", {}, b"")
    held = np.empty(0, dtype=np.int64)
    if new:
        rows = partition.reserve(len(new))
        held = partition.table.column("index")[rows]
        for key, index in zip(new, held.tolist(), strict=True):
            partition.keys.bind(key, index)
        if not request.hold:
            partition.make_live(rows)
            state.mark_dirty(request.partition)
    batch = describe_keys(partition, request.id, request.keys)
    if replaces:
        state.freezes.permit(client, request.id)
    if replaces or (new and request.hold):
        state.calls.add(client, request.id, Reservation(state, client, request, batch, partition, held))
        state.producers.announced(client, request.fields)
    elif new:
        state.calls.add(client, request.id, Insertion(state, request, batch, partition, held))
    return batch


def describe_keys(partition: Partition, request_id: int, keys: Sequence[str]) -> p.Batch:
    """The samples of the known keys, with every field that all of them have, and the names of those that some lack."""
    known = zip(keys, partition.keys.indexes_of(keys), strict=True)
    found = [(key, index) for key, index in known if index is not None]
    indexes = np.array([index for _, index in found], dtype=np.int64)
    rows = partition.rows_of(indexes)
    fields = partition.schema.fields_of(rows) if found else []
    described = describe(request_id, partition, indexes, fields, rows, keys=[key for key, _ in found])
    partial = partition.schema.fields_of_some(rows, besides=fields)
    return msgspec.structs.replace(described, partial=partial) if partial else described


def publish(state: PlaneState, client: str, request: p.Publish, now: float) -> p.Reply:
    """Make fields visible: all of them, or none and an error."""
    partition = state.get(request.partition)
    state.units.check(request.fields.values())
    indexes = p.unpack_indexes(request.indexes)
    rows = partition.publish(indexes, request.fields, request.tags, now)
    state.producers.published(client, request.fields, now)
    state.mark_dirty(request.partition)
    reply: p.Reply = p.Published(request.id)
    if request.describe:
        reply = describe(request.id, partition, indexes, partition.schema.fields_of(rows), rows)
    reservation = state.calls.get(client, request.completes)
    if isinstance(reservation, Reservation):
        state.calls.take(client, request.completes)
        reservation.complete(request.indexes, request.uncommitted)
    record = Record(p.Publish, reply)
    if request.uncommitted and isinstance(reservation, Reservation) and reservation.kind is p.Reserve:
        record = CompletePut(state, request, reply, partition, indexes)
    elif request.uncommitted:
        record = UncommittedPublish(state, client, request, reply)
    state.calls.add(client, request.id, record)
    return reply


def check_fields(state: PlaneState, client: str, request: p.CheckFields) -> p.Reply:
    """Check that these fields may be written to these samples."""
    partition = state.get(request.partition)
    rows = partition.rows_of(p.unpack_indexes(request.indexes))
    partition.schema.check(request.fields, request.partition, len(rows))
    reply = p.Done(request.id, partition.schema.dtypes_with(request.fields))
    state.producers.announced(client, request.fields)
    if len(checkpoints.replaced(state, request)):
        state.freezes.permit(client, request.id)
        nothing = np.empty(0, dtype=np.int64)
        state.calls.add(client, request.id, Reservation(state, client, request, reply, partition, nothing))
    return reply
