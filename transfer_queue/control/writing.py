# SPDX-License-Identifier: Apache-2.0
"""The verbs of producers: reserve, insert, name by key, publish, cancel. Each returns a reply, or None while parked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control import checkpoints
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import RowState
from transfer_queue.control.serving import describe
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import InvalidRequestError, StorageFullError

WRITERS = "\0writers"
"""Lane of parked writers: one queue for the whole plane, since capacity is the plane's."""

Writer = p.Reserve | p.Insert | p.ResolveKeys


def count_of(state: PlaneState, request: Writer) -> int:
    """Samples that the request would add."""
    if isinstance(request, p.ResolveKeys):
        return len(_new_keys(state, request))
    return request.count


def check(state: PlaneState, request: Writer) -> None:
    """Raises for what no waiting can mend, before anything is reserved."""
    count = count_of(state, request)
    if not isinstance(request, p.ResolveKeys) and count < 1:
        raise InvalidRequestError(f"a put needs at least one sample, got {count}.")
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
        partition.schema.check(request.fields, request.partition)


def admit(state: PlaneState, client: str, request: Writer) -> p.Reply | None:
    """Carry the request out if there is room, None if there isn't."""
    check(state, request)
    count = count_of(state, request)
    room = state.room()
    if room is not None and count > room:
        return None
    if isinstance(request, p.ResolveKeys):
        return _bind_keys(state, client, request)
    partition = state.get_or_create(request.partition)
    rows = partition.hold(request.count, state.holder(client))
    indexes = partition.table.column("index")[rows]
    if isinstance(request, p.Reserve):
        _may_be_undone(state, client, request, partition, indexes)
        return p.Reserved(request.id, p.pack_indexes(indexes), partition.schema.dtypes())
    for name in request.fields:
        partition.schema.expect(name)
    partition.make_live(rows)
    state.touch(request.partition)
    undo = partial(_undo_insert, state, partition.name, partition.incarnation, indexes)
    state.answered.remember(client, request.id, indexes.nbytes, undo)
    return describe(request.id, partition, indexes, request.fields, rows)


def full(state: PlaneState, request: Writer, waited_s: float) -> p.Failed:
    """The reply to a writer that waited in vain."""
    text = (
        f"Storage capacity exceeded: {count_of(state, request)} samples for partition {request.partition!r} waited "
        f"{waited_s:.1f} s for room, {state.room()} of {state.config.capacity} are free (total_storage_size). "
        f"Clear consumed samples or partitions, raise it, or raise put_timeout_s."
    )
    return p.Failed(request.id, StorageFullError.__name__, text)


def _new_keys(state: PlaneState, request: p.ResolveKeys) -> list[str]:
    if not request.create:
        return []
    partition = state.partitions.get(request.partition)
    unique = dict.fromkeys(request.keys)
    return [key for key in unique if partition is None or partition.keys.index_of(key) is None]


def _bind_keys(state: PlaneState, client: str, request: p.ResolveKeys) -> p.Reply:
    new = _new_keys(state, request)
    replaces = len(checkpoints.replaced(state, request)) > 0
    partition = state.get_or_create(request.partition) if new else state.partitions.get(request.partition)
    if partition is None:
        return p.Batch(request.id, request.partition, b"", {}, b"")
    held = np.empty(0, dtype=np.int64)
    if new:
        rows = partition.hold(len(new), state.holder(client))
        held = partition.table.column("index")[rows]
        for key, index in zip(new, held.tolist(), strict=True):
            partition.keys.bind(key, index)
        if not request.hold:
            partition.make_live(rows)
            state.touch(request.partition)
    batch = describe_keys(partition, request.id, request.keys)
    if replaces:
        state.frozen.give_leave(client, request.partition, batch.indexes)
    if request.hold and (new or replaces):
        _may_be_undone(state, client, request, partition, held, batch.indexes if replaces else None)
    return batch


def _may_be_undone(
    state: PlaneState, client: str, request: p.Request, partition: Partition, held: p.Indexes,
    leave: bytes | None = None,
) -> None:  # fmt: skip
    """Should the client have given up already, these reservations and this leave are nobody's."""
    undo = partial(_undo_hold, state, client, partition.name, partition.incarnation, held, leave)
    state.answered.remember(client, request.id, held.nbytes + len(leave or b""), undo)


def _undo_hold(
    state: PlaneState, client: str, name: str, incarnation: int, held: p.Indexes, leave: bytes | None
) -> None:
    if leave is not None:
        state.frozen.end_leave(client, name, leave)
    partition = state.find(name, incarnation)
    if partition is not None:
        rows, found = partition.table.find(held)
        partition.give_back(rows[found])  # another writer of the same key may have published it
        state.touch(name)


def _undo_insert(state: PlaneState, name: str, incarnation: int, indexes: p.Indexes) -> None:
    partition = state.find(name, incarnation)
    if partition is not None:
        partition.uninsert(indexes)
        state.touch(name)


def describe_keys(partition: Partition, request_id: int, keys: Sequence[str]) -> p.Batch:
    """The samples of those keys that are known, with every field that all of them have."""
    found = [(key, index) for key in keys if (index := partition.keys.index_of(key)) is not None]
    indexes = np.array([index for _, index in found], dtype=np.int64)
    rows = partition.rows_of(indexes)
    fields = partition.schema.fields_of(rows) if found else []
    return describe(request_id, partition, indexes, fields, rows, keys=[key for key, _ in found])


def publish(state: PlaneState, client: str, request: p.Publish, now: float) -> p.Reply:
    """Make fields visible. Refused whole or done whole."""
    if state.frozen.has_leaves:
        state.frozen.end_leave(client, request.partition, request.indexes)
    partition = state.get(request.partition)
    indexes = p.unpack_indexes(request.indexes)
    rows = partition.publish(indexes, request.fields, request.tags, now)
    state.producers.published(request.partition, client, request.fields)
    state.touch(request.partition)
    reply: p.Reply
    if request.describe:
        reply = describe(request.id, partition, indexes, partition.schema.fields_of(rows), rows)
    else:
        reply = p.Published(request.id, _reserve_next(state, client, partition, request))
    if request.unused:
        partition.give_back_ahead(p.unpack_indexes(request.unused), state.holder(client))
    return reply


def _reserve_next(state: PlaneState, client: str, partition: Partition, request: p.Publish) -> bytes:
    """A reservation for the writer's next puts, where that is free of charge: never under a capacity."""
    count = request.reserve_next
    if count < 1 or partition.sealed or partition.num_free or state.config.capacity is not None:
        return b""
    if partition.num_samples is not None and partition.num_published + count > partition.num_samples:
        return b""
    rows = partition.hold(count, state.holder(client), RowState.HELD_AHEAD)
    indexes = partition.table.column("index")[rows]
    _may_be_undone(state, client, request, partition, indexes)
    return p.pack_indexes(indexes)


def cancel(state: PlaneState, client: str, request: p.Cancel) -> p.Reply:
    """Give back what this client reserved and did not publish; another writer may hold one of the same keys.

    What was cleared since is named too: its values may have been stored after the clear.
    """
    state.frozen.end_leave(client, request.partition, request.indexes)
    indexes = p.unpack_indexes(request.indexes)
    state.unstage(client, indexes)
    partition = state.partitions.get(request.partition)
    given_back = np.empty(0, dtype=np.int64)
    if partition is not None:
        rows, found = partition.table.find(indexes)
        rows = rows[found]
        given_back = partition.give_back(rows[partition.table.column("holder")[rows] == state.holder(client)])
        indexes = indexes[~found]
        state.touch(request.partition)
    if len(indexes):
        given_back = np.concatenate([given_back, indexes[~state.holds(indexes)]])
    return p.Cleared(request.id, p.pack_indexes(state.frozen.keep(given_back)))


def check_fields(state: PlaneState, client: str, request: p.CheckFields) -> p.Reply:
    """May these fields be written onto these samples?"""
    partition = state.get(request.partition)
    partition.rows_of(p.unpack_indexes(request.indexes))
    partition.schema.check(request.fields, request.partition)
    if len(checkpoints.replaced(state, request)):
        state.frozen.give_leave(client, request.partition, request.indexes)
    return p.Done(request.id, partition.schema.dtypes())
