# SPDX-License-Identifier: Apache-2.0
"""The verbs of checkpoints: freeze and thaw the state, stage values, restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Holding, Until, Wait
from transfer_queue.control import group_loading
from transfer_queue.control.freezes import FrozenSamples
from transfer_queue.control.lifecycle import cleared
from transfer_queue.control.restoring import Restored, check_fits
from transfer_queue.control.rows import MAX_INDEX, positions_in
from transfer_queue.control.saved import decode, saved_indexes
from transfer_queue.control.snapshot import Snapshot
from transfer_queue.control.state import SAVING, WRITERS, PlaneState
from transfer_queue.control.writing import Permit
from transfer_queue.errors import CheckpointError


class Freezing(Holding):
    """A freeze under way."""

    until = Until.DONE

    def __init__(self, state: PlaneState, snapshot: Snapshot) -> None:
        self._state, self.snapshot = state, snapshot
        self._samples = FrozenSamples(snapshot.next_index)
        state.freezes.append(self._samples)

    def thaw(self) -> p.Indexes:
        """Returns what was cleared since, and may be deleted now."""
        self.snapshot.close()
        self._state.waits.wake(SAVING)
        return self._state.freezes.end(self._samples)

    def undo(self) -> bool:
        self._state.delete(self.thaw())
        return True


class Staged(Holding):
    """Samples whose values the client stores for a restore. ``indexes`` ascend."""

    until = Until.DONE

    def __init__(self, state: PlaneState, indexes: p.Indexes) -> None:
        self._state, self.indexes = state, indexes

    def undo(self) -> bool:
        self._state.delete(self.indexes)
        return True


def freeze(state: PlaneState, call: Call, request: p.Freeze) -> p.Reply | Wait:
    """Freeze the state, once no writer is replacing values. A write that takes too long is assumed to have failed."""

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | None:
        replaces = any(permit.replaces() for _, permit in state.calls.holdings(Permit))
        if replaces and not (wait and wait.late):
            return None
        frozen = Freezing(state, Snapshot(state, state.calls.now, request.task))
        state.calls.hold(call, frozen)
        committing = [write for own in state.partitions.values() for write in own.commits]
        return p.Frozen(request.id, *frozen.snapshot.read(0), committing)

    return answer(None, True) or Wait(SAVING, state.calls.now + request.wait_s, answer)


def read_frozen(state: PlaneState, call: Call, request: p.ReadFrozen) -> p.Reply:
    """One slice of the state as it was."""
    held = state.calls.held(call.client, request.call, Freezing)
    if not held:
        raise CheckpointError(f"call {request.call} is no freeze under way. Save again.")
    return p.Frozen(request.id, *held[0].snapshot.read(request.part))


def thaw(state: PlaneState, call: Call, request: p.Thaw) -> p.Reply:
    """End the freeze of this call, if there is one."""
    held = state.calls.take(call.client, request.call, Freezing)
    return cleared(state, call, held[0].thaw()) if held else p.Cleared(request.id, b"")


def stage(state: PlaneState, call: Call, request: p.Stage) -> p.Reply:
    """Reserve indexes for samples to be restored, shifted if theirs are in use here."""
    indexes = p.unpack_indexes(request.indexes)
    if len(indexes) and not 0 <= int(indexes.min()) <= int(indexes.max()) < MAX_INDEX - state.allocator.next_index:
        raise CheckpointError(f"the saved samples' indexes are out of range: {indexes.min()} to {indexes.max()}.")
    check_fits(state, len(indexes))
    if not len(indexes):
        return p.Done(request.id, 0)
    shift = max(0, state.allocator.next_index - int(indexes.min()))
    state.allocator.next_index = int(indexes.max()) + shift + 1
    state.calls.hold(call, Staged(state, np.sort(indexes, kind="stable") + shift))
    return p.Done(request.id, shift)


class Restoring(Holding):
    """A restore whose parts are being received."""

    until = Until.DONE

    def __init__(self, state: PlaneState, client: str, shift: int) -> None:
        self._state, self._client, self._shift, self.num_parts = state, client, shift, 0
        self._restored = Restored(state, shift, state.calls.now)
        self._free_from = MAX_INDEX  # the least index that no client staged
        self._used: dict[int, tuple[Staged, npt.NDArray[np.bool_]]] = {}

    def add(self, data: bytes) -> None:
        """The next part."""
        saved = decode(data)
        indexes = saved_indexes(saved) + self._shift
        lacking = np.ones(len(indexes), dtype=np.bool_)
        for number, staged in self._staged():
            at, found = positions_in(staged.indexes, indexes)
            lacking &= ~found
            _, used = self._used.setdefault(number, (staged, np.zeros(len(staged.indexes), dtype=np.bool_)))
            used[at[found]] = True
        if lacking.any():
            self._free_from = min(self._free_from, int(indexes[lacking].min()))
        self._check_staged()
        self._restored.add(saved)
        self.num_parts += 1

    def _staged(self) -> list[tuple[int, Staged]]:
        calls = self._state.calls.of(self._client)
        return [(call.number, each) for call in calls for each in call.holdings if isinstance(each, Staged)]

    def _check_staged(self) -> None:
        staged = dict(self._staged())
        is_there = all(staged.get(number) is used for number, (used, _) in self._used.items())
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
        old = [p.NO_INDEXES]
        for partition in state.partitions.values():
            old.append(partition.drop())
        state.discard_all(state.partitions)
        state.partitions, state.tasks = restored.partitions, restored.tasks
        state.allocator, state.incarnations = restored.allocator, restored.incarnations
        group_loading.restored(state, restored.versions, restored.next_lease)
        for number, (staged, used) in self._used.items():
            state.calls.take(self._client, number, Staged)
            state.delete(staged.indexes[~used])
        return np.concatenate(old)

    def undo(self) -> bool:
        self._restored.drop()
        return True


def restore_part(state: PlaneState, call: Call, request: p.RestorePart) -> p.Reply:
    """Build the next part. The queue itself does not change, and a refused part ends the restore."""
    if request.first_call == request.id:
        state.calls.hold(call, Restoring(state, call.client, request.shift))
    restoring = _restoring(state, call.client, request.first_call)
    if request.part == restoring.num_parts:
        with _all_or_nothing(state, call.client, request.first_call):
            restoring.add(request.state)
    elif request.part != restoring.num_parts - 1:  # else it is asked for again
        raise CheckpointError(f"part {request.part} of a restore comes after {restoring.num_parts}. Load again.")
    return p.Done(request.id)


def restore(state: PlaneState, call: Call, request: p.Restore) -> p.Reply:
    """Replace the state with the saved one, or change nothing. Waiting requests are examined again."""
    client, first = call.client, request.first_call
    restoring = _restoring(state, client, first) if first else Restoring(state, client, request.shift)
    with _all_or_nothing(state, client, first):
        restoring.add(request.state)
        old = restoring.finish()
    state.calls.take(client, first, Restoring)
    state.everything_changed()
    state.waits.wake(WRITERS)
    return cleared(state, call, state.freezes.keep(old))


def _restoring(state: PlaneState, client: str, number: int) -> Restoring:
    held = state.calls.held(client, number, Restoring)
    if not held:
        raise CheckpointError(f"call {number} is no restore under way. Load the checkpoint again.")
    return held[0]


@contextmanager
def _all_or_nothing(state: PlaneState, client: str, first_call: int) -> Iterator[None]:
    """An error ends the restore."""
    try:
        yield
    except BaseException:
        for restoring in state.calls.take(client, first_call, Restoring):
            restoring.undo()
        raise
