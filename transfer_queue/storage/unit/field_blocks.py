# SPDX-License-Identifier: Apache-2.0
"""The blocks of one field in a unit, in the server: which row of which block holds the value of a slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.unit.spill import SPILL_STEP_NBYTES, SpillFile
from transfer_queue.storage.wire import (
    Allocate,
    ByteArray,
    IntArray,
    Layout,
    Positions,
    WireColumn,
    as_run,
    count_of,
    distinct,
    gather,
    groups,
)

_SMALL_NBYTES = 64 * 1024
_MERGE_BLOCKS = 32
"""This many small blocks are merged. Otherwise samples put one by one would cost a block and a copy each."""
STEP_NBYTES = 2 * 1024 * 1024
"""Bytes moved per step: a millisecond or less, during which no request is served."""


class Block:
    """Rows as received. It never changes, because answers being sent share its memory."""

    __slots__ = (
        "column", "family", "first", "left", "live", "live_nbytes", "number", "on_disk", "slots", "stays",
    )  # fmt: skip

    def __init__(self, number: int, column: WireColumn, slots: NDArray[np.int32], run: Positions) -> None:
        """``run``: the slots as ``as_run`` returns them."""
        self.number = number
        self.on_disk = False
        """Its data lies in the spill file."""
        self.family = column.layout.family if column.nbytes < _SMALL_NBYTES else None
        """Small blocks of one family are merged; None: the block is not small."""
        self.column = column
        self.slots = slots
        self.first = run.start if isinstance(run, slice) else None
        """The slot of row 0 if the slots are consecutive, else None."""
        self.live = column.rows
        self.live_nbytes = column.nbytes
        self.left = 0
        """Rows before this one were moved elsewhere, or are dead."""
        self.stays = False
        """There was no memory to move it, and none of its rows has died since."""

    @property
    def mostly_dead(self) -> bool:
        return 2 * self.live < self.column.rows or 2 * self.live_nbytes < self.column.nbytes


class HeldBlocks:
    """What all fields of a unit hold together, what their blocks are made of, and those that wait for a step."""

    def __init__(self, allocate: Allocate, file: SpillFile | None) -> None:
        """``allocate``: memory for blocks that are made from others here. ``file``: where blocks may be spilled."""
        self.allocate, self.file = allocate, file
        self.step_nbytes = STEP_NBYTES
        """How much of a mostly dead block is moved at once."""
        self.held_nbytes = 0
        """Bytes of all buffers, including dead rows."""
        self.spilled_nbytes = 0
        """Of ``held_nbytes``, those on disk."""
        self.live_nbytes = 0
        """Bytes of the values that can still be read."""
        self.moving: dict[Block, FieldBlocks] = {}
        """Blocks whose live rows wait for ``move``."""
        self.in_memory: dict[Block, FieldBlocks] = {}
        """Blocks that can be spilled, the oldest first."""

    @property
    def memory_nbytes(self) -> int:
        """Of ``held_nbytes``, those in memory."""
        return self.held_nbytes - self.spilled_nbytes


class FieldBlocks:
    """Slots passed to a method must not repeat, except in ``add``, ``missing`` and ``located``."""

    def __init__(self, held: HeldBlocks) -> None:
        self._held = held
        # -1: no value. Rows of a block that this table does not name are dead.
        self._block_of = np.zeros(0, np.int32)
        self._row_of = np.zeros(0, np.int32)
        self.blocks: dict[int, Block] = {}
        """By their numbers."""
        self._free_numbers: list[int] = []
        self._small: dict[Layout, dict[int, Block]] = {}

    def has(self, block: Block) -> bool:
        return self.blocks.get(block.number) is block

    def spilled(self, block: Block, data: ByteArray) -> None:
        """All data of the block is now in the spill file, at ``data``."""
        block.column = block.column.moved_to(data)
        self._leave_small(block)
        self._count_on_disk(block)

    def _count_on_disk(self, block: Block) -> None:
        self._held.in_memory.pop(block, None)
        block.on_disk = True
        block.family = None
        self._held.spilled_nbytes += block.column.data.nbytes

    def _gathered(self, selected: Sequence[tuple[WireColumn, Positions]], on_disk: bool) -> WireColumn:
        """Copy these rows into one column. Raises MemoryError if there is no room for it."""
        if not on_disk or self._held.file is None:
            return gather(selected, self._held.allocate)
        column = gather(selected)
        data = self._held.file.stored(column.data)
        if data is None:
            raise MemoryError
        return column.moved_to(data)

    def grow(self, capacity: int) -> None:
        """Make room for slots below ``capacity``."""
        more = capacity - len(self._block_of)
        if more > 0:
            self._block_of = np.append(self._block_of, np.full(more, -1, np.int32))
            self._row_of = np.append(self._row_of, np.zeros(more, np.int32))

    def missing(self, slots: IntArray) -> NDArray[np.bool_]:
        """True where the slot is -1 or has no value."""
        return (slots < 0) | (self._block_of[slots] < 0)

    def present_slots(self) -> NDArray[np.bool_]:
        return self._block_of >= 0

    def nbytes_of(self, slots: IntArray) -> int:
        """Bytes in memory of the values of these slots, which must all have one."""
        rows = self._row_of[slots]
        found = [(self.blocks[number], at) for number, at in groups(self._block_of[slots])]
        return sum(block.column.rows_nbytes(rows[at]) for block, at in found if not block.on_disk)

    def add(self, slots: IntArray, column: WireColumn) -> IntArray:
        """Row i becomes the value of ``slots[i]``; if a slot repeats, its last row counts.

        Returns the slots that had no value, each once.
        """
        run = as_run(slots)
        held = self._block_of[run] >= 0
        if held.any():
            self.delete(distinct(slots[held]))
        fresh = distinct(slots[~held])
        block = self._insert(slots, run, column)
        if not isinstance(run, slice):  # a slice has no repeated slots
            stale = np.flatnonzero(self._row_of[slots] != np.arange(column.rows))
            if len(stale):
                self._kill(block, stale)
        small = {} if block.family is None else self._small.get(block.family, {})
        if len(small) >= _MERGE_BLOCKS:
            self.rewrite(list(small.values()))
        return fresh

    def whole(self, run: slice) -> tuple[WireColumn, slice] | None:
        """Return the block without dead rows that holds these slots in order, and their rows in it; else None."""
        block = self.blocks.get(self._block_of.item(run.start))
        if block is None or block.first is None or block.live < block.column.rows:
            return None
        rows = slice(run.start - block.first, run.stop - block.first)
        return (block.column, rows) if rows.stop <= block.column.rows else None

    def located(self, slots: IntArray) -> list[tuple[WireColumn, IntArray, IntArray]]:
        """(block, positions in ``slots``, their rows in the block) for every block that holds some of these slots."""
        rows = self._row_of[slots].astype(np.int64)
        return [(self.blocks[number].column, at, rows[at]) for number, at in groups(self._block_of[slots])]

    def delete(self, slots: IntArray) -> None:
        """Delete the values of these slots, which must all have one."""
        numbers, rows = self._block_of[slots], self._row_of[slots]
        self._block_of[slots] = -1
        for number, at in groups(numbers):
            self._kill(self.blocks[number], rows[at])

    def compact(self, block: Block) -> None:
        """Drop its dead rows: now if it is small, else by later calls of ``move``."""
        if block.on_disk and block.column.nbytes > SPILL_STEP_NBYTES * block.column.rows:
            return  # one row would be too long a step
        if block.live_nbytes <= self._step_of(block):
            self.rewrite([block])
        elif block not in self._held.moving and not block.stays:
            block.left = 0
            self._held.moving[block] = self

    def move(self, block: Block) -> None:
        """Move the next live rows of a block with dead ones into a block of their own.

        Requests are served between two steps and find each value in one of the two blocks. Without memory, the block
        stays as it is until more of its rows die.
        """
        start, stop = block.left, self._step_end(block.column, block.left, self._step_of(block))
        rows = start + np.flatnonzero(self._lives(block, slice(start, stop)))
        block.left = stop
        if len(rows) and not self._relocate([(block, as_run(rows))]):
            del self._held.moving[block]
            block.stays = True

    def _step_of(self, block: Block) -> int:
        step = self._held.step_nbytes
        return min(step, SPILL_STEP_NBYTES) if block.on_disk else step

    def _step_end(self, column: WireColumn, start: int, nbytes: int) -> int:
        """One past the last row of the step of so many bytes that begins at ``start``."""
        if column.layout.kind == "dense":
            rows = nbytes // max(column.layout.row_nbytes, 1)
        else:
            end = column.bounds[start] + nbytes
            rows = int(np.searchsorted(column.bounds, end, "right")) - 1 - start
        return min(start + max(rows, 1), column.rows)

    def _kill(self, block: Block, rows: NDArray[np.integer]) -> None:
        self._mark_dead(block, rows)
        if block.live == 0:
            self._remove(block)
            return
        block.stays = False
        if block.mostly_dead:
            self.compact(block)

    def _mark_dead(self, block: Block, rows: slice | NDArray[np.integer]) -> None:
        nbytes = block.column.rows_nbytes(rows)
        block.live -= count_of(rows)
        block.live_nbytes -= nbytes
        self._held.live_nbytes -= nbytes

    def _lives(self, block: Block, rows: slice) -> NDArray[np.bool_]:
        """True for the rows that are still their slots' values."""
        slots, numbers = block.slots[rows], np.arange(rows.start, rows.stop)
        lives: NDArray[np.bool_] = (self._block_of[slots] == block.number) & (self._row_of[slots] == numbers)
        return lives

    def _insert(self, slots: NDArray[np.integer], run: Positions, column: WireColumn) -> Block:
        number = self._free_numbers.pop() if self._free_numbers else len(self.blocks)
        block = self.blocks[number] = Block(number, column, slots.astype(np.int32), run)
        self._block_of[run] = number
        self._row_of[run] = np.arange(column.rows)
        held, file = self._held, self._held.file
        held.held_nbytes += column.nbytes
        held.live_nbytes += column.nbytes
        if file is not None and file.holds(column.data):
            self._count_on_disk(block)
        elif file is not None and column.data.nbytes >= file.least_nbytes:
            held.in_memory[block] = self
        if block.family is not None:
            self._small.setdefault(block.family, {})[number] = block
        return block

    def _remove(self, block: Block) -> None:
        del self.blocks[block.number]
        held = self._held
        held.moving.pop(block, None)
        held.in_memory.pop(block, None)
        if block.on_disk:
            held.spilled_nbytes -= block.column.data.nbytes
        self._free_numbers.append(block.number)
        held.held_nbytes -= block.column.nbytes
        held.live_nbytes -= block.live_nbytes
        self._leave_small(block)

    def _leave_small(self, block: Block) -> None:
        if block.family is not None:
            small = self._small[block.family]
            del small[block.number]
            if not small:
                del self._small[block.family]

    def rewrite(self, blocks: Sequence[Block]) -> None:
        """Copy the live rows of these blocks, all of one family, into one new block.

        Without memory they stay as they are: the dead rows take room, but nothing is wrong.
        """
        parts: list[tuple[Block, Positions]] = []
        for block in blocks:
            every = slice(0, block.column.rows)
            parts.append((block, every if block.live == every.stop else np.flatnonzero(self._lives(block, every))))
        self._relocate(parts)

    def _relocate(self, parts: Sequence[tuple[Block, Positions]]) -> bool:
        """Copy these live rows into one new block, and free blocks without others. False: there is no room for it."""
        try:
            column = self._gathered(
                [(block.column, rows) for block, rows in parts], all(block.on_disk for block, _ in parts)
            )
        except MemoryError:
            return False
        slots = np.concatenate([block.slots[rows] for block, rows in parts])
        for block, rows in parts:
            self._mark_dead(block, rows)
            if not block.live:
                self._remove(block)
        self._insert(slots, as_run(slots), column)
        return True
