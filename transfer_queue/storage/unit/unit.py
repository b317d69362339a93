# SPDX-License-Identifier: Apache-2.0
"""One storage unit, in the server: leases, writes, reads, deletes on a block store. A write that doesn't fit waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import structs

from transfer_queue.calls import Call, Calls, Steps, Verb, Wait
from transfer_queue.diagnosis import MEMORY, no_room
from transfer_queue.errors import (
    ProtocolError,
    SampleClearedError,
    SessionEndedError,
    StorageFullError,
    StorageKeyNotFoundError,
    to_wire,
)
from transfer_queue.finding import in_bytes
from transfer_queue.protocol import Done, Failed, Reply, Request, WriteName, pack_indexes, unpack_indexes
from transfer_queue.storage.messages import (
    INLINE_NBYTES,
    PAGE_NBYTES,
    SMALL_NBYTES,
    Abort,
    AskHeld,
    Columns,
    Commit,
    Delete,
    EndSession,
    EndWrite,
    Held,
    LeasedMemory,
    LeaseMemory,
    Located,
    Read,
    Release,
    Rows,
    UnitStats,
    Write,
    Written,
    is_copied_here,
    least_in_arena,
    rows_answer,
    unpack_columns,
    whole_pages,
)
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.block_store import BlockStore
from transfer_queue.storage.unit.session_memory import (
    Memory,
    MemoryLease,
    Pin,
    RowsToWrite,
    StoredRows,
    UncommittedWrite,
)
from transfer_queue.storage.unit.spill import SpillFile, warm
from transfer_queue.storage.wire import ByteArray, IntArray, WireColumn, as_run, heap

_MEMORY = ("memory",)
"""Wait queue of leases and writes that need room."""
_nbytes = attrgetter("nbytes")


@dataclass(slots=True, eq=False)
class _ForRoom(Wait):
    """A write to these indexes, or a lease for one, waits for room. Its size is ``nbytes`` minus what it replaces."""

    nbytes: int = field(kw_only=True)
    indexes: IntArray = field(kw_only=True)


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
        self._changes = None if arena is None else arena.changes
        self._has_others = False
        self._blocks = BlockStore(self._allocate, file=file)
        self._leased_nbytes = self._uncommitted_nbytes = 0
        self._uncommitted: dict[UncommittedWrite, None] = {}
        self._evicted: dict[str, list[ByteArray]] = {}
        self._is_moving = False
        self.put_nbytes = {"message": 0, "memory": 0}
        """Bytes of values committed so far: those that came in messages, and those in leased memory."""
        self.got_nbytes = {"message": 0, "memory": 0}
        """Likewise those that readers were given."""
        self.verbs: dict[type[Request], Verb] = {
            LeaseMemory: self._lease,
            Write: self.write,
            Commit: self._commit,
            Abort: self._abort,
            Read: self.read,
            Delete: self._delete,
            Release: self._release,
            EndWrite: self._end_write,
            EndSession: self._end_session,
            AskHeld: self._held,
        }
        self.share(Calls())

    def share(self, calls: Calls) -> None:
        """Serve the calls of this room, which the whole process shares."""
        self.calls = calls
        calls.waits.with_sizes(_MEMORY, self._free, self._make_room)
        calls.steps.add(Write)
        calls.verbs |= self.verbs

    # ---- time ----

    def tick(self, now: float) -> None:
        """The time is ``now``."""
        for arena in self._arenas:
            arena.tick(now)

    def next_trim(self) -> float | None:
        """When ``trim`` has something to do."""
        first = None
        for arena in self._arenas:
            trim = arena.next_trim()
            first = trim if first is None or (trim is not None and trim < first) else first
        return first

    def trim(self, now: float) -> None:
        """The time is ``now``. Return memory that was free for a while."""
        for arena in self._arenas:
            arena.trim(now)

    # ---- clients that were evicted ----

    def evict(self, client: str) -> None:
        """The client may still copy into its leases or from its pins: their memory is not reused while it lives."""
        held = [each for call, each in self.calls.holdings(Memory) if call.client == client]
        self._evicted.setdefault(client, []).extend(extent for each in held for extent in each.extents)

    def process_gone(self, client: str) -> None:
        """The process of an evicted client has ended."""
        self._evicted.pop(client, None)

    # ---- statistics ----

    def holders(self) -> dict[str, tuple[int, int]]:
        """Per client, the number of its leases and of its pins."""
        found: dict[str, tuple[int, int]] = {}
        for call, each in self.calls.holdings(Memory):
            leases, pins = found.get(call.client, (0, 0))
            is_lease = isinstance(each, MemoryLease)
            found[call.client] = leases + is_lease, pins + (not is_lease)
        return found

    def waiting(self, now: float) -> list[dict[str, Any]]:
        """The requests that wait for room, in the format of the controller's statistics."""
        return [
            {
                "partition": None, "task": None, "client": wait.owner.client, "waited_s": now - wait.since,
                "writer": True, "wanted": None, "wanted_nbytes": wait.nbytes,
            }
            for wait in self._waiting()
        ]  # fmt: skip

    @property
    def num_waiting(self) -> int:
        """How many requests wait for room."""
        return len(self._waiting())

    def _waiting(self) -> list[_ForRoom]:
        return [wait for wait in self.calls.waits.of(_MEMORY) if isinstance(wait, _ForRoom)]

    def stats(self) -> UnitStats:
        store, arena, waiting = self._blocks, self._arena, self._waiting()
        return UnitStats(
            0,
            unit=self.name,
            samples=store.num_samples,
            values=store.num_values,
            live_nbytes=store.live_nbytes,
            held_nbytes=store.held_nbytes,
            blocks=store.num_blocks,
            capacity_bytes=self._capacity,
            parked=len(waiting),
            parked_nbytes=sum(wait.nbytes for wait in waiting),
            arena_nbytes=0 if arena is None else arena.used_nbytes,
            recyclable_nbytes=0 if arena is None else arena.recyclable_nbytes,
            leased_nbytes=self._leased_nbytes,
            pins=sum(1 for _ in self.calls.holdings(Pin)),
            uncommitted_nbytes=self._uncommitted_nbytes,
            spilled_nbytes=store.spilled_nbytes,
            spill_bytes=0 if self._file is None else self._file.nbytes,
        )

    def _allocate(self, nbytes: int) -> ByteArray:
        memory = None
        if self._arena is not None and nbytes >= least_in_arena(self._inline_nbytes):
            memory = self._arena.allocate(nbytes)
        return heap(nbytes) if memory is None else memory

    # ---- reads ----

    def read(self, call: Call, request: Read) -> Reply | Steps:
        """The values, with those that travel in the message as the call's ``values``. The call pins the others."""
        if request.alone and self._has_others:
            raise StorageKeyNotFoundError(
                "another server has joined this queue, and may hold newer values: use the client's get_data()."
            )
        if request.published:
            self.commit(request.published)
        return self._rows_or_wait(call, request)

    def read_small(self, call: Call, indexes: bytes, fields: Sequence[str]) -> Rows | None:
        """All values with their stamp, where they are few bytes and the reader will see whether they have changed."""
        if self._changes is None or self._blocks.spilled_nbytes or len(indexes) * len(fields) > SMALL_NBYTES:
            return None  # many values are not few bytes, and looking for them would keep others waiting
        wanted = unpack_indexes(indexes)
        try:
            located = self._blocks.locate(wanted, fields)
        except StorageKeyNotFoundError:  # a read will say so
            return None
        if sum([column.rows_nbytes(rows) for _, column, _, rows in located]) > SMALL_NBYTES:
            return None
        rows = structs.replace(self._rows(call, located, False), stamp=self._changes.stamp(wanted))
        call.values = [memoryview(each).tobytes() for each in call.values]  # a copy keeps no block while it is kept
        return rows

    def others_join(self) -> None:
        """Other units may hold newer values from now on, so no reader can see here whether values have changed."""
        self._has_others = True
        if self._changes is not None:
            self._changes.count_all()
            self._changes = None

    def _rows_or_wait(self, call: Call, request: Read) -> Reply | Steps:
        """The answer. If it is made of bytes on disk, these are read first, a little each turn."""
        located = self._blocks.locate(unpack_indexes(request.indexes), request.fields)
        in_place = self._in_place(request, located)
        cold = [
            column.pick(as_run(rows))
            for _, column, _, rows in (located if self._blocks.spilled_nbytes else ())
            if self._file is not None and self._file.holds(column.data)
            if not in_place or is_copied_here(column, as_run(rows))
        ]
        return self._warm(call, request, cold) if cold else self._rows(call, located, in_place)

    def _warm(self, call: Call, request: Read, cold: Iterable[WireColumn]) -> Steps:
        yield from warm(cold)
        located = self._blocks.locate(unpack_indexes(request.indexes), request.fields)
        return self._rows(call, located, self._in_place(request, located))

    def _in_place(self, request: Read, located: Located) -> bool:
        """Whether the reader copies large values itself."""
        if not request.mapped or self._arena is None:
            return False
        return sum(column.rows_nbytes(rows) for _, column, _, rows in located) > self._inline_nbytes

    def _offset_of(self, memory: ByteArray) -> int:
        """The offset of this memory in the arena, after which the spill file lies; -1 if it lies elsewhere."""
        assert self._arena is not None
        offset = self._arena.offset_of(memory)
        if offset < 0 and self._file is not None and (on_disk := self._file.offset_of(memory)) >= 0:
            return self._arena.nbytes + on_disk
        return offset

    def _rows(self, call: Call, located: Located, in_place: bool) -> Rows:
        offset_of = self._offset_of if in_place else None
        answer, call.values, pinned, nbytes = rows_answer(call.number, located, offset_of)
        self.got_nbytes["message"] += sum([memoryview(frame).nbytes for frame in call.values])
        self.got_nbytes["memory"] += nbytes
        if pinned:
            self.calls.hold(call, Pin(pinned, self._freed))
        return answer

    def _release(self, call: Call, request: Release) -> None:
        for number in request.calls:
            for memory in self.calls.take(call.client, number, Memory):
                memory.keep()

    # ---- writes ----

    def _lease(self, call: Call, request: LeaseMemory) -> Reply | Wait:
        self._check_alive(call)
        if self._arena is None:
            return LeasedMemory(request.id, -1)
        allocate = partial(self._allocate_lease, call, request.nbytes)
        return self._when_room(call, request, request.nbytes, request.fields, allocate)

    def _allocate_lease(self, call: Call, nbytes: int) -> Reply:
        assert self._arena is not None
        extent = self._arena.allocate(nbytes)
        if extent is None:
            return LeasedMemory(call.number, -1)
        leased = self._hold_lease(call, extent.nbytes, [extent], self._arena.offset_of(extent))
        self._squeeze()
        return leased

    def keep_room(self, call: Call, wait_s: float) -> Reply | Wait:
        """Room for the write of this call, which has its values and names no lease. It is a lease without addresses."""
        nbytes = sum(map(_nbytes, call.frames))
        lease = LeaseMemory(call.number, nbytes, b"", [], wait_s)
        return self._when_room(call, lease, nbytes, [], partial(self._hold_lease, call, nbytes))

    def _hold_lease(self, call: Call, nbytes: int, extents: Sequence[ByteArray] = (), offset: int = -1) -> Reply:
        self._leased_nbytes += nbytes
        self.calls.hold(call, MemoryLease(extents, partial(self._lease_over, nbytes)))
        return LeasedMemory(call.number, offset)

    def _lease_over(self, nbytes: int) -> None:
        self._leased_nbytes -= nbytes
        self._freed()

    def takes_now(self, call: Call, columns: Columns) -> bool:
        """Whether this write would not have to wait for room."""
        return bool(columns.lease) or self._has_room(sum(map(_nbytes, call.frames)))

    def store_new(self, call: Call, indexes: IntArray, columns: Columns) -> None:
        """Store values of new samples, where ``takes_now``."""
        self._store(self._unpacked(call, indexes, columns))

    def write(self, call: Call, request: Write) -> Reply | Wait:
        """Take the rows of a write, in the memory that it leased, or in its message as soon as there is room."""
        self._check_alive(call)
        # Unpacked before it may wait: a malformed write must fail in its own turn, not in that of another client.
        rows = self._unpacked(call, unpack_indexes(request.indexes), request.columns)
        written = partial(self._written, call, rows, request.fresh)
        if request.columns.lease or self._capacity is None:
            return written()
        fields = [header.field for header in request.columns.headers]
        return self._when_room(call, request, sum(map(_nbytes, call.frames)), fields, written)

    def _written(self, call: Call, rows: RowsToWrite, fresh: bool) -> Reply:
        if fresh:  # nobody knows these indexes before they are published
            self._store(rows)
            self.calls.hold(call, StoredRows(rows.indexes, self.delete))
        else:
            self._keep_aside(call, rows)
        return Written(call.number)

    def _store(self, rows: RowsToWrite) -> None:
        self._blocks.write(rows.indexes, rows.columns)
        rows.count_into(self.put_nbytes, self._arena)

    def _keep_aside(self, call: Call, rows: RowsToWrite) -> None:
        self._drop_aside(call.client, call.number)
        uncommitted = UncommittedWrite(rows, self._uncommitted_over)
        self._uncommitted[uncommitted] = None
        self._uncommitted_nbytes += rows.nbytes
        self.calls.hold(call, uncommitted)
        self._squeeze()

    def _uncommitted_over(self, uncommitted: UncommittedWrite) -> None:
        del self._uncommitted[uncommitted]
        self._uncommitted_nbytes -= uncommitted.write.nbytes
        self._freed()

    def _unpacked(self, call: Call, indexes: IntArray, columns: Columns) -> RowsToWrite:
        """The rows of a write. Its lease ends whether or not it succeeds; it may have been larger than what is kept."""
        held = self.calls.take(call.client, columns.lease, MemoryLease) if columns.lease else []
        try:
            for header in columns.headers:
                if header.selection >= 0:
                    raise ProtocolError("a write names rows out of order: what is stored lies back to back.")
            if columns.lease and not held:
                raise ProtocolError(f"a write names lease {columns.lease}, which this client does not hold.")
            view = self._carved(columns, held[0].extents[0]) if held and held[0].extents else None
            stored = unpack_columns(columns.headers, columns.tables, call.frames, len(indexes), view)
            return RowsToWrite(indexes, stored, view is not None)
        finally:
            for lease in held:
                lease.keep()

    def _carved(self, columns: Columns, extent: ByteArray) -> Callable[[int, int], ByteArray]:
        """Carve the columns' memory out of the lease."""
        assert self._arena is not None  # which leased it
        ranges = sorted((header.offset, header.nbytes) for header in columns.headers if header.offset >= 0)
        at, stop = self._arena.offset_of(extent), self._arena.offset_of(extent) + len(extent)
        for offset, nbytes in ranges:
            if nbytes < 1 or offset < at or offset % PAGE_NBYTES or offset + nbytes > stop:
                raise ProtocolError(f"a part of {nbytes} bytes at {offset} is not within what is left of its lease.")
            at = offset + whole_pages(nbytes)
        extents = dict(zip(ranges, self._arena.carve(extent, ranges), strict=True))
        return lambda offset, nbytes: extents.pop((offset, nbytes))

    def _commit(self, call: Call, request: Commit) -> Reply:
        self.commit(request.writes)
        return Done(request.id)

    def commit(self, writes: Iterable[WriteName]) -> None:
        """These writes are published, in this order: each replaces older values."""
        for write in writes:
            for uncommitted in self.calls.take(*write, UncommittedWrite):
                self._note_changed(uncommitted.write.indexes)
                self._store(uncommitted.write)
                self._uncommitted_over(uncommitted)
                self._squeeze()

    def _abort(self, call: Call, request: Abort) -> None:
        for number in request.writes:
            self.calls.stop_waiting(call.client, number)
            self._drop_aside(call.client, number)
            for stored in self.calls.take(call.client, number, StoredRows):
                stored.undo()

    def _end_write(self, call: Call, request: EndWrite) -> Reply:
        self.end_write(request.write, request.published)
        return Done(request.id)

    def end_write(self, write: WriteName, published: Iterable[WriteName]) -> None:
        """The controller knows whether a write that its client left halfway is published, and what comes before it."""
        self.commit(published)
        self._drop_aside(*write)

    def _drop_aside(self, client: str, number: int) -> None:
        """What this call has kept aside is not published."""
        for uncommitted in self.calls.take(client, number, UncommittedWrite):
            uncommitted.undo()

    def _end_session(self, call: Call, request: EndSession) -> Reply:
        self.end_session(request.client, request.published)
        return Done(request.id)

    def end_session(self, client: str, published: Iterable[WriteName]) -> None:
        """The client has ended. Its uncommitted writes that are none of the published ones are dropped."""
        self.calls.refuse(client)
        self.commit(published)
        self.calls.end(client)
        for call in self.calls.of(client):
            self._drop_aside(client, call.number)

    def _delete(self, call: Call, request: Delete) -> Reply:
        self.delete(unpack_indexes(request.indexes))
        return Done(request.id)

    def delete(self, indexes: IntArray) -> None:
        """Delete all fields of these samples, also those that aren't committed."""
        self._note_changed(indexes)
        self._blocks.delete(indexes)
        for uncommitted in [each for each in self._uncommitted if np.isin(each.write.indexes, indexes).any()]:
            rest = uncommitted.write.without(indexes)  # a commit would bring the others back
            self._uncommitted_nbytes += rest.nbytes - uncommitted.write.nbytes
            uncommitted.write = rest
        for wait in self._waiting():  # writes for these samples that still wait for room are pointless now
            if len(wait.indexes) and bool(np.isin(wait.indexes, indexes).all()):
                wait.answer = _cleared
                self.calls.waits.examine(wait)
        self._freed()

    def _note_changed(self, indexes: IntArray) -> None:
        if self._changes is not None:
            self._changes.count(indexes)

    def _held(self, call: Call, request: AskHeld) -> Reply:
        held = self._blocks.held(unpack_indexes(request.indexes))
        return Held(request.id, {name: pack_indexes(some) for name, some in held.items()})

    def _check_alive(self, call: Call) -> None:
        if self.calls.has_ended(call.client):
            raise SessionEndedError(
                f"the session of client {call.client!r} has ended: it was silent too long, or evicted. Begin another."
            )

    # ---- room ----

    def _when_room(
        self, call: Call, request: Write | LeaseMemory, nbytes: int, fields: Sequence[str],
        carry_out: Callable[[], Reply],
    ) -> Reply | Wait:  # fmt: skip
        """Run it now if it fits and no earlier request must come first; otherwise it waits."""
        if self._capacity is None:
            return carry_out()
        if nbytes > self._capacity:
            raise StorageFullError(
                f"a put of {nbytes} bytes can never fit storage unit {self.name!r} of {self._capacity} bytes. "
                f"Put fewer samples at once, or give the queue more memory."
            )
        if self._has_room(nbytes):
            return carry_out()

        def answer(wait: Wait, has_turn: bool) -> Reply | None:
            if wait.late and not has_turn:
                self._blocks.squeeze()
                has_turn = self.calls.waits.is_first(wait) and wait.size <= self._free()
                self._freed()
            if has_turn:
                return carry_out()
            return self._full(call, nbytes, self.calls.now - wait.since) if wait.late else None

        indexes = unpack_indexes(request.indexes)
        size = max(0, nbytes - (self._blocks.replaced_nbytes(indexes, fields) if len(indexes) else 0))
        self._blocks.look_for_disk()
        deadline = self.calls.now + request.wait_s
        return _ForRoom(_MEMORY, deadline, answer, size=size, nbytes=nbytes, indexes=indexes)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so much fits now, and nothing waits that must come first."""
        return nbytes <= self._free() and _MEMORY not in self.calls.waits.occupied

    @property
    def _taken_nbytes(self) -> int:
        return self._blocks.memory_nbytes + self._leased_nbytes + self._uncommitted_nbytes

    def _free(self) -> int:
        return 2**62 if self._capacity is None else self._capacity - self._taken_nbytes

    def _freed(self) -> None:
        """Memory is free, or can be made free by moving what is live."""
        self.calls.waits.wake_first(_MEMORY)
        self._go_on_moving()

    def _go_on_moving(self) -> None:
        if self._blocks.is_moving and not self._is_moving:
            self._is_moving = True
            self.calls.later(self._move())

    def _move(self) -> Iterator[None]:
        """Move live rows of mostly dead blocks, or blocks to disk, one step at a time."""
        while self._blocks.is_moving:
            self._blocks.move()
            self.calls.waits.wake_first(_MEMORY)
            yield
        self._is_moving = False

    def _make_room(self) -> bool:
        """Compact dead rows if that helps a waiting request; else begin to spill. Returns whether room was gained."""
        held = self._blocks.memory_nbytes
        possible = self._free() + self._blocks.held_nbytes - self._blocks.live_nbytes
        if any(wait.size <= possible for wait in self._waiting()):
            self._blocks.pack()
            if self._blocks.memory_nbytes < held:
                return True
        self._blocks.start_spilling()
        self._go_on_moving()  # it wakes the waits itself: woken here, they would be examined again and again
        return False

    def _squeeze(self) -> None:
        """Compact at once if a write was admitted because of values that it replaces."""
        if self._capacity is not None and self._taken_nbytes > self._capacity:
            self._blocks.squeeze()

    def _full(self, call: Call, nbytes: int, waited_s: float) -> Failed:
        store, file = self._blocks, self._file
        taken, most = in_bytes(min(store.live_nbytes, store.memory_nbytes)), in_bytes(self._capacity or 0)
        facts = [f"the values of storage unit {self.name!r} take {taken} of {most}"]
        if file is not None:
            facts[0] += f" in memory, and {in_bytes(store.spilled_nbytes)} of {in_bytes(file.nbytes)} on disk"
            facts += [f"its disk: {file.failure}"] if file.failure else []
        found = no_room(call.client, in_bytes(nbytes), MEMORY, waited_s, facts)
        return Failed(call.number, StorageFullError.__name__, f"Storage capacity exceeded: {found}")


def _cleared(wait: Wait, has_turn: bool) -> Reply:
    error = SampleClearedError("the samples of a put that waited for room were cleared meanwhile.")
    return Failed(wait.owner.number, *to_wire(error))
