# SPDX-License-Identifier: Apache-2.0
"""A client's connection to one storage unit, and that unit's share of a write or a read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from transfer_queue.storage.copying import Copy
from transfer_queue.storage.messages import Columns, Lease, Packer, Release, Rows, UnitStats, unpack_columns
from transfer_queue.storage.unit.arena import whole_pages
from transfer_queue.storage.unit.arena_sharing import MappedArena, arena_path, map_arena
from transfer_queue.storage.unit.unit import least_in_arena
from transfer_queue.storage.wire import Positions, WireColumn, as_run, count_of, cut
from transfer_queue.transport.base import Peer
from transfer_queue.transport.modes import is_blocking
from transfer_queue.transport.session import Session

if TYPE_CHECKING:
    from transfer_queue.storage.pack import Column


MemoryColumns: TypeAlias = Mapping[str, "Column"]
Path: TypeAlias = Literal["arena", "frames", "undecided"]


class SeenStats(UnitStats, frozen=True):
    """A unit's statistics, and how the asking client's values reach it.

    ``path``: "arena", through memory that both map (except small values); "frames", in messages; "undecided", before
    this client's first put or get there.
    """

    path: Path = "undecided"


class UnitConnection:
    """Any thread may use it."""

    def __init__(self, peer: Peer, shared: bool = True) -> None:
        """``shared`` False: don't map the arena; values travel as frames."""
        self.peer = peer
        self._trying = threading.Lock()  # held for as long as a unit may take to answer
        self._tried = not shared or arena_path(peer.address) is None
        self._arena: MappedArena | None = None
        self._closed = False

    @property
    def arena(self) -> MappedArena | None:
        """The mapped arena, or None. Decided once by trying, which may take seconds if the unit does not answer."""
        if not self._tried:
            with self._trying:
                if not self._tried:
                    self._arena = map_arena(self.peer.address)
                    self._tried = True
                    if self._closed:  # meanwhile
                        self._arena = None
        return self._arena

    @property
    def path(self) -> Path:
        """How this client's values reach the unit. It tries nothing."""
        if not self._tried:
            return "undecided"
        return "frames" if self._arena is None else "arena"

    def stats(self, stats: UnitStats) -> SeenStats:
        """The unit's statistics, with this client's ``path``."""
        return SeenStats(**msgspec.structs.asdict(stats), path=self.path)

    def close(self) -> None:
        """Unmap the arena once nothing refers to it."""
        self._closed = self._tried = True
        self._arena = None


async def decide_paths(connections: Iterable[UnitConnection]) -> None:
    """Try to map the arenas of these units, in a thread if an event loop is running."""
    if is_blocking():
        return
    undecided = [connection for connection in connections if connection.path == "undecided"]
    if undecided:
        await asyncio.gather(*(asyncio.to_thread(getattr, each, "arena") for each in undecided))


class UnitWrite:
    """One unit's share of a write. Call ``lease`` first, unless it returns None; then ``packed``, which copies."""

    def __init__(
        self, connection: UnitConnection, rows: Positions, count: int, columns: MemoryColumns, inline_nbytes: int
    ) -> None:
        """``rows``: the ``count`` rows of the write that belong to this unit."""
        self.connection = connection
        self._rows = rows
        self._count = count
        self._columns = columns
        self._arena = connection.arena
        self._sizes = self._sizes_in_arena(inline_nbytes)
        self._offset = -1
        self.lease_call = 0
        """The call that leases memory for it; 0: none."""

    def _sizes_in_arena(self, inline_nbytes: int) -> dict[str, int]:
        """Bytes of the fields that go to the arena; none if frames are cheaper, or without an arena."""
        sizes = {name: column.nbytes_of(self._rows) for name, column in self._columns.items()}
        if sum(sizes.values()) <= inline_nbytes or self._arena is None:
            return {}
        least = least_in_arena(inline_nbytes)
        return {name: nbytes for name, nbytes in sizes.items() if nbytes >= least}

    def lease(self, call: int, wait_s: float, replaced: bytes) -> Lease | None:
        """The lease to request first. ``replaced``: packed indexes of samples that this write replaces."""
        total = sum(map(whole_pages, self._sizes.values()))
        if not total:
            return None
        self.lease_call = call
        return Lease(call, total, replaced, list(self._columns) if replaced else [], wait_s)

    def leased(self, offset: int) -> None:
        """Take the unit's answer; -1: no address range is left."""
        self._offset = offset
        if offset < 0:
            self.lease_call = 0

    def packed(self, copy: Copy) -> tuple[Columns, list[Any]]:
        """Return the message's columns and frames. Arena values are there once ``copy`` is finished."""
        packer, offset = Packer(), self._offset
        for name, column in self._columns.items():
            nbytes = self._sizes.get(name)
            if nbytes is not None and self.lease_call and self._arena is not None:
                stored = column.stored_in(self._arena.view(offset, nbytes), self._rows, self._count, copy)
                packer.add_at(name, slice(0, self._count), stored, offset)
                offset += whole_pages(nbytes)
                continue
            for where, rows in cut(column.wire_column(), self._rows):
                packer.add(name, where, rows)
        return Columns(packer.headers, packer.tables, self.lease_call), packer.frames


class ReadResult:
    """The values that the units answered to one read. Those in arenas stay there until ``close``."""

    def __init__(self, session: Session, fields: Sequence[str]) -> None:
        self._session = session
        self._pinned: list[tuple[UnitConnection, int]] = []
        self.columns: dict[str, list[tuple[Positions, WireColumn]]] = {name: [] for name in fields}
        """By field, the wire columns and the positions of the batch that they fill."""

    def add(self, connection: UnitConnection, at: Positions, rows: Rows, frames: Sequence[memoryview]) -> None:
        """Add one unit's answer. ``at``: the positions of the batch that it was asked for."""
        if rows.pinned:
            self._pinned.append((connection, rows.id))
        arena = connection.arena if rows.pinned else None
        view = None if arena is None else arena.view
        for name, where, column in unpack_columns(rows.headers, rows.tables, frames, count_of(at), view):
            self.columns[name].append((where if isinstance(at, slice) else as_run(at[where]), column))

    async def close(self) -> None:
        """Release the pins: no value is used where it lies any more. Idempotent; after a Ctrl-C, call it again."""
        while self._pinned:
            connection, call = self._pinned[-1]
            await self._session.post(connection.peer, Release(self._session.number(), [call]))
            self._pinned.pop()
