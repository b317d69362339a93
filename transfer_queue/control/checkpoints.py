# SPDX-License-Identifier: Apache-2.0
"""The verbs of checkpoints: freeze and thaw the state, stage values, restore; and requests that wait for a freeze."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from transfer_queue import protocol as p
from transfer_queue.control.lifecycle import cleared
from transfer_queue.control.restoring import Restored
from transfer_queue.control.rows import MAX_INDEX, positions_in
from transfer_queue.control.saved import decode, saved_indexes
from transfer_queue.control.sessions import Record
from transfer_queue.control.snapshot import Snapshot
from transfer_queue.control.state import PlaneState, To, reply_or_error
from transfer_queue.errors import CheckpointError, StorageFullError

T = TypeVar("T")
FREEZERS = "\0freezers"
"""Wait queue of freezes, which wait for writers that are replacing values."""
REWRITERS = "\0rewriters"
"""Wait queue of writers that replace values, which wait for freezes to end."""

Rewrite = p.CheckFields | p.ResolveKeys


class FreezeRecord(Record):
    """An active freeze."""

    holds = True
    __slots__ = ("_call", "_client", "_part", "_sent", "_snapshot", "_state")

    def __init__(self, state: PlaneState, client: str, call: int, snapshot: Snapshot) -> None:
        super().__init__(p.Freeze, p.Done(call))
        self._state, self._client, self._call, self._snapshot = state, client, call, snapshot
        self._part, self._sent = -1, b""
        self.reply = self.read(call, 0)

    def read(self, call: int, part: int) -> p.Frozen:
        """The next part, or the last one again. After the final part, nothing is kept for further ones."""
        snapshot = self._snapshot
        if part == self._part + 1 < snapshot.num_parts:
            self._part, self._sent = part, snapshot.part(part)
            if part + 1 == snapshot.num_parts:
                snapshot.close()
        elif part != self._part:
            raise CheckpointError(f"part {part} of a frozen state comes after part {self._part}. Save again.")
        return p.Frozen(call, self._sent, snapshot.num_parts)

    def end(self) -> p.Indexes:
        """Returns what was cleared since, and may be deleted now."""
        self._snapshot.close()
        return self._state.freezes.end(self._client, self._call)

    def undo(self) -> bool:
        self._state.delete(self.end())
        return True


class StagedSamples(Record):
    """Samples whose values the client stores for a restore. ``indexes`` ascend."""

    holds = True
    __slots__ = ("_state", "indexes")

    def __init__(self, state: PlaneState, reply: p.Done, indexes: p.Indexes) -> None:
        super().__init__(p.Stage, reply)
        self._state, self.indexes = state, indexes

    def undo(self) -> bool:
        self._state.delete(self.indexes)
        return True


def freeze(state: PlaneState, client: str, request: p.Freeze, now: float) -> p.Reply | None:
    """Freeze the state. Returns None while parked, until no writer is replacing values."""
    if state.freezes.has_permits:
        state.waiters.park(client, request, now, now + request.wait_s, FREEZERS, 0.0)
        return None
    return take(state, client, request, now)


def admit_freezes(state: PlaneState, now: float) -> list[To]:
    """Answer the parked freezes once no writer is replacing values."""
    replies = []
    while not state.freezes.has_permits and (parked := state.waiters.first_of(FREEZERS)) is not None:
        state.waiters.remove(parked)
        reply = reply_or_error(parked.request.id, partial(take, state, parked.client, parked.request, now))
        if reply is not None:
            replies.append(To(parked.client, reply))
    return replies


def take(state: PlaneState, client: str, request: p.Freeze, now: float) -> p.Reply:
    """Freeze the state. A write with a permit that still isn't published is assumed to have failed."""
    snapshot = Snapshot(state, now)
    record = FreezeRecord(state, client, request.id, snapshot)
    state.calls.add(client, request.id, record)
    state.freezes.begin(client, request.id, snapshot.next_index)
    return record.read(request.id, 0)


def read_frozen(state: PlaneState, client: str, request: p.ReadFrozen) -> p.Reply:
    """One slice of the state as it was."""
    record = state.calls.get(client, request.call)
    if not isinstance(record, FreezeRecord):
        raise CheckpointError(f"call {request.call} is no freeze under way. Save again.")
    return record.read(request.id, request.part)


def thaw(state: PlaneState, client: str, request: p.Thaw) -> p.Reply:
    """End the freeze of this call, if there is one."""
    record = state.calls.get(client, request.call)
    if not isinstance(record, FreezeRecord):
        return p.Cleared(request.id, b"")
    state.calls.take(client, request.call)
    return cleared(state, client, request, record.end())


def park_rewrite(state: PlaneState, client: str, request: Rewrite, now: float) -> bool:
    """Park the request if it would replace values that are being saved. Returns whether it was parked."""
    if not _must_wait(state, request):
        return False
    state.waiters.park(client, request, now, now + request.wait_s, REWRITERS, 0.0)
    return True


def take_rewriters(state: PlaneState) -> list[tuple[str, Rewrite]]:
    """Remove and return the writers that no longer have to wait."""
    free = [parked for parked in state.waiters.waiting_in(REWRITERS) if not _must_wait(state, parked.request)]
    for parked in free:
        state.waiters.remove(parked)
    return [(parked.client, parked.request) for parked in free]


def _must_wait(state: PlaneState, request: Rewrite) -> bool:
    about_to_be = state.waiters.first_of(FREEZERS) is not None
    if not (about_to_be or state.freezes):
        return False
    indexes = replaced(state, request)
    return len(indexes) > 0 and (about_to_be or bool(state.freezes.holds(indexes).any()))


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
    state.calls.add(client, request.id, StagedSamples(state, reply, np.sort(indexes, kind="stable") + shift))
    return reply


class Restoring(Record):
    """A restore whose parts are being received."""

    holds = True
    __slots__ = ("_client", "_free_from", "_restored", "_shift", "_state", "_used", "num_parts")

    def __init__(self, state: PlaneState, client: str, shift: int, now: float) -> None:
        super().__init__(p.RestorePart, p.Done(0))
        self._state, self._client, self._shift, self.num_parts = state, client, shift, 0
        self._restored = Restored(state, shift, now)
        self._free_from = MAX_INDEX  # the least index that no client staged
        self._used: dict[int, tuple[StagedSamples, npt.NDArray[np.bool_]]] = {}

    def add(self, data: bytes) -> None:
        """The next part."""
        saved = decode(data)
        indexes = saved_indexes(saved) + self._shift
        lacking = np.ones(len(indexes), dtype=np.bool_)
        for call, record in self._state.calls.of(self._client):
            if isinstance(record, StagedSamples):
                at, found = positions_in(record.indexes, indexes)
                lacking &= ~found
                _, used = self._used.setdefault(call, (record, np.zeros(len(record.indexes), dtype=np.bool_)))
                used[at[found]] = True
        if lacking.any():
            self._free_from = min(self._free_from, int(indexes[lacking].min()))
        self._check_staged()
        self._restored.add(saved)
        self.num_parts += 1

    def _check_staged(self) -> None:
        is_there = all(self._state.calls.get(self._client, call) is record for call, (record, _) in self._used.items())
        if not is_there or self._free_from < self._state.allocator.next_index:
            raise CheckpointError(
                "the saved samples' indexes are in use here, and no others were set aside for them. Load the storage "
                "part of the checkpoint first, with the same client."
            )

    def finish(self) -> p.Indexes:
        """Replace the queue's state with the saved one. Returns the indexes that the queue had."""
        state, restored = self._state, self._restored
        self._check_staged()
        restored.finish()
        old = [np.empty(0, dtype=np.int64)]
        for partition in state.partitions.values():
            old.append(partition.drop())
            state.discard(partition)
        state.partitions, state.tasks = restored.partitions, restored.tasks
        state.allocator, state.incarnations = restored.allocator, restored.incarnations
        for call, (record, used) in self._used.items():
            state.calls.take(self._client, call)
            state.delete(record.indexes[~used])
        return np.concatenate(old)

    def undo(self) -> bool:
        self._restored.drop()
        return True


def restore_part(state: PlaneState, client: str, request: p.RestorePart, now: float) -> p.Reply:
    """Build the next part. The queue itself does not change, and a refused part ends the restore."""
    if request.first_call == request.id:
        state.calls.add(client, request.id, Restoring(state, client, request.shift, now))
    record = _restoring(state, client, request.first_call)
    if request.part == record.num_parts:
        _build(state, client, request.first_call, lambda: record.add(request.state))
    elif request.part != record.num_parts - 1:  # else it is asked for again
        raise CheckpointError(f"part {request.part} of a restore comes after {record.num_parts}. Load again.")
    if request.first_call == request.id:
        record.reply = p.Done(request.id)
    return p.Done(request.id)


def restore(state: PlaneState, client: str, request: p.Restore, now: float) -> p.Reply:
    """Replace the state with the saved one, or change nothing. Parked requests are examined again."""
    record = (
        _restoring(state, client, request.first_call)
        if request.first_call
        else Restoring(state, client, request.shift, now)
    )
    old = _build(state, client, request.first_call, lambda: _finished(record, request.state))
    state.calls.take(client, request.first_call)
    state.mark_all_dirty()
    return cleared(state, client, request, state.freezes.keep(old))


def _restoring(state: PlaneState, client: str, call: int) -> Restoring:
    record = state.calls.get(client, call)
    if not isinstance(record, Restoring):
        raise CheckpointError(f"call {call} is no restore under way. Load the checkpoint again.")
    return record


def _finished(record: Restoring, data: bytes) -> p.Indexes:
    record.add(data)
    return record.finish()


def _build(state: PlaneState, client: str, first_call: int, act: Callable[[], T]) -> T:
    """Build one part of a restore. An error ends the restore."""
    try:
        return act()
    except BaseException:
        record = state.calls.take(client, first_call)
        if record is not None:
            record.undo()
        raise
