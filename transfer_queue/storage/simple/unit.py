# SPDX-License-Identifier: Apache-2.0
"""One storage unit: answers leases, writes, reads and drops on a block store; parks what does not fit yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.errors import ProtocolError, SampleClearedError, StorageFullError, to_wire
from transfer_queue.storage.pieces import ByteArray, IntArray
from transfer_queue.storage.selection import heap
from transfer_queue.storage.simple.answers import answer_in_frames, answer_in_place
from transfer_queue.storage.simple.arena import PAGE_NBYTES, Arena, whole_pages
from transfer_queue.storage.simple.blocks import BlockStore
from transfer_queue.storage.simple.given_up import GivenUp
from transfer_queue.storage.simple.holds import AHEAD_S, Holds
from transfer_queue.storage.simple.messages import (
    Answer,
    Drop,
    Dropped,
    Failed,
    FieldParts,
    Forsake,
    Forsaken,
    Hold,
    Lease,
    Leased,
    NotSmall,
    Present,
    Read,
    TakeBack,
    UnitStats,
    Write,
    Written,
    decode_request,
    encode,
    unpack_indexes,
)
from transfer_queue.storage.simple.open_writes import OpenWrites
from transfer_queue.storage.simple.parking import Parked, Parking
from transfer_queue.storage.simple.parts import unpack_parts
from transfer_queue.storage.simple.words import BEGIN, unpack_word
from transfer_queue.transport.base import Envelope, Outgoing


class Told(NamedTuple):
    """What a controller answered to a client's message. ``done``: it did what it was told."""

    answer: bytes
    done: bool


Tell = Callable[[str, bytes], Told]

INLINE_NBYTES = 64 * 1024
"""Values of at most so many bytes travel in the message: cheaper than to lease, or to pin, memory for them."""


def least_in_arena(inline_nbytes: int) -> int:
    """Smaller blocks lie outside the arena, which gives whole pages only."""
    return max(1, inline_nbytes // 4)


class StorageUnit:
    """A transport ``Handler``. Values stay opaque bytes here: no torch, nothing decoded, nothing unpickled."""

    def __init__(
        self,
        name: str = "unit",
        capacity_bytes: int | None = None,
        arena: Arena | None = None,
        inline_nbytes: int = INLINE_NBYTES,
        tell: Tell | None = None,
    ) -> None:
        """``capacity_bytes``: what all values together may take; None is unlimited. Without an arena all is frames.

        ``tell``: hands a client's message to a controller that is served by the same thread, and returns its answer.
        """
        self.name = name
        self._inline_nbytes = inline_nbytes
        self._tell = tell
        self._capacity = capacity_bytes
        self._arena = arena
        self._store = BlockStore(self._allocate, arena.changes if arena is not None else None)
        self._holds = Holds()
        self._parking = Parking()
        self._open_writes = OpenWrites()
        self._given_up = GivenUp()
        self._now = -math.inf

    # ---- a transport handler ----

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        self._tick(now)
        return self._answered(envelope, partial(self._serve, envelope, header, frames, now))

    def expire(self, now: float) -> Iterable[Outgoing]:
        self._tick(now)
        answers = self._let_in()  # what may not wait any longer, and fits once dead rows are given up at once
        answers += [_failed(parked.envelope, self._full(parked, now)) for parked in self._parking.take_late(now)]
        freed = self._holds.expire(now)
        trim = None if self._arena is None else self._arena.next_trim()
        if self._arena is not None and trim is not None and trim <= now:
            self._arena.trim(now)
        moving = self._store.is_moving
        if moving:
            self._store.move()
        return answers + (self._let_in() if answers or freed or moving else [])

    def next_deadline(self) -> float | None:
        if self._store.is_moving:
            return -math.inf  # a step each turn, beside whoever waits for an answer
        earliest = None if self._arena is None else self._arena.next_trim()
        for deadline in (self._parking.next_deadline(), self._holds.next_deadline()):
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return earliest

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """Its parked requests go with it: nobody would publish what they write."""
        self._tick(now)
        self._parking.forget(lambda parked: parked.envelope.client == client)
        return self._let_in()

    # ---- a host of clients that map the arena ----

    def attached(self, guest: int) -> tuple[int, bytes]:
        assert self._arena is not None
        self._holds.enter(guest)
        return self._arena.descriptor, self._arena.nbytes.to_bytes(8, "little")

    def told(self, guest: int, word: int, now: float) -> Iterable[Outgoing]:
        self._tick(now)
        what, number = unpack_word(word)
        if what == BEGIN:
            self._holds.begin(guest, number)
            return []
        # Who gave up must neither be granted it later nor hold up those behind.
        self._parking.forget(lambda parked: parked.hold == Hold(guest, number))
        self._holds.let_go(guest, number)
        return self._let_in()

    def detached(self, guest: int, now: float) -> Iterable[Outgoing]:
        self._tick(now)
        self._holds.leave(guest)
        self._parking.forget(lambda parked: parked.hold is not None and parked.hold.guest == guest)
        return self._let_in()

    # ---- requests ----

    def stats(self) -> UnitStats:
        store, arena = self._store, self._arena
        return UnitStats(
            unit=self.name,
            samples=store.num_samples,
            values=store.num_values,
            live_nbytes=store.live_nbytes,
            held_nbytes=store.held_nbytes,
            blocks=store.num_blocks,
            capacity_bytes=self._capacity,
            parked=len(self._parking),
            parked_nbytes=self._parking.nbytes,
            arena_nbytes=0 if arena is None else arena.used_nbytes,
            recyclable_nbytes=0 if arena is None else arena.recyclable_nbytes,
            leased_nbytes=self._holds.leased_nbytes,
            pins=self._holds.num_pins,
            attached=self._holds.num_clients,
        )

    def _tick(self, now: float) -> None:
        self._now = now
        if self._arena is not None:
            self._arena.tick(now)

    def _allocate(self, nbytes: int) -> ByteArray:
        memory = None
        if self._arena is not None and nbytes >= least_in_arena(self._inline_nbytes):
            memory = self._arena.allocate(nbytes)
        return heap(nbytes) if memory is None else memory

    def _answered(self, envelope: Envelope, serve: Callable[[], list[Outgoing]]) -> list[Outgoing]:
        try:
            return serve()
        # The one place that must outlive any message, whatever is wrong with it.
        except Exception as error:
            return [_failed(envelope, error)]

    def _serve(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> list[Outgoing]:
        request = decode_request(header)
        if self._open_writes.has_ended(envelope.client):
            raise ProtocolError(f"client {envelope.client!r} was taken for dead, and what it wrote given up.")
        if isinstance(request, Write):
            if not request.given_up:
                return self._write(envelope, request, frames, now)
            self._give_up(envelope.client, request.given_up)
            return self._let_in() + self._answered(envelope, lambda: self._write(envelope, request, frames, now))
        if isinstance(request, Lease):
            return self._lease(envelope, request, now)
        if isinstance(request, Read):
            return [self._read(envelope, request)]
        if isinstance(request, Drop):
            return self._drop(envelope, request)
        if isinstance(request, TakeBack):
            return self._take_back(envelope, request)
        if isinstance(request, Forsake):
            left = self._open_writes.end(request.client)
            return [_answer(envelope, Forsaken(left)), *self.client_gone(request.client, now)]
        return [_answer(envelope, self.stats())]

    def _read(self, envelope: Envelope, request: Read) -> Outgoing:
        indexes, fields, pin = unpack_indexes(request.indexes), request.fields, request.pin
        shared = self._arena is not None and pin is not None and self._holds.may(pin.guest, pin.number)
        most = self._inline_nbytes if shared or request.small else math.inf
        if most == math.inf or self._store.likely_nbytes(indexes, fields) <= most:
            parts = self._store.read(indexes, fields)
            if sum(piece.nbytes for _, _, piece in parts) <= most:
                answer, frames, _ = answer_in_frames(parts, self._store.changes.count)
                return Outgoing(envelope, encode(answer), frames)
        if request.small or pin is None or self._arena is None:
            return _answer(envelope, NotSmall())
        answer, frames, pinned = answer_in_place(self._store.locate(indexes, fields), self._arena.offset_of)
        if pinned:
            self._holds.pin(pin.guest, pin.number, pinned)
        return Outgoing(envelope, encode(answer), frames)

    def _lease(self, envelope: Envelope, request: Lease, now: float) -> list[Outgoing]:
        indexes, hold = unpack_indexes(request.indexes), request.hold
        if request.nbytes < 1:
            raise ProtocolError(f"a lease of {request.nbytes} bytes: ask for at least one.")
        if self._arena is None or not self._holds.may(hold.guest, hold.number):
            return [_answer(envelope, Leased(-1))]
        carry_out = partial(self._grant, envelope, hold, request.nbytes)
        deadline = now + request.wait_s
        return self._admit(
            Parked(envelope, indexes, request.fields, request.nbytes, now, deadline, carry_out, hold), now
        )

    def _grant(self, envelope: Envelope, hold: Hold, nbytes: int) -> list[Outgoing]:
        assert self._arena is not None
        extent = self._arena.allocate(nbytes)
        if extent is None:
            return [_answer(envelope, Leased(-1))]
        self._holds.lease(hold.guest, hold.number, extent)
        self._squeeze()
        return [_answer(envelope, Leased(self._arena.offset_of(extent)))]

    def _write(self, envelope: Envelope, request: Write, frames: list[memoryview], now: float) -> list[Outgoing]:
        if self._given_up.attempts and self._given_up.take(envelope.client, request.attempt):
            raise ProtocolError("a write that its client gave up before it came.")
        if request.lease is not None:
            # The lease is gone, whatever becomes of the write, and it may have taken more than what is kept now.
            return (
                self._answered(envelope, partial(self._write_leased, envelope, request, frames, now)) + self._let_in()
            )
        indexes, parts = self._parts(request, frames)
        keep = partial(self._keep, envelope, request, indexes, parts, now)
        if self._capacity is None and not len(self._parking):
            return keep()
        nbytes = sum(piece.nbytes for _, _, piece in parts)
        fields = [name for name, _, _ in parts]
        deadline, attempt = now + request.wait_s, request.attempt
        return self._admit(Parked(envelope, indexes, fields, nbytes, now, deadline, keep, attempt=attempt), now)

    def _write_leased(self, envelope: Envelope, request: Write, frames: list[memoryview], now: float) -> list[Outgoing]:
        indexes, parts = self._parts(request, frames)
        return self._keep(envelope, request, indexes, parts, now)

    def _parts(self, request: Write, frames: list[memoryview]) -> tuple[IntArray, FieldParts]:
        """The write's indexes and rows, some of them in what was its lease until now."""
        indexes = unpack_indexes(request.indexes)
        for part in request.parts:
            if part.picks >= 0:
                raise ProtocolError("a write names rows out of order: what is stored lies back to back.")
        view = None if request.lease is None else self._leased(request)
        return indexes, unpack_parts(request.parts, request.tables, frames, len(indexes), view)

    def _leased(self, request: Write) -> Callable[[int, int], ByteArray]:
        """The parts' own memory, cut out of the lease."""
        assert request.lease is not None
        extent = self._holds.take_lease(request.lease.guest, request.lease.number)
        if extent is None or self._arena is None:
            raise ProtocolError("a write names a lease that was never given, or has been given back.")
        ranges = sorted((part.offset, part.nbytes) for part in request.parts if part.offset >= 0)
        at, stop = self._arena.offset_of(extent), self._arena.offset_of(extent) + len(extent)
        for offset, nbytes in ranges:
            if nbytes < 1 or offset < at or offset % PAGE_NBYTES or offset + nbytes > stop:
                raise ProtocolError(f"a part of {nbytes} bytes at {offset} is not within what is left of its lease.")
            at = offset + whole_pages(nbytes)
        extents = dict(zip(ranges, self._arena.carve(extent, ranges), strict=True))
        return lambda offset, nbytes: extents.pop((offset, nbytes))

    def _admit(self, parked: Parked, now: float) -> list[Outgoing]:
        """Carry it out, or park it until there is room."""
        if self._capacity is not None and parked.nbytes > self._capacity:
            raise StorageFullError(
                f"a put of {parked.nbytes} bytes can never fit storage unit {self.name!r} of {self._capacity} bytes. "
                f"Put fewer samples at once, or give the units more memory."
            )
        if len(self._parking) or not self._fits(parked):
            if parked.deadline <= now:
                return [_failed(parked.envelope, self._full(parked, now), later=True)]
            self._parking.add(parked)
            return []
        return parked.carry_out()

    @property
    def _taken_nbytes(self) -> int:
        return self._store.held_nbytes + self._holds.leased_nbytes

    def _fits(self, parked: Parked) -> bool:
        if self._capacity is None or self._taken_nbytes + parked.nbytes <= self._capacity:
            return True
        freed = self._store.replaced_nbytes(parked.indexes, parked.fields)
        if self._store.live_nbytes + self._holds.leased_nbytes - freed + parked.nbytes > self._capacity:
            return False
        if parked.deadline > self._now:  # else ``_squeeze`` does it at once, and nobody is served meanwhile
            self._store.pack()
        return not self._store.is_moving or parked.deadline <= self._now

    def _squeeze(self) -> None:
        """What was let in counting on dead rows, or on values that it replaced, needs their room now."""
        if self._capacity is not None and self._taken_nbytes > self._capacity:
            self._store.squeeze()

    def _keep(
        self, envelope: Envelope, request: Write, indexes: IntArray, parts: FieldParts, now: float
    ) -> list[Outgoing]:
        if request.absent and self._store.holds_any(indexes, {name for name, _, _ in parts}):
            return [_answer(envelope, Present())]
        self._store.write(indexes, parts, self._open_writes.begin(envelope.client, request))
        self._squeeze()
        ahead = self._ahead(request, now)
        return [_answer(envelope, Written(ahead, self._hand_on(envelope.client, request)))]

    def _hand_on(self, client: str, write: Write) -> bytes:
        """What the controller answered to what it should be told once this write is kept."""
        if self._tell is None or not write.then:
            return b""
        told = self._tell(client, write.then)
        if told.done and write.number:  # readers know it now: a client that misses the answer must not take it back
            self._open_writes.take(client, write.number, None)
        return told.answer

    def _give_up(self, client: str, attempts: list[int]) -> None:
        """``_let_in`` must follow."""
        self._given_up.add(client, attempts)
        self._parking.forget(lambda parked: parked.attempt in attempts and parked.envelope.client == client)

    def _drop(self, envelope: Envelope, request: Drop) -> list[Outgoing]:
        if request.given_up:
            self._give_up(envelope.client, request.given_up)
        indexes = unpack_indexes(request.indexes)
        answers = [_answer(envelope, Dropped(self._store.drop(indexes, request.fields)))]
        if request.fields is None:
            # What still waits to be written for these samples has lost its purpose, and nobody would drop it later.
            lost = [parked for parked in self._parking if np.isin(parked.indexes, indexes).all()]
            self._parking.forget(lambda parked: parked in lost)
            error = SampleClearedError("the samples of a put that waited for room were cleared meanwhile.")
            answers += [_failed(parked.envelope, error) for parked in lost]
        return answers + self._let_in()

    def _take_back(self, envelope: Envelope, request: TakeBack) -> list[Outgoing]:
        if request.given_up:
            self._give_up(envelope.client, request.given_up)
        found = self._open_writes.take(request.client or envelope.client, request.number, request.indexes)
        dropped = 0
        if found is not None:
            number, indexes, fields = found
            dropped = self._store.take_back(unpack_indexes(indexes), fields, number)
        return [_answer(envelope, Dropped(dropped)), *self._let_in()]

    def _ahead(self, request: Write, now: float) -> int:
        """Lease memory for this client's next write unless somebody else needs it now."""
        hold, nbytes = request.ahead, request.ahead_nbytes
        if hold is None or self._arena is None or len(self._parking) or not self._holds.may(hold.guest, hold.number):
            return -1
        if self._capacity is not None and self._taken_nbytes + nbytes > self._capacity:
            return -1
        extent = self._arena.allocate(nbytes)
        if extent is None:
            return -1
        self._holds.lease(hold.guest, hold.number, extent, now + AHEAD_S)
        return self._arena.offset_of(extent)

    def _let_in(self) -> list[Outgoing]:
        answers: list[Outgoing] = []
        while (first := self._parking.first()) is not None and self._fits(first):
            self._parking.remove(first)
            answers += self._answered(first.envelope, first.carry_out)
        return answers

    def _full(self, parked: Parked, now: float) -> StorageFullError:
        return StorageFullError(
            f"Storage capacity exceeded: a put of {parked.nbytes} bytes waited {now - parked.since:.1f} s at storage "
            f"unit {self.name!r}, whose values take {self._store.live_nbytes} of {self._capacity} bytes. "
            f"Clear consumed samples sooner, raise the capacity, or raise put_timeout_s."
        )


def _answer(envelope: Envelope, answer: Answer, frames: Iterable[Any] = ()) -> Outgoing:
    return Outgoing(envelope, encode(answer), list(frames))


def _failed(envelope: Envelope, error: BaseException, later: bool = False) -> Outgoing:
    return _answer(envelope, Failed(*to_wire(error), later))
