# SPDX-License-Identifier: Apache-2.0
"""The verbs of checkpoints: freeze and thaw the state, stage values, restore; and the requests that wait meanwhile."""

from __future__ import annotations

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control.calls import Record
from transfer_queue.control.indexes import MAX_INDEX
from transfer_queue.control.lifecycle import cleared
from transfer_queue.control.snapshot import Restored, decode, live_indexes, saved_indexes, snapshot
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import CheckpointError, StorageFullError

FREEZERS = "\0freezers"
"""Wait queue of freezes, which wait for writers that are replacing values."""
REWRITERS = "\0rewriters"
"""Wait queue of writers that replace values, which wait for freezes to end."""

Rewrite = p.CheckFields | p.ResolveKeys


class FreezeRecord(Record):
    """An active freeze."""

    holds = True
    __slots__ = ("_call", "_client", "_state")

    def __init__(self, state: PlaneState, client: str, reply: p.Frozen) -> None:
        super().__init__(p.Freeze, reply)
        self._state, self._client, self._call = state, client, reply.id

    def undo(self) -> bool:
        self._state.delete(self._state.frozen.end(self._client, self._call))
        return True


class Staged(Record):
    """Samples with values that the client stores for a restore."""

    holds = True
    __slots__ = ("_state", "indexes")

    def __init__(self, state: PlaneState, reply: p.Done, indexes: p.Indexes) -> None:
        super().__init__(p.Stage, reply)
        self._state, self.indexes = state, indexes

    def undo(self) -> bool:
        self._state.delete(self.indexes)
        return True


def freeze(state: PlaneState, client: str, request: p.Freeze, now: float) -> p.Reply | None:
    """None: parked until no writer is replacing values."""
    if state.frozen.has_leaves:
        state.waiters.park(client, request, now, now + request.wait_s, FREEZERS, 0.0)
        return None
    return take(state, client, request, now)


def take(state: PlaneState, client: str, request: p.Freeze, now: float) -> p.Reply:
    """Snapshot the state. A write that has a permit but is still unpublished is assumed never to be published."""
    data = snapshot(state, now)
    state.frozen.begin(client, request.id, live_indexes(state))
    reply = p.Frozen(request.id, data)
    state.calls.add(client, request.id, FreezeRecord(state, client, reply))
    return reply


def thaw(state: PlaneState, client: str, request: p.Thaw) -> p.Reply:
    """End this call's freeze, if there is one."""
    if isinstance(state.calls.get(client, request.call), FreezeRecord):
        state.calls.take(client, request.call)
    return cleared(state, client, request, state.frozen.end(client, request.call))


def park_rewrite(state: PlaneState, client: str, request: Rewrite, now: float) -> bool:
    """Park the request if it would replace values that are being saved. Returns whether it was parked."""
    if not _must_wait(state, request):
        return False
    state.waiters.park(client, request, now, now + request.wait_s, REWRITERS, 0.0)
    return True


def take_rewriters(state: PlaneState) -> list[tuple[str, Rewrite]]:
    """Remove and return the writers that no longer have to wait."""
    free = [parked for parked in state.waiters.lane(REWRITERS) if not _must_wait(state, parked.request)]
    for parked in free:
        state.waiters.remove(parked)
    return [(parked.client, parked.request) for parked in free]


def _must_wait(state: PlaneState, request: Rewrite) -> bool:
    about_to_be = state.waiters.first_come(FREEZERS) is not None
    if not (about_to_be or state.frozen):
        return False
    indexes = replaced(state, request)
    return len(indexes) > 0 and (about_to_be or bool(state.frozen.holds(indexes).any()))


def replaced(state: PlaneState, request: Rewrite) -> p.Indexes:
    """The samples with values that the request would replace."""
    partition, indexes = state.partitions.get(request.partition), np.empty(0, dtype=np.int64)
    fields = request.writes if isinstance(request, p.ResolveKeys) else list(request.fields)
    if partition is None or not fields:
        return indexes
    if isinstance(request, p.CheckFields):
        indexes = p.unpack_indexes(request.indexes)
    else:
        known = (partition.keys.index_of(key) for key in request.keys)
        indexes = np.array([index for index in known if index is not None], dtype=np.int64)
    rows, found = partition.table.find(indexes)
    if not partition.table.size:
        return indexes[:0]
    lacking = np.ones(len(indexes), dtype=np.bool_)
    for name in fields:
        lacking &= ~partition.schema.has(name)[rows]
    return indexes[found & ~lacking]


def kept_waiting(request: Rewrite, waited_s: float) -> p.Failed:
    """The reply to a writer that waited too long."""
    text = (
        f"values of partition {request.partition!r} that this put replaces are being saved in a checkpoint; it waited "
        f"{waited_s:.1f} s. Put again later, or raise put_timeout_s."
    )
    return p.Failed(request.id, CheckpointError.__name__, text)


def stage(state: PlaneState, client: str, request: p.Stage) -> p.Reply:
    """Reserve indexes for samples to be restored, shifted if theirs are in use here."""
    indexes = p.unpack_indexes(request.indexes)
    capacity = state.config.capacity
    if len(indexes) and not 0 <= int(indexes.min()) <= int(indexes.max()) < MAX_INDEX - state.allocator.next_index:
        raise CheckpointError(f"the saved samples' indexes are out of range: {indexes.min()} to {indexes.max()}.")
    if capacity is not None and len(indexes) > capacity:
        raise StorageFullError(
            f"Storage capacity exceeded: the checkpoint holds {len(indexes)} samples, the queue takes {capacity} "
            f"(total_storage_size). Load it into a queue that takes more."
        )
    if not len(indexes):
        return p.Done(request.id, 0)
    shift = max(0, state.allocator.next_index - int(indexes.min()))
    state.allocator.next_index = int(indexes.max()) + shift + 1
    reply = p.Done(request.id, shift)
    state.calls.add(client, request.id, Staged(state, reply, indexes + shift))
    return reply


def restore(state: PlaneState, client: str, request: p.Restore, now: float) -> p.Reply:
    """Replace the state by the saved one, or change nothing. Waiting requests are examined again."""
    saved = decode(request.state)
    indexes = saved_indexes(saved) + request.shift
    staged = [(call, record) for call, record in state.calls.of(client) if isinstance(record, Staged)]
    _check_staged(state, [record.indexes for _, record in staged], indexes)
    restored = Restored(saved, state, request.shift, now)
    old = [np.empty(0, dtype=np.int64)]
    for partition in state.partitions.values():
        old.append(partition.drop())
        state.discard(partition)
    state.partitions, state.tasks = restored.partitions, restored.tasks
    state.allocator, state.incarnations = restored.allocator, restored.incarnations
    for call, record in staged:
        state.calls.take(client, call)
        state.delete(record.indexes[~np.isin(record.indexes, indexes)])
    for lane in state.waiters.lanes():
        if not lane.startswith("\0"):
            state.touch(lane)
    return cleared(state, client, request, state.frozen.keep(np.concatenate(old)))


def _check_staged(state: PlaneState, sets: list[p.Indexes], indexes: p.Indexes) -> None:
    used = indexes[indexes < state.allocator.next_index]
    staged = np.concatenate([np.full(1, -1, dtype=np.int64), *sets])
    staged.sort()
    if (staged[staged.searchsorted(used, side="right") - 1] != used).any():
        raise CheckpointError(
            "the saved samples' indexes are in use here, and no others were reserved for them. Load the storage part "
            "of the checkpoint first, with the same client."
        )
