# SPDX-License-Identifier: Apache-2.0
"""Writes to storage units, in the client: which unit takes which rows, and what happens if one is full or gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from transfer_queue.errors import QueueUnreachableError, StorageFullError, TransferQueueError, UnitLostError
from transfer_queue.protocol import LONGEST_WAIT_S, UnitRuns, pack_indexes
from transfer_queue.storage.copying import Copies, Copy, copy_now
from transfer_queue.storage.messages import (
    Abort,
    Columns,
    LeasedMemory,
    LeaseMemory,
    Packer,
    Release,
    Write,
    Written,
    decode_answer,
    least_in_arena,
    whole_pages,
)
from transfer_queue.storage.shm.choose import UnitDirectory
from transfer_queue.storage.shm.connect import UnitConnection, decide_paths
from transfer_queue.storage.wire import IntArray
from transfer_queue.transport.session import Session

if TYPE_CHECKING:
    from transfer_queue.storage.pack import Column

MemoryColumns: TypeAlias = Mapping[str, "Column"]
_SHARE_OF_UNIT = 2
"""A larger part of a unit (one half) is not taken by one put, if other units are there."""
_PATIENCE_S = 10.0
"""How long a put waits for room at one unit before it looks at the others again."""


class UnitWrite:
    """One unit's share of a write. Call ``lease`` first, then ``packed``, which copies."""

    def __init__(self, connection: UnitConnection, rows: slice, columns: MemoryColumns, inline_nbytes: int) -> None:
        """``rows``: those of the write that belong to this unit."""
        self.connection = connection
        self._rows = rows
        self._count = rows.stop - rows.start
        self._columns = columns
        self._arena = connection.arena
        self._sizes = {} if self._arena is None else self._sizes_in_arena(inline_nbytes)
        self._offset = -1
        self.lease_call = 0
        """The call that leases memory for it; 0: none."""

    def _sizes_in_arena(self, inline_nbytes: int) -> dict[str, int]:
        """Bytes of the fields that go to the arena; none if frames are cheaper."""
        sizes: dict[str, int] = {}
        for name, column in self._columns.items():
            sizes[name] = column.nbytes_of(self._rows)
        if sum(sizes.values()) <= inline_nbytes:
            return {}
        least = least_in_arena(inline_nbytes)
        return {name: nbytes for name, nbytes in sizes.items() if nbytes >= least}

    async def lease(self, session: Session, call: int, replaced: bytes, wait_s: float, timeout_s: float) -> None:
        """Lease memory, if it needs some. ``replaced``: packed indexes of samples whose values this write replaces."""
        total = sum(map(whole_pages, self._sizes.values()))
        if not total:
            return
        self.lease_call = call
        lease = LeaseMemory(call, total, replaced, list(self._columns) if replaced else [], wait_s)
        answers = await session.call_many([(self.connection.peer, lease, ())], timeout_s + wait_s)
        self._offset = decode_answer(answers[0].header, LeasedMemory).offset
        if self._offset < 0:
            self.lease_call = 0  # no address range is left

    def packed(self, session: Session) -> tuple[Columns, list[Any]]:
        """Return the message's columns and frames, after a copy into the arena of the columns that lie there."""
        if not self.lease_call:
            return self._packed(copy_now)
        with session.using_memory():
            copies = Copies(into_mapped=True)
            made = self._packed(copies)
            copies.finish()
        return made

    def _packed(self, copy: Copy) -> tuple[Columns, list[Any]]:
        packer, offset = Packer(), self._offset
        for name, column in self._columns.items():
            nbytes = self._sizes.get(name)
            if nbytes is not None and self.lease_call and self._arena is not None:
                stored = column.stored_in(self._arena(offset, nbytes), self._rows, copy)
                packer.add(name, slice(0, self._count), stored, offset)
                offset += whole_pages(nbytes)
                continue
            packer.add(name, slice(0, self._count), column.wire_column().slice(self._rows.start, self._rows.stop))
        return Columns(packer.headers, packer.tables, self.lease_call), packer.frames


@dataclass
class UnitWriter:
    """One write on its way to units. It is cut into one piece per unit at most, usually one.

    A write to samples that exist stays uncommitted.
    """

    session: Session
    directory: UnitDirectory
    timeout_s: float
    """Longest wait for an answer, besides the wait for room."""
    inline_nbytes: int
    call: int
    indexes: IntArray
    columns: MemoryColumns
    deadline: float
    fresh: bool
    stays: bool
    """Whether a sample's values go to the same unit each time, if it has room. Otherwise units take turns."""
    units: list[int] = field(default_factory=list)
    """Those that were sent something."""
    runs: UnitRuns = field(default_factory=list)
    """Where its rows lie."""
    left_out: set[int] = field(default_factory=set)
    """Units that don't answer, or that can never take a piece of this write."""

    async def write(self) -> UnitRuns | None:
        """Write all rows, or none and an error. Units that are full or gone are left out while others take the rows.

        Returns:
            Where the rows lie; None: in unit 0.
        Raises:
            StorageFullError: there was no room before the deadline, or there can't be.
            UnitLostError: no unit can be reached.
        """
        place: Callable[[list[int]], Coroutine[Any, Any, None]] = self._at_once
        failed: TransferQueueError | None = None
        sample = int(self.indexes[0]) if self.stays else None
        while True:
            units = [unit for unit in await self.directory.to_write_to(sample) if unit not in self.left_out]
            if not units:
                raise _nobody_takes_it(failed)
            try:
                await place(units)
                return None if all(unit == 0 for unit, _ in self.runs) else self.runs
            except StorageFullError as error:
                await self._abort()
                failed = error
                if time.monotonic() >= self.deadline:
                    raise
                place = self._in_order if place == self._at_once else self._at_once
            except QueueUnreachableError as error:
                failed = error
                self.left_out.add(self.units[-1])
                await self._abort()
                await self.directory.refresh()
            except BaseException:
                await self._abort()
                raise

    async def _abort(self) -> None:
        """Nothing of it is left in any unit."""
        await abort(self.session, self.directory, self.call, self.units)
        self.units.clear()
        self.runs.clear()

    def _nums_pieces(self, units: Sequence[int]) -> tuple[int, int]:
        """Into how many pieces to cut the rows: so that each leaves room in a unit, and so that each just fits.

        There are no more pieces than units.
        """
        capacity, count = self.directory.least_capacity(units), len(self.indexes)
        if len(units) == 1 or capacity is None:
            return 1, 1
        nbytes = sum(column.nbytes_of(slice(0, count)) for column in self.columns.values())
        most = min(len(units), count)
        fitting = min(most, max(1, -(-nbytes // capacity)))
        return min(most, max(1, -(-_SHARE_OF_UNIT * nbytes // capacity))), fitting

    def _cut(self, num_pieces: int) -> list[slice]:
        count = len(self.indexes)
        return [slice(a, b) for a, b in pairwise(count * number // num_pieces for number in range(num_pieces + 1))]

    async def _at_once(self, units: list[int]) -> None:
        """Write each piece to the first unit that has room now and no other piece. If too few units have room, try
        with fewer pieces, and then with smaller ones.
        """
        wanted, fewest = self._nums_pieces(units)
        failed: StorageFullError | None = None
        for num_pieces in (*range(wanted, fewest - 1, -1), *_doubled(wanted, min(len(units), len(self.indexes)))):
            try:
                await self._to_first_with_room(units, num_pieces)
                return
            except StorageFullError as error:
                await self._abort()
                failed = failed if num_pieces > wanted else error
        assert failed is not None, "there is one try at least"
        raise failed

    async def _to_first_with_room(self, units: list[int], num_pieces: int) -> None:
        untried = iter(units)
        for piece in self._cut(num_pieces):
            refused = StorageFullError(f"{num_pieces} pieces of a put don't find room in {len(units)} storage units.")
            for unit in untried:
                try:
                    await self._write(unit, piece, 0.0)
                    break
                except StorageFullError as error:
                    refused = error
            else:
                raise refused

    async def _in_order(self, units: list[int]) -> None:
        """Wait for room at one unit after the other, in the order that all clients share.

        Otherwise two writes could each hold what the other waits for.
        """
        wanted, fewest = self._nums_pieces(units)
        patience_s = LONGEST_WAIT_S if len(units) == fewest else _PATIENCE_S
        for unit, piece in zip(sorted(units[:wanted]), self._cut(wanted), strict=True):
            now = time.monotonic()
            wait_s = max(0.0, min(patience_s, self.deadline - now))
            try:
                await self._write(unit, piece, wait_s)
            except StorageFullError:
                if time.monotonic() < now + wait_s:  # it did not wait, because this piece can never fit
                    self.left_out.add(unit)
                raise

    async def _write(self, number: int, rows: slice, wait_s: float) -> None:
        """Write these rows to one unit. Waits up to ``wait_s`` seconds for room."""
        self.units.append(number)
        session, unit = self.session, await self.directory.connection(number)
        await decide_paths([unit])
        own = pack_indexes(self.indexes[rows])
        write = UnitWrite(unit, rows, self.columns, self.inline_nbytes)
        try:
            await write.lease(session, session.number(), own, wait_s, self.timeout_s)
            to_store, frames = write.packed(session)
            asks = [(unit.peer, Write(self.call, own, to_store, wait_s, self.fresh), frames)]
            answers = await session.call_many(asks, self.timeout_s + wait_s)
            decode_answer(answers[0].header, Written)
        except BaseException:
            if write.lease_call:
                await session.post(unit.peer, Release(session.number(), [write.lease_call]))
            raise
        self.runs.append((number, rows.stop - rows.start))


async def abort(session: Session, directory: UnitDirectory, call: int, units: Sequence[int]) -> None:
    """Drop what this call wrote to these units."""
    for unit in filter(None, map(directory.known, units)):
        await session.post(unit.peer, Abort(session.number(), [call]))


def _doubled(number: int, most: int) -> Iterator[int]:
    """Twice as many, four times as many and so on, and at last ``most``."""
    while number < most:
        number = min(2 * number, most)
        yield number


def _nobody_takes_it(failed: TransferQueueError | None) -> TransferQueueError:
    if isinstance(failed, StorageFullError):
        return failed
    why = failed or "there is none."
    return UnitLostError(f"no storage unit of the queue can be reached: {why} Look at the output of its servers.")
