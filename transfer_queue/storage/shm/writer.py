# SPDX-License-Identifier: Apache-2.0
"""Writes to storage units: which unit takes which rows, and where a write goes if a unit is full or gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

from transfer_queue.errors import QueueUnreachableError, StorageFullError, UnitLostError
from transfer_queue.protocol import LONGEST_WAIT_S, UnitRuns, pack_indexes
from transfer_queue.storage.copying import AT_ONCE
from transfer_queue.storage.shm.directory import UnitDirectory
from transfer_queue.storage.shm.messages import Abort, Columns, Leased, Release, Write, Written, decode_answer
from transfer_queue.storage.shm.unit_client import MemoryColumns, UnitWrite, decide_paths
from transfer_queue.storage.wire_columns import IntArray
from transfer_queue.transport.session import Session

_SHARE_OF_UNIT = 2
"""A larger part of a unit (one half) is not taken by one put, if other units are there."""
_PATIENCE_S = 10.0
"""How long a put waits for room at one unit before it looks at the others again."""


class UnitWriter:
    """Writes stay uncommitted. A write is cut into at most one piece per unit, usually into one."""

    def __init__(self, session: Session, units: UnitDirectory, timeout_s: float, inline_nbytes: int) -> None:
        """``timeout_s``: longest wait for an answer, besides the wait for room."""
        self._session = session
        self._units = units
        self._timeout_s = timeout_s
        self._inline_nbytes = inline_nbytes

    async def write(self, call: int, indexes: IntArray, columns: MemoryColumns, wait_s: float) -> UnitRuns | None:
        """Write all rows, or none and an error. Units that are full or gone are left out while others take the rows.

        Returns:
            Where the rows lie; None: in unit 0.
        Raises:
            StorageFullError: there was no room for ``wait_s`` seconds, or there can't be.
            UnitLostError: no unit can be reached.
        """
        attempt = _Attempt(self, call, indexes, columns, time.monotonic() + wait_s)
        place: Callable[[list[int]], Coroutine[Any, Any, None]] = attempt.at_once
        gone: set[int] = set()
        while True:
            units = [unit for unit in await self._units.to_write_to() if unit not in gone]
            if not units:
                raise UnitLostError("no storage unit of the queue can be reached: look at the output of its servers.")
            try:
                await place(units)
                return None if all(unit == 0 for unit, _ in attempt.runs) else attempt.runs
            except StorageFullError:
                await self._abort(attempt)
                if attempt.is_over():
                    raise
                place = attempt.in_order if place == attempt.at_once else attempt.at_once
            except QueueUnreachableError:
                gone.add(attempt.units[-1])
                await self._abort(attempt)
                await self._units.refresh()
            except BaseException:
                await self._abort(attempt)
                raise

    async def _abort(self, attempt: _Attempt) -> None:
        await self.abort(attempt.call, attempt.units)
        attempt.units.clear()
        attempt.runs.clear()

    async def abort(self, call: int, units: Sequence[int]) -> None:
        """Drop what this call wrote to these units."""
        for number in units:
            try:
                unit = await self._units.connection(number)
            except UnitLostError:
                continue
            await self._session.post(unit.peer, Abort(self._session.number(), [call]))

    def pieces(self, columns: MemoryColumns, count: int, num_units: int) -> list[slice]:
        """The rows, cut so that each piece leaves room in a unit, but into no more pieces than there are units."""
        most = self._units.least_capacity()
        if num_units == 1 or most is None:
            return [slice(0, count)]
        nbytes = sum(column.nbytes_of(slice(0, count)) for column in columns.values())
        num_pieces = max(1, min(num_units, count, -(-_SHARE_OF_UNIT * nbytes // most)))
        cuts = [count * number // num_pieces for number in range(num_pieces + 1)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    async def write_piece(
        self, call: int, indexes: IntArray, columns: MemoryColumns, number: int, rows: slice, wait_s: float
    ) -> None:
        """Write these rows to one unit. Waits up to ``wait_s`` seconds for room."""
        unit = await self._units.connection(number)
        await decide_paths([unit])
        own = pack_indexes(indexes[rows])
        write = UnitWrite(unit, rows, rows.stop - rows.start, columns, self._inline_nbytes)
        try:
            await self.lease(self._session.number(), write, own, wait_s)
            to_store, frames = self.packed(write)
            asks = [(unit.peer, Write(call, own, to_store, wait_s), frames)]
            answers = await self._session.call_many(asks, self._timeout_s + wait_s)
            decode_answer(answers[0].header, Written)
        except BaseException:
            if write.lease_call:
                await self._session.post(unit.peer, Release(self._session.number(), [write.lease_call]))
            raise

    async def lease(self, call: int, write: UnitWrite, replaced: bytes, wait_s: float) -> None:
        """Memory for the write, if it needs some. ``replaced``: packed indexes of samples whose values it replaces."""
        lease = write.lease(call, wait_s, replaced)
        if lease is not None:
            asks = [(write.connection.peer, lease, ())]
            answers = await self._session.call_many(asks, self._timeout_s + wait_s)
            write.leased(decode_answer(answers[0].header, Leased).offset)

    def packed(self, write: UnitWrite) -> tuple[Columns, list[Any]]:
        """Copies into the arena the columns that lie there."""
        if not write.lease_call:
            return write.packed({}, AT_ONCE)
        from transfer_queue.storage.copying import Copies

        with self._session.using_memory():
            copies = Copies(into_mapped=True)
            made = write.packed({}, copies)
            copies.finish()
        return made


class _Attempt:
    """One write on its way to units. ``units``: those that were sent something. ``runs``: where its rows lie."""

    def __init__(
        self, writer: UnitWriter, call: int, indexes: IntArray, columns: MemoryColumns, deadline: float
    ) -> None:
        self.call = call
        self.units: list[int] = []
        self.runs: UnitRuns = []
        self._writer = writer
        self._indexes = indexes
        self._columns = columns
        self._deadline = deadline
        self._patient_until = float("inf")

    def is_over(self) -> bool:
        """Whether waiting longer is in vain: the time is up, or a unit refused although it could have waited."""
        now = time.monotonic()
        return now >= self._deadline or now < self._patient_until < float("inf")

    async def at_once(self, units: list[int]) -> None:
        """Write each piece to the first unit that has room now and no other piece."""
        self._patient_until = float("inf")
        left = list(units)
        for piece in self._writer.pieces(self._columns, len(self._indexes), len(units)):
            await self._to_first(left, piece)

    async def _to_first(self, left: list[int], piece: slice) -> None:
        while True:
            unit = left.pop(0)
            try:
                return await self._write(unit, piece, 0.0)
            except StorageFullError:
                if not left:
                    raise

    async def in_order(self, units: list[int]) -> None:
        """Wait for room at one unit after the other, in the order that all clients share: else two writes could each
        hold what the other waits for.
        """
        pieces = self._writer.pieces(self._columns, len(self._indexes), len(units))
        patience_s = _PATIENCE_S if len(units) > len(pieces) else LONGEST_WAIT_S
        for unit, piece in zip(sorted(units[: len(pieces)]), pieces, strict=True):
            now = time.monotonic()
            wait_s = max(0.0, min(patience_s, self._deadline - now))
            self._patient_until = now + wait_s
            await self._write(unit, piece, wait_s)

    async def _write(self, unit: int, piece: slice, wait_s: float) -> None:
        self.units.append(unit)
        await self._writer.write_piece(self.call, self._indexes, self._columns, unit, piece, wait_s)
        self.runs.append((unit, piece.stop - piece.start))
