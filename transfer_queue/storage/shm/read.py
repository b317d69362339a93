# SPDX-License-Identifier: Apache-2.0
"""The answers to one read: each unit's values as parts of the batch, and the pins that protect them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from transfer_queue.storage.pieces import Piece, Positions
from transfer_queue.storage.selection import as_run
from transfer_queue.storage.shm.connection import UnitConnection
from transfer_queue.storage.shm.messages import Release, Rows
from transfer_queue.storage.shm.parts import unpack_parts
from transfer_queue.transport.session import Session

FoundParts: TypeAlias = dict[str, list[tuple[Positions, Piece]]]


class Reading:
    """Values in arenas stay there until ``close``."""

    def __init__(self, session: Session, fields: Sequence[str]) -> None:
        self._session = session
        self._pinned: list[tuple[UnitConnection, int]] = []
        self.parts: FoundParts = {name: [] for name in fields}
        """By field, the wire columns and the positions of the batch that they fill."""

    def add(self, connection: UnitConnection, at: Positions, rows: Rows, frames: Sequence[memoryview]) -> None:
        """Add one unit's answer. ``at``: the positions of the batch that it was asked for."""
        if rows.pinned:
            self._pinned.append((connection, rows.id))
        arena = connection.arena if rows.pinned else None
        count = at.stop - at.start if isinstance(at, slice) else len(at)
        view = None if arena is None else arena.view
        for name, where, piece in unpack_parts(rows.parts, rows.tables, frames, count, view):
            self.parts[name].append((where if isinstance(at, slice) else as_run(at[where]), piece))

    async def close(self) -> None:
        """Nothing is read where it lies any more. Idempotent; once more after a Ctrl-C within it."""
        while self._pinned:
            connection, call = self._pinned[-1]
            await self._session.post(connection.peer, Release(self._session.number(), [call]))
            self._pinned.pop()
