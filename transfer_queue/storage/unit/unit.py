# SPDX-License-Identifier: Apache-2.0
"""One storage unit, in the server: leases, writes, reads, deletes on a block store. A write that doesn't fit waits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.errors import (
    ProtocolError,
    SampleClearedError,
    StorageFullError,
    StorageKeyNotFoundError,
    TransferQueueError,
    to_wire,
)
from transfer_queue.protocol import Done, Failed, Reply, Request, pack_indexes, unpack_indexes
from transfer_queue.storage.messages import (
    INLINE_NBYTES,
    PAGE_NBYTES,
    Abort,
    AskHeld,
    AskUnitStats,
    Columns,
    Commit,
    Delete,
    Deleted,
    EndSession,
    EndWrite,
    Held,
    Lease,
    Leased,
    Read,
    Release,
    UnitStats,
    Write,
    Written,
    answer_in_frames,
    answer_in_place,
    least_in_arena,
    unpack_columns,
    whole_pages,
)
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.block_store import BlockStore
from transfer_queue.storage.unit.session_memory import Leases, Uncommitted, UncommittedWrite
from transfer_queue.storage.unit.spill import SpillFile, Warming
from transfer_queue.storage.wire import ByteArray, IntArray, heap
from transfer_queue.utils.wait_queue import WaitQueue

_QUARANTINE_S = 60.0


class UnitReply(NamedTuple):
    """An answer, the client it goes to, and its frames."""

    client: str
    reply: Reply
    frames: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Parked:
    """A request that waits for room. ``size``: its ``nbytes`` minus the values that it replaces."""

    client: str
    call: int
    indexes: IntArray
    nbytes: int
    size: int
    since: float
    deadline: float
    carry_out: Callable[[], list[UnitReply]]


class StorageUnit:
    """Decides like the control plane: requests in, answers out, ``now`` passed in. Values are opaque bytes."""

    def __init__(
        self,
        name: str = "unit",
        capacity_bytes: int | None = None,
        arena: Arena | None = None,
        inline_nbytes: int = INLINE_NBYTES,
        file: SpillFile | None = None,
    ) -> None:
        """``capacity_bytes``: the bound on all values; None: unlimited. Without an arena, values are frames.

        ``file``: takes the oldest values when a write finds no room; the bound is then on those in memory.
        """
        self.name = name
        self._inline_nbytes = inline_nbytes
        self._capacity = capacity_bytes
        self._arena = arena
        self._file = file
        self._arenas = [each for each in (arena, file) if each is not None]
        self._store = BlockStore(self._allocate, file=file)
        self._leases = Leases()
        self._uncommitted = Uncommitted()
        self._quarantine: list[tuple[float, list[ByteArray]]] = []
        self._waiting: WaitQueue[_Parked] = WaitQueue()
        self._warming: deque[tuple[str, Read, Warming]] = deque()
        self._now = -math.inf
        self.put_nbytes = {"message": 0, "memory": 0}
        """Bytes of values committed so far: those that came in messages, and those in leased memory."""
        self._verbs: dict[type[Request], Callable[[str, Any, list[memoryview]], list[UnitReply]]] = {
            Lease: self._lease,
            Write: self._write,
            Commit: self._commit,
            Abort: self._abort,
            Read: self._read,
            Delete: self._delete,
            Release: self._release,
            EndWrite: self._end_write,
            EndSession: self._end_session,
            AskHeld: self._held,
            AskUnitStats: self._stats,
        }

    # ---- entry points ----

    def serves(self, request: Request) -> bool:
        """Return whether it is one of a unit's requests."""
        return type(request) in self._verbs

    def handle(self, client: str, request: Request, frames: list[memoryview], now: float) -> list[UnitReply]:
        """Serve one request. Returns its answer, unless it waits for room, and answers to requests that got room."""
        self._tick(now)
        return self._answered(client, request.id, lambda: self._verbs[type(request)](client, request, frames))

    def expire(self, now: float) -> list[UnitReply]:
        """Answer requests past their deadline, return memory, and move live rows of mostly dead blocks."""
        self._tick(now)
        answers = self._expire_waiting()
        for arena in self._arenas:
            if (trim := arena.next_trim()) is not None and trim <= now:
                arena.trim(now)
        moving = self._store.is_moving
        if moving:
            self._store.move()
        answers += self._warm()
        return answers + (self._admit() if answers or moving else [])

    def next_deadline(self) -> float | None:
        if self._store.is_moving or self._warming:
            return -math.inf  # one step per turn, between requests
        deadlines = [self._waiting.next_deadline(), *(arena.next_trim() for arena in self._arenas)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def cancel(self, client: str, call: int, now: float) -> list[UnitReply]:
        """Cancel this call: free what it wrote, leased or pinned."""
        self._tick(now)
        self._remove(lambda parked: parked.client == client and parked.call == call)
        self._leases.release(client, call)
        self._uncommitted.take(client, call)
        self._warming = deque(each for each in self._warming if (each[0], each[1].id) != (client, call))
        return self._admit()

    def client_gone(self, client: str, now: float, may_live: bool = False) -> list[UnitReply]:
        """The client's session has ended. Its uncommitted writes stay until ``EndSession`` says which were published.

        ``may_live``: it was evicted and may still run, so its leased and pinned memory is not reused for a minute.
        """
        self._tick(now)
        if may_live:
            self._quarantine.append((now + _QUARANTINE_S, self._leases.memory_of(client)))
        self._remove(lambda parked: parked.client == client)
        self._warming = deque(each for each in self._warming if each[0] != client)
        self._leases.end(client)
        return self._admit()

    def holders(self) -> dict[str, tuple[int, int]]:
        """Per client, the number of its leases and of its pins."""
        return self._leases.held_by()

    def waiting(self, now: float) -> list[dict[str, Any]]:
        """The requests that wait for room, in the format of the controller's statistics."""
        return [
            {
                "partition": None, "task": None, "client": parked.client, "waited_s": now - parked.since,
                "writer": True, "wanted": None, "wanted_nbytes": parked.nbytes,
            }
            for parked in self._waiting.items()
        ]  # fmt: skip

    def stats(self) -> UnitStats:
        store, arena = self._store, self._arena
        return UnitStats(
            0,
            unit=self.name,
            samples=store.num_samples,
            values=store.num_values,
            live_nbytes=store.live_nbytes,
            held_nbytes=store.held_nbytes,
            blocks=store.num_blocks,
            capacity_bytes=self._capacity,
            parked=len(self._waiting),
            parked_nbytes=sum(parked.nbytes for parked in self._waiting.items()),
            arena_nbytes=0 if arena is None else arena.used_nbytes,
            recyclable_nbytes=0 if arena is None else arena.recyclable_nbytes,
            leased_nbytes=self._leases.leased_nbytes,
            pins=self._leases.num_pins,
            uncommitted_nbytes=self._uncommitted.nbytes,
            spilled_nbytes=store.spilled_nbytes,
            spill_bytes=0 if self._file is None else self._file.nbytes,
        )

    def _tick(self, now: float) -> None:
        self._now = now
        if self._quarantine and self._quarantine[0][0] <= now:
            del self._quarantine[0]
        for arena in self._arenas:
            arena.tick(now)

    def _answered(self, client: str, call: int, serve: Callable[[], list[UnitReply]]) -> list[UnitReply]:
        try:
            return serve()
        except TransferQueueError as error:
            return [UnitReply(client, Failed(call, *to_wire(error)))]

    def _allocate(self, nbytes: int) -> ByteArray:
        memory = None
        if self._arena is not None and nbytes >= least_in_arena(self._inline_nbytes):
            memory = self._arena.allocate(nbytes)
        return heap(nbytes) if memory is None else memory

    # ---- reads ----

    def _read(self, client: str, request: Read, frames: list[memoryview]) -> list[UnitReply]:
        indexes, fields = unpack_indexes(request.indexes), request.fields
        try:
            return self._rows_or_wait(client, request, indexes, fields)
        except StorageKeyNotFoundError:
            if not self._uncommitted:
                raise
            published = self._uncommitted.take_holding(self._store.lacking(indexes, fields))
            if not published:
                raise
            self._store_all(published)
            return self._rows_or_wait(client, request, indexes, fields)

    def _rows_or_wait(self, client: str, request: Read, indexes: IntArray, fields: Sequence[str]) -> list[UnitReply]:
        """The answer; none yet if it is made of bytes on disk, which are read first, a little each turn."""
        warming = None
        if self._file is not None:
            warming = self._store.warming(indexes, fields, self._in_place(request, indexes, fields))
        if warming is None:
            return [self._rows(client, request, indexes, fields)]
        self._warming.append((client, request, warming))
        return []

    def _warm(self) -> list[UnitReply]:
        """Read the next bytes from disk. Returns the answer that they complete."""
        if not self._warming or not self._warming[0][2].step():
            return []
        client, request, _ = self._warming.popleft()
        indexes = unpack_indexes(request.indexes)
        return self._answered(client, request.id, lambda: [self._rows(client, request, indexes, request.fields)])

    def _in_place(self, request: Read, indexes: IntArray, fields: Sequence[str]) -> bool:
        """Whether the reader copies large values itself."""
        mapped = request.mapped and self._arena is not None
        return mapped and self._store.likely_nbytes(indexes, fields) > self._inline_nbytes

    def _offset_of(self, memory: ByteArray) -> int:
        """The offset of this memory in the arena, after which the spill file lies; -1 if it lies elsewhere."""
        assert self._arena is not None
        offset = self._arena.offset_of(memory)
        if offset < 0 and self._file is not None and (on_disk := self._file.offset_of(memory)) >= 0:
            return self._arena.nbytes + on_disk
        return offset

    def _rows(self, client: str, request: Read, indexes: IntArray, fields: Sequence[str]) -> UnitReply:
        if not self._in_place(request, indexes, fields):
            stored = self._store.read(indexes, fields)
            mapped = request.mapped and self._arena is not None
            if not mapped or sum(column.nbytes for _, _, column in stored) <= self._inline_nbytes:
                answer, frames, _ = answer_in_frames(request.id, stored)
                return UnitReply(client, answer, frames)
        located = self._store.locate(indexes, fields)
        answer, frames, pinned = answer_in_place(request.id, located, self._offset_of)
        if pinned:
            self._leases.pin(client, request.id, pinned)
        return UnitReply(client, answer, frames)

    def _release(self, client: str, request: Release, frames: list[memoryview]) -> list[UnitReply]:
        for call in request.calls:
            self._leases.release(client, call)
        return self._admit()

    # ---- writes ----

    def _lease(self, client: str, request: Lease, frames: list[memoryview]) -> list[UnitReply]:
        self._check_alive(client)
        if self._arena is None:
            return [UnitReply(client, Leased(request.id, -1))]
        held = self._leases.leased(client, request.id)
        if held is not None:  # a retry of the same call
            return [UnitReply(client, Leased(request.id, self._arena.offset_of(held)))]
        allocate = partial(self._allocate_lease, client, request.id, request.nbytes)
        indexes = unpack_indexes(request.indexes)
        return self._wait_for_room(
            client, request.id, indexes, request.fields, request.nbytes, request.wait_s, allocate
        )

    def _allocate_lease(self, client: str, call: int, nbytes: int) -> list[UnitReply]:
        assert self._arena is not None
        extent = self._arena.allocate(nbytes)
        if extent is None:
            return [UnitReply(client, Leased(call, -1))]
        self._leases.lease(client, call, extent)
        self._squeeze()
        return [UnitReply(client, Leased(call, self._arena.offset_of(extent)))]

    def _write(self, client: str, request: Write, frames: list[memoryview]) -> list[UnitReply]:
        self._check_alive(client)
        columns = request.columns
        lease = self._leases.take(client, columns.lease) if columns.lease else None
        if columns.lease:
            # The lease ends whether or not the write succeeds, and may have been larger than what is kept.
            kept = self._answered(
                client, request.id, lambda: self._keep(client, request, self._unpacked(request, frames, lease))
            )
            return kept + self._admit()
        # Unpacked before it may wait: a malformed write must fail in its own turn, not in that of another client.
        write = self._unpacked(request, frames, None)
        if self._capacity is None:
            return self._keep(client, request, write)
        fields, nbytes = [header.field for header in columns.headers], sum(memoryview(frame).nbytes for frame in frames)
        keep = partial(self._keep, client, request, write)
        return self._wait_for_room(client, request.id, write.indexes, fields, nbytes, request.wait_s, keep)

    def _keep(self, client: str, request: Write, write: UncommittedWrite) -> list[UnitReply]:
        self._uncommitted.add(client, request.id, write)
        self._squeeze()
        return [UnitReply(client, Written(request.id))]

    def _unpacked(self, request: Write, frames: list[memoryview], lease: ByteArray | None) -> UncommittedWrite:
        columns, indexes = request.columns, unpack_indexes(request.indexes)
        if any(header.selection >= 0 for header in columns.headers):
            raise ProtocolError("a write names rows out of order: what is stored lies back to back.")
        view = None if not columns.lease else self._carved(columns, lease)
        stored = unpack_columns(columns.headers, columns.tables, frames, len(indexes), view)
        return UncommittedWrite(indexes, stored, view is not None)

    def _carved(self, columns: Columns, extent: ByteArray | None) -> Callable[[int, int], ByteArray]:
        """Carve the columns' memory out of the lease."""
        if extent is None or self._arena is None:
            raise ProtocolError(f"a write names lease {columns.lease}, which this client does not hold.")
        ranges = sorted((header.offset, header.nbytes) for header in columns.headers if header.offset >= 0)
        at, stop = self._arena.offset_of(extent), self._arena.offset_of(extent) + len(extent)
        for offset, nbytes in ranges:
            if nbytes < 1 or offset < at or offset % PAGE_NBYTES or offset + nbytes > stop:
                raise ProtocolError(f"a part of {nbytes} bytes at {offset} is not within what is left of its lease.")
            at = offset + whole_pages(nbytes)
        extents = dict(zip(ranges, self._arena.carve(extent, ranges), strict=True))
        return lambda offset, nbytes: extents.pop((offset, nbytes))

    def _commit(self, client: str, request: Commit, frames: list[memoryview]) -> list[UnitReply]:
        found = [self._uncommitted.take(client, call) for call in request.writes]
        self._store_all(write for write in found if write is not None)  # a reader has committed the others
        self._squeeze()
        return [UnitReply(client, Done(request.id)), *self._admit()]

    def _store_all(self, writes: Iterable[UncommittedWrite]) -> None:
        """Make these writes readable."""
        for write in writes:
            self._store.write(write.indexes, write.columns)
            write.count_into(self.put_nbytes, self._arena)

    def _abort(self, client: str, request: Abort, frames: list[memoryview]) -> list[UnitReply]:
        for call in request.writes:
            self._remove(lambda parked, call=call: parked.client == client and parked.call == call)  # type: ignore[misc]
            self._uncommitted.take(client, call)
        return self._admit()

    def _end_write(self, client: str, request: EndWrite, frames: list[memoryview]) -> list[UnitReply]:
        write = self._uncommitted.take(request.client, request.call)
        if write is not None and request.published:
            self._store_all([write])
            self._squeeze()
        return [UnitReply(client, Done(request.id)), *self._admit()]

    def _end_session(self, client: str, request: EndSession, frames: list[memoryview]) -> list[UnitReply]:
        self._store_all(self._uncommitted.end(request.client, request.published))
        return [UnitReply(client, Done(request.id)), *self.client_gone(request.client, self._now)]

    def _delete(self, client: str, request: Delete, frames: list[memoryview]) -> list[UnitReply]:
        indexes = unpack_indexes(request.indexes)
        answers = [UnitReply(client, Deleted(request.id, self._store.delete(indexes)))]
        self._uncommitted.delete(indexes)
        # Writes for these samples that still wait for room are pointless now.
        error = to_wire(SampleClearedError("the samples of a put that waited for room were cleared meanwhile."))
        lost = self._remove(lambda each: len(each.indexes) > 0 and bool(np.isin(each.indexes, indexes).all()))
        answers += [UnitReply(parked.client, Failed(parked.call, *error)) for parked in lost]
        return answers + self._admit()

    def _held(self, client: str, request: AskHeld, frames: list[memoryview]) -> list[UnitReply]:
        held = self._store.held(unpack_indexes(request.indexes))
        return [UnitReply(client, Held(request.id, {name: pack_indexes(some) for name, some in held.items()}))]

    def _stats(self, client: str, request: AskUnitStats, frames: list[memoryview]) -> list[UnitReply]:
        return [UnitReply(client, msgspec.structs.replace(self.stats(), id=request.id))]

    def _check_alive(self, client: str) -> None:
        if self._uncommitted.has_ended(client):
            raise ProtocolError(f"client {client!r} was taken for dead, and its uncommitted writes were deleted.")

    # ---- room ----

    def _wait_for_room(
        self, client: str, call: int, indexes: IntArray, fields: Sequence[str], nbytes: int, wait_s: float,
        carry_out: Callable[[], list[UnitReply]],
    ) -> list[UnitReply]:  # fmt: skip
        """Run it now if it fits and no earlier request must come first; otherwise it waits."""
        if self._capacity is not None and nbytes > self._capacity:
            raise StorageFullError(
                f"a put of {nbytes} bytes can never fit storage unit {self.name!r} of {self._capacity} bytes. "
                f"Put fewer samples at once, or give the queue more memory."
            )
        if self._capacity is None or (not len(self._waiting) and self._taken_nbytes + nbytes <= self._capacity):
            return carry_out()
        deadline = self._now + wait_s
        size = max(0, nbytes - (self._store.replaced_nbytes(indexes, fields) if len(indexes) else 0))
        parked = _Parked(client, call, indexes, nbytes, size, self._now, deadline, carry_out)
        self._waiting.add(parked, size, deadline)
        self._store.look_for_disk()
        return self._admit() if wait_s > 0 else self._admit() + self._expire_waiting()

    @property
    def _taken_nbytes(self) -> int:
        return self._store.memory_nbytes + self._leases.leased_nbytes + self._uncommitted.nbytes

    def _admit(self) -> list[UnitReply]:
        """Run the requests that fit now. Compact dead rows to make room for the others, large blocks in steps."""
        answers: list[UnitReply] = []
        while self._capacity is not None and len(self._waiting):
            free = self._capacity - self._taken_nbytes
            admitted = self._waiting.admit(free)
            for parked in admitted:
                answers += self._answered(parked.client, parked.call, parked.carry_out)
            if not admitted and not self._pack(free):
                self._store.start_spilling()
                break
        return answers

    def _pack(self, free: int) -> bool:
        """Compact dead rows if that helps a waiting request. Returns whether room was gained."""
        held = self._store.memory_nbytes
        dead = self._store.held_nbytes - self._store.live_nbytes
        if not any(parked.size <= free + dead for parked in self._waiting.items()):
            return False
        self._store.pack()
        return self._store.memory_nbytes < held

    def _expire_waiting(self) -> list[UnitReply]:
        """Fail requests past their deadline, unless compacting everything now makes room for them."""
        due = self._waiting.next_deadline()
        if due is None or due > self._now:
            return []
        self._store.squeeze()
        answers = self._admit()
        late = self._waiting.expired(self._now)
        answers += [UnitReply(parked.client, Failed(parked.call, *to_wire(self._full(parked)))) for parked in late]
        return answers + self._admit()

    def _remove(self, which: Callable[[_Parked], bool]) -> list[_Parked]:
        """Remove the waiting requests that meet the condition."""
        removed = [parked for parked in self._waiting.items() if which(parked)]
        for parked in removed:
            self._waiting.remove(parked)
        return removed

    def _squeeze(self) -> None:
        """Compact at once if a write was admitted because of values that it replaces."""
        if self._capacity is not None and self._taken_nbytes > self._capacity:
            self._store.squeeze()

    def _full(self, parked: _Parked) -> StorageFullError:
        store = self._store
        spilled = "" if self._file is None else f" in memory, {store.spilled_nbytes} of {self._file.nbytes} on disk"
        return StorageFullError(
            f"Storage capacity exceeded: a put of {parked.nbytes} bytes waited {self._now - parked.since:.1f} s at "
            f"storage unit {self.name!r}, whose values take {min(store.live_nbytes, store.memory_nbytes)} of "
            f"{self._capacity} bytes{spilled}. "
            f"Clear consumed samples sooner, raise the capacity, or raise put_timeout_s."
        )
