# SPDX-License-Identifier: Apache-2.0
"""Reads from storage units, in the client: one message to each unit that holds some of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.protocol import UnitRuns, by_row, pack_indexes
from transfer_queue.storage.base import Places
from transfer_queue.storage.messages import Read, Release, Rows, decode_answer, unpack_columns
from transfer_queue.storage.shm.choose import UnitDirectory, values_lost
from transfer_queue.storage.shm.connect import UnitConnection, decide_paths
from transfer_queue.storage.wire import IntArray, Positions, WireColumn, as_run, count_of, groups
from transfer_queue.transport.session import Session

Share = tuple[int, Positions, list[str]]
"""What one unit is asked for: (its number, positions of the rows, fields)."""


class ReadResult:
    """The values that the units answered to one read. Those in arenas stay there until ``close``."""

    def __init__(self, session: Session, fields: Sequence[str]) -> None:
        self._session = session
        self._caller = session.caller  # its session pins the values
        self._pinned: list[tuple[UnitConnection, int]] = []
        self.columns: dict[str, list[tuple[Positions, WireColumn]]] = {name: [] for name in fields}
        """By field, the wire columns and the positions of the batch that they fill."""

    async def read(self, units: UnitDirectory, indexes: IntArray, places: Places | None, timeout_s: float) -> None:
        """Ask every unit for its share of these samples' fields, then wait for all answers.

        ``places`` None: the client knows of unit 0 alone.

        Raises:
            UnitLostError: a unit has ended; names the samples and fields that were lost with it.
        """
        shares = shares_of(len(indexes), list(self.columns), {} if places is None else places.units)
        try:
            await self._read(units, indexes, shares, places, timeout_s)
        except QueueUnreachableError:
            lost = await units.lost_among(number for number, _, _ in shares)
            if not lost:
                raise
            values: dict[str, list[int]] = {}
            for number, at, fields in shares:
                for name in fields if number in lost else ():
                    values.setdefault(name, []).extend(indexes[at].tolist())
            raise values_lost(values) from None

    async def _read(
        self, units: UnitDirectory, indexes: IntArray, by_number: list[Share], places: Places | None, timeout_s: float
    ) -> None:
        shares = [(await units.connection(number), at, fields) for number, at, fields in by_number]
        await decide_paths(unit for unit, _, _ in shares)
        calls, published = [], [] if places is None else list(places.committing)
        for unit, at, fields in shares:
            mapped = unit.arena is not None
            number, packed = self._session.number(), pack_indexes(indexes[at])
            read = Read(number, packed, fields, mapped, places is None, published)
            calls.append((unit.peer, read, ()))
        try:
            answers = await self._session.call_many(calls, timeout_s)
            for (unit, at, _), answer in zip(shares, answers, strict=True):
                self.add(unit, at, decode_answer(answer.header, Rows), answer.frames)
        except BaseException:  # unread answers may have pinned memory, too
            for peer, read, _ in calls:
                await self._session.post(peer, Release(self._session.number(), [read.id]))
            raise

    def add(self, connection: UnitConnection, at: Positions, rows: Rows, frames: Sequence[memoryview]) -> None:
        """Add one unit's answer. ``at``: the positions of the batch that it was asked for."""
        if rows.pinned:
            self._pinned.append((connection, rows.id))
        view = connection.arena if rows.pinned else None
        for name, where, column in unpack_columns(rows.headers, rows.tables, frames, count_of(at), view):
            self.columns[name].append((where if isinstance(at, slice) else as_run(at[where]), column))

    async def close(self) -> None:
        """Release the pins: no value is used where it lies any more. Idempotent; after a Ctrl-C, call it again."""
        while self._pinned:
            connection, call = self._pinned[-1]
            await self._session.post(connection.peer, Release(self._session.number(), [call]))
            self._pinned.pop()


def shares_of(count: int, names: Sequence[str], units: Mapping[str, UnitRuns | None]) -> list[Share]:
    """What to read from which unit. Positions are a slice if one unit has all of them."""
    together: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name in names:
        together.setdefault(tuple(units.get(name) or [(0, count)]), []).append(name)
    shares: list[Share] = []
    for runs, fields in together.items():
        if len(runs) == 1:
            shares.append((runs[0][0], slice(0, count), fields))
            continue
        shares += [(unit, at, fields) for unit, at in groups(by_row(list(runs)))]
    return shares
