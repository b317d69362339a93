# SPDX-License-Identifier: Apache-2.0
"""A client of a unit with an arena, said by hand: every message and every word, through a mapping of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from transfer_queue.storage.simple.arena import PAGE_NBYTES, Arena, whole_pages
from transfer_queue.storage.simple.messages import (
    Drop,
    Failed,
    Hold,
    Lease,
    Part,
    Read,
    Rows,
    Write,
    decode_answer,
    encode,
    pack_indexes,
)
from transfer_queue.storage.simple.parts import unpack_parts
from transfer_queue.storage.simple.unit import StorageUnit
from transfer_queue.storage.simple.words import BEGIN, LET_GO, pack_word

from transfer_queue.storage.pieces import Layout, Piece, dense_layout
from transfer_queue.transport.base import Envelope, Outgoing

PAGE = PAGE_NBYTES


def unit_of_pages(pages: int | None = None, arena_pages: int = 256) -> StorageUnit:
    """A unit that keeps all values in its arena."""
    return StorageUnit("u0", None if pages is None else pages * PAGE, Arena(arena_pages * PAGE), inline_nbytes=0)


def indexes_of(indexes: Sequence[int]) -> bytes:
    return pack_indexes(np.array(list(indexes), np.int64))


def row_layout(nbytes: int) -> Layout:
    return dense_layout("uint8", 1, (nbytes,))


class Guest:
    """``inbox``: (request number, answer) as they came for it and others of the same unit, the oldest first."""

    def __init__(self, unit: StorageUnit, number: int, name: str = "") -> None:
        self.unit, self.number, self.name = unit, number, name or f"client {number}"
        descriptor, greeting = unit.attached(number)
        self.memory = np.frombuffer(mmap.mmap(descriptor, int.from_bytes(greeting, "little")), np.uint8)
        self.sent = 0
        self.holds = 0

    # ---- requests ----

    def ask(self, request: Any, frames: Sequence[Any] = (), now: float = 0.0) -> list[tuple[str, int, Any]]:
        """(client, request number, answer) of every answer that this let go."""
        self.sent += 1
        views = [memoryview(frame).cast("B") for frame in frames]
        return told(self.unit.handle(Envelope(self.name, self.sent, b""), encode(request), views, now))

    def one(self, request: Any, frames: Sequence[Any] = (), now: float = 0.0) -> Any:
        """The only answer."""
        ((name, number, answer),) = self.ask(request, frames, now)
        assert (name, number) == (self.name, self.sent)
        return answer

    def hold(self) -> Hold:
        self.holds += 1
        return Hold(self.number, self.holds)

    def lease(self, pages: int, indexes: Sequence[int] = (), wait_s: float = 10.0) -> Lease:
        hold = self.hold()
        return Lease(hold, pages * PAGE, indexes_of(indexes or [10_000 * self.number + hold.number]), ["a"], wait_s)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        return self.memory[offset : offset + nbytes]

    def written_at(self, offset: int, hold: Hold, values: dict[int, int], nbytes: int, **more: Any) -> Write:
        """A write of rows of ``nbytes`` bytes, each full of its value, that lie at ``offset`` now."""
        rows = np.repeat(np.array(list(values.values()), np.uint8), nbytes)
        self.view(offset, len(rows))[:] = rows
        part = Part("a", row_layout(nbytes), len(values), offset=offset, nbytes=len(rows))
        return Write(indexes_of(values), [part], lease=hold, **more)

    def put(self, values: dict[int, int], nbytes: int = PAGE, now: float = 0.0, **more: Any) -> Any:
        """Lease, write and answer of the write; there must be room."""
        lease = self.lease(whole_pages(len(values) * nbytes) // PAGE, list(values))
        leased = self.one(lease, now=now)
        return self.one(self.written_at(leased.offset, lease.hold, values, nbytes, **more), now=now)

    def put_frame(self, values: dict[int, int], nbytes: int, **more: Any) -> Any:
        data = np.repeat(np.array(list(values.values()), np.uint8), nbytes)
        return self.one(Write(indexes_of(values), [Part("a", row_layout(nbytes), len(values))], **more), [data])

    def read(self, indexes: Sequence[int], pin: Hold | None = None, now: float = 0.0) -> tuple[Rows, list[Piece]]:
        """The answer and its pieces where they lie."""
        self.sent += 1
        request = encode(Read(indexes_of(indexes), ["a"], pin))
        (out,) = self.unit.handle(Envelope(self.name, self.sent, b""), request, [], now)
        answer = decode_answer(out.header)
        assert isinstance(answer, Rows), answer
        parts = unpack_parts(answer.parts, answer.tables, out.frames, len(indexes), self.view)
        return answer, [piece for _, _, piece in parts]

    def values(self, indexes: Sequence[int]) -> dict[int, int]:
        """What is stored, one byte of each row, read in frames."""
        self.sent += 1
        request = encode(Read(indexes_of(indexes), ["a"]))
        (out,) = self.unit.handle(Envelope(self.name, self.sent, b""), request, [], 0.0)
        answer = decode_answer(out.header)
        assert isinstance(answer, Rows), answer
        found = {}
        for _, positions, piece in unpack_parts(answer.parts, answer.tables, out.frames, len(indexes)):
            ends = piece.as_ragged().bounds.tolist()
            at = range(len(indexes))[positions] if isinstance(positions, slice) else positions
            for n, start, stop in zip(at, ends, ends[1:], strict=False):
                (found[indexes[n]],) = set(piece.data[start:stop].tolist())
        return found

    def drop(self, *indexes: int, now: float = 0.0) -> list[tuple[str, int, Any]]:
        return self.ask(Drop(indexes_of(indexes)), now=now)

    # ---- words ----

    def let_go(self, hold: Hold, now: float = 0.0) -> list[tuple[str, int, Any]]:
        return told(self.unit.told(self.number, pack_word(LET_GO, hold.number), now))

    def begin(self, hold: Hold, now: float = 0.0) -> list[tuple[str, int, Any]]:
        return told(self.unit.told(self.number, pack_word(BEGIN, hold.number), now))

    def die(self, now: float = 0.0) -> list[tuple[str, int, Any]]:
        return told(self.unit.detached(self.number, now))


def told(answers: Sequence[Outgoing]) -> list[tuple[str, int, Any]]:
    return [(out.envelope.client, out.envelope.request_id, decode_answer(out.header)) for out in answers]


def refused(answer: Any, fragment: str, code: str = "ProtocolError") -> None:
    assert isinstance(answer, Failed), answer
    assert answer.code == code
    assert fragment in answer.text


def of_arena(unit: StorageUnit) -> tuple[int, int, int]:
    """(pages in use, pages leased, pins)."""
    stats = unit.stats()
    return stats.arena_nbytes // PAGE, stats.leased_nbytes // PAGE, stats.pins
