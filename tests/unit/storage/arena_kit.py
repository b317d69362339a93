# SPDX-License-Identifier: Apache-2.0
"""A client of a unit with an arena, each message made by hand, with a mapping of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.unit.storage.unit_kit import LoneUnit, UnitReply
from transfer_queue.protocol import Failed, Reply, Request, pack_indexes
from transfer_queue.storage.messages import (
    PAGE_NBYTES,
    ColumnHeader,
    Columns,
    Commit,
    Delete,
    EndSession,
    LeasedMemory,
    LeaseMemory,
    Read,
    Release,
    Rows,
    Write,
    Written,
    unpack_columns,
    whole_pages,
)
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.wire import ByteArray, Layout, WireColumn, dense_layout

PAGE = PAGE_NBYTES


class ArenaUnit(LoneUnit):
    """A unit that keeps all values in its arena."""

    def __init__(self, pages: int | None = None, arena_pages: int = 256) -> None:
        self.arena = Arena(arena_pages * PAGE)
        super().__init__("u0", None if pages is None else pages * PAGE, self.arena, inline_nbytes=0)


def indexes_of(indexes: Sequence[int]) -> bytes:
    return pack_indexes(np.array(list(indexes), np.int64))


def row_layout(nbytes: int) -> Layout:
    return dense_layout("uint8", 1, (nbytes,))


class ArenaClient:
    """Its session is known by its name; its calls are numbered from 1."""

    def __init__(self, unit: ArenaUnit, name: str) -> None:
        self.unit: LoneUnit = unit
        self.name = name
        self.memory = np.frombuffer(mmap.mmap(unit.arena.descriptor, unit.arena.nbytes), np.uint8)
        self.calls = 0

    def number(self) -> int:
        self.calls += 1
        return self.calls

    def of_a_unit_without_an_arena(self) -> ArenaClient:
        self.unit = LoneUnit("u1")
        return self

    # ---- requests ----

    def ask(self, request: Request, frames: Sequence[Any] = (), now: float = 0.0) -> list[UnitReply]:
        """Every answer that this request brings about, also those of other clients."""
        return self.unit.handle(self.name, request, [memoryview(frame).cast("B") for frame in frames], now)

    def one(self, request: Request, frames: Sequence[Any] = (), now: float = 0.0) -> Any:
        """The only answer."""
        ((client, answer, _),) = self.ask(request, frames, now)
        assert (client, answer.id) == (self.name, request.id)
        return answer

    def lease(self, pages: int, indexes: Sequence[int] = (), wait_s: float = 10.0) -> LeaseMemory:
        return LeaseMemory(self.number(), pages * PAGE, indexes_of(indexes), ["a"], wait_s)

    def leased(self, pages: int) -> tuple[int, int]:
        """(call, offset) of a lease for which there must be room."""
        lease = self.lease(pages)
        answer = self.one(lease)
        assert isinstance(answer, LeasedMemory), answer
        return lease.id, answer.offset

    def view(self, offset: int, nbytes: int) -> ByteArray:
        return self.memory[offset : offset + nbytes]

    def written_at(self, offset: int, lease: int | None, values: dict[int, int], nbytes: int) -> Write:
        """A write of rows of ``nbytes`` bytes, each full of its value, that lie at ``offset`` now."""
        rows = np.repeat(np.array(list(values.values()), np.uint8), nbytes)
        self.view(offset, len(rows))[:] = rows
        part = ColumnHeader("a", row_layout(nbytes), len(values), offset=offset, nbytes=len(rows))
        return Write(self.number(), indexes_of(values), Columns([part], lease=lease))

    def write_row(self, index: int, parts: dict[str, tuple[int, int]], lease: int) -> int:
        """One sample, of whose fields each lies at (offset, number of bytes). Returns the call."""
        headers = [
            ColumnHeader(field, row_layout(nbytes), 1, offset=offset, nbytes=nbytes)
            for field, (offset, nbytes) in parts.items()
        ]
        write = Write(self.number(), indexes_of([index]), Columns(headers, lease=lease))
        assert is_written(self.one(write))
        return write.id

    def put(self, values: dict[int, int], nbytes: int = PAGE, now: float = 0.0, commit: bool = True) -> Any:
        """The answer to a write into leased memory, which is then committed; there must be room."""
        lease = self.lease(whole_pages(len(values) * nbytes) // PAGE, list(values))
        leased = self.one(lease, now=now)
        return self._written(self.written_at(leased.offset, lease.id, values, nbytes), (), commit, now)

    def _written(self, write: Write, frames: Sequence[Any], commit: bool, now: float = 0.0) -> Any:
        answer = self.one(write, frames, now=now)
        if commit and isinstance(answer, Written):
            self.commit(write.id, now=now)
        return answer

    def commit(self, *writes: int, now: float = 0.0) -> list[UnitReply]:
        return self.ask(Commit(self.number(), [(self.name, write) for write in writes]), now=now)

    def read(self, indexes: Sequence[int], mapped: bool = True) -> tuple[Rows, list[WireColumn]]:
        """The answer and its wire columns where they lie."""
        ((_, answer, frames),) = self.ask(Read(self.number(), indexes_of(indexes), ["a"], mapped))
        assert isinstance(answer, Rows), answer
        parts = unpack_columns(answer.headers, answer.tables, frames, len(indexes), self.view)
        return answer, [wire for _, _, wire in parts]

    def refusal_of_read(self, indexes: Sequence[int]) -> str:
        """The code of the error."""
        answer = self.one(Read(self.number(), indexes_of(indexes), ["a"], True))
        assert isinstance(answer, Failed), answer
        return answer.code

    def unsent_read(self, indexes: Sequence[int]) -> UnitReply:
        """An answer in frames that waits to be sent."""
        (answer,) = self.ask(Read(self.number(), indexes_of(indexes), ["a"]))
        return answer

    def values(self, indexes: Sequence[int]) -> dict[int, int]:
        """What is stored, one byte of each row, read in frames."""
        ((_, answer, frames),) = self.ask(Read(self.number(), indexes_of(indexes), ["a"]))
        assert isinstance(answer, Rows), answer
        found = {}
        for _, positions, wire in unpack_columns(answer.headers, answer.tables, frames, len(indexes)):
            ends = wire.as_ragged().bounds.tolist()
            at = range(len(indexes))[positions] if isinstance(positions, slice) else positions
            for n, start, stop in zip(at, ends, ends[1:], strict=False):
                (found[indexes[n]],) = set(wire.data[start:stop].tolist())
        return found

    def delete(self, *indexes: int, now: float = 0.0) -> list[UnitReply]:
        return self.ask(Delete(self.number(), indexes_of(indexes)), now=now)

    def release(self, *calls: int, now: float = 0.0) -> list[UnitReply]:
        """The answers of others that this brings about: it has none of its own."""
        return self.ask(Release(self.number(), list(calls)), now=now)

    def end_session(self, client: str, published: Sequence[int] = ()) -> list[UnitReply]:
        """As the controller does, which says which of the client's writes are published."""
        return self.ask(EndSession(self.number(), client, [(client, call) for call in published]))

    def cancel(self, call: int, now: float = 0.0) -> list[UnitReply]:
        return self.unit.cancel(self.name, call, now)

    def end(self, now: float = 0.0) -> list[UnitReply]:
        """Its last connection has closed."""
        return self.unit.client_gone(self.name, now)


def bytes_of(wire: WireColumn) -> bytes:
    spans = zip(wire.starts.tolist(), wire.sizes.tolist(), strict=True)
    return b"".join(wire.data[start : start + size].tobytes() for start, size in spans)


def is_lease(answer: UnitReply, client: str) -> bool:
    """Has this client been given memory?"""
    return answer.client == client and isinstance(answer.reply, LeasedMemory) and answer.reply.offset >= 0


def is_written(reply: Reply) -> bool:
    return isinstance(reply, Written)


def refused(answer: Reply, fragment: str, code: str = "ProtocolError") -> None:
    assert isinstance(answer, Failed), answer
    assert answer.code == code
    assert fragment in answer.text


def of_arena(unit: LoneUnit) -> tuple[int, int, int]:
    """(pages in use, pages leased, pins)."""
    stats = unit.stats()
    return stats.arena_nbytes // PAGE, stats.leased_nbytes // PAGE, stats.pins
