# SPDX-License-Identifier: Apache-2.0
"""The blocks of one field in a unit, in the server: which row of which block holds the value of a cell."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.calls import PIECE_NBYTES
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
    heap,
)

PAGE_BITS = 6  # at most the run that routing keeps together, so a full page costs one dictionary entry
PAGE = 1 << PAGE_BITS
_SMALL_NBYTES = 64 * 1024
"""Columns below this size are appended to a tail. Otherwise samples put one by one would cost a block each."""
_TAIL_NBYTES, _TAIL_ROWS = 256 * 1024, 1 << 16
_GROWTH = 4
_TAIL_DEAD_NBYTES = 16 * 1024
"""So much of a tail may be dead, for where its rows die one by one, each move of the others would soon be in vain."""


class Block:
    """Rows as received. They never change, because answers being sent share their memory."""

    __slots__ = ("cells", "column", "first", "is_tail", "left", "live", "live_nbytes", "number", "on_disk", "stays")

    def __init__(self, number: int, column: WireColumn, cells: Positions) -> None:
        """``cells``: as ``as_run`` returns them."""
        self.number = number
        self.on_disk = False
        """Its data lies in the spill file."""
        self.column = column
        self.cells = _numbers(cells)
        self.first = cells.start if isinstance(cells, slice) else None
        """The cell of row 0 if the cells are consecutive, else None."""
        self.live = column.rows
        self.live_nbytes = column.nbytes
        self.is_tail = False
        """Small columns are still appended."""
        self.left = 0
        """Rows before this one were moved elsewhere, or are dead."""
        self.stays = False
        """There was no memory to move it, and none of its rows has died since."""

    @property
    def mostly_dead(self) -> bool:
        nbytes = self.column.nbytes
        if self.is_tail and nbytes - self.live_nbytes <= _TAIL_DEAD_NBYTES:
            return False
        return 2 * self.live < self.column.rows or 2 * self.live_nbytes < nbytes


class Tail:
    """A block that small columns are appended to, with room for more. What a reader shares of it never changes."""

    def __init__(self, block: Block) -> None:
        """The block's own buffers are full."""
        block.is_tail = True
        self.block = block
        self.layout = block.column.layout
        self._data, self._cells = heap(0), block.cells
        self._row_meta, self._bounds = self._sizes()

    def _sizes(self, num_rows: int = 0) -> tuple[IntArray | None, IntArray | None]:
        """Shapes and bounds of the rows, with room for so many."""
        column = self.block.column
        if column.row_meta is None:
            return None, None
        return _longer(column.row_meta, num_rows), _longer(column.bounds, num_rows + 1)

    def has_room(self, column: WireColumn, allocate: Allocate) -> bool:
        """Whether this column, of the same layout, goes in. Buffers that are full are replaced by larger ones."""
        own = self.block.column
        rows, nbytes = own.rows + column.rows, own.data.nbytes + column.data.nbytes
        if own.nbytes + column.nbytes > _TAIL_NBYTES or rows > _TAIL_ROWS:
            return False
        if nbytes > len(self._data):
            try:
                data = allocate(max(nbytes, min(_GROWTH * own.data.nbytes, _TAIL_NBYTES)))
            except MemoryError:
                return False
            data[: own.data.nbytes] = own.data
            self._data = data
        if rows > len(self._cells):
            self._cells = _longer(self.block.cells, _GROWTH * rows)
            self._row_meta, self._bounds = self._sizes(_GROWTH * rows)
        return True

    def append(self, column: WireColumn, cells: Positions) -> int:
        """Copy these rows to the end, where they ``has_room``. Returns the number of the first."""
        block, own = self.block, self.block.column
        first, start = own.rows, own.data.nbytes
        rows, end = first + column.rows, start + column.data.nbytes
        self._data[start:end] = column.data
        self._cells[first:rows] = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells
        row_meta = bounds = None
        if column.row_meta is not None and self._row_meta is not None and self._bounds is not None:
            self._row_meta[first:rows] = column.row_meta
            self._bounds[first + 1 : rows + 1] = column.bounds[1:] + start
            row_meta, bounds = self._row_meta[:rows], self._bounds[: rows + 1]
        block.column = WireColumn(own.layout, rows, self._data[:end], row_meta, bounds)
        block.cells = self._cells[:rows]
        if block.first is not None and not (isinstance(cells, slice) and cells.start == block.first + first):
            block.first = None
        block.live += column.rows
        block.live_nbytes += column.nbytes
        return first


def _kind_of(layout: Layout) -> tuple[str, int]:
    """Its dtype and rank; those of objects are of no tensor."""
    return layout.dtype, len(layout.shape)


def _numbers(cells: Positions) -> NDArray[np.int32]:
    return np.arange(cells.start, cells.stop, dtype=np.int32) if isinstance(cells, slice) else cells.astype(np.int32)


def _longer(array: NDArray[Any], length: int) -> NDArray[Any]:
    longer = np.empty((max(length, len(array)), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


class HeldBlocks:
    """What all fields of a unit hold together, what their blocks are made of, and those that wait for a step."""

    def __init__(self, allocate: Allocate, file: SpillFile | None) -> None:
        """``allocate``: memory for blocks that are made from others here. ``file``: where blocks may be spilled."""
        self.allocate, self.file = allocate, file
        self.step_nbytes = PIECE_NBYTES
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


class Pages:
    """Indexes, and the pages that they are on, which each field looks up."""

    __slots__ = ("counts", "indexes", "names")

    def __init__(self, indexes: IntArray) -> None:
        self.indexes = indexes
        self.counts: IntArray | None = None
        """How many indexes in a row are on each page; None: all are on one."""
        if len(indexes) == 1:  # most small requests
            self.names = [int(indexes[0]) >> PAGE_BITS]
            return
        names = indexes >> PAGE_BITS
        first = np.flatnonzero(np.diff(names, prepend=names[:1] - 1))
        self.names = names[first].tolist()
        if len(self.names) != 1:
            self.counts = np.diff(first, append=len(names))


class Cells:
    """The table of one field: a cell has the block and the row of one sample's value.

    Indexes only grow, so an array over all of them would grow forever. Only pages of them with a value have cells.
    """

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        """By page of indexes, its page of cells. Those without a value have page 0."""
        self._free: list[int] = []
        """Pages of cells that no page of indexes has, the next one last."""
        self.block_of = np.full(PAGE, -1, np.int32)
        """-1: no value. Page 0 never has any."""
        self.row_of = np.zeros(PAGE, np.int32)

    def of(self, pages: Pages) -> IntArray:
        """The cell of each index. That of an unknown one is on page 0, and never has a value."""
        get = self.pages.get
        if pages.counts is None:
            name = pages.names[0]
            return pages.indexes + ((get(name, 0) - name) << PAGE_BITS)
        found = np.array([get(name, 0) for name in pages.names], np.int64)
        return (np.repeat(found, pages.counts) << PAGE_BITS) | (pages.indexes & (PAGE - 1))

    def claim(self, pages: Pages) -> Positions:
        """The cells of these indexes, as ``as_run`` returns them; some may be new."""
        for name in pages.names:
            if name not in self.pages:
                self.pages[name] = self._free.pop() if self._free else self._grow()
        return as_run(self.of(pages))

    def _grow(self) -> int:
        """Twice as many pages. Returns the first new one."""
        first = len(self.block_of) >> PAGE_BITS
        self.block_of = np.append(self.block_of, np.full(len(self.block_of), -1, np.int32))
        self.row_of = np.append(self.row_of, np.zeros(len(self.row_of), np.int32))
        self._free = list(range(2 * first - 1, first, -1))
        return first

    def release(self, pages: Pages) -> None:
        """Some of these have no value any more: pages without any are recycled, the first one first."""
        held = np.any(self.block_of.reshape(-1, PAGE)[[self.pages.get(name, 0) for name in pages.names]] >= 0, axis=1)
        for name, stays in zip(pages.names[::-1], held[::-1].tolist(), strict=True):
            if not stays and name in self.pages:
                self._free.append(self.pages.pop(name))


class FieldBlocks:
    """Cells passed to a method must not repeat, except to ``missing`` and ``located``."""

    def __init__(self, held: HeldBlocks) -> None:
        self._held = held
        self.cells = Cells()  # Rows of a block that no cell names are dead.
        self.blocks: dict[int, Block] = {}
        """By their numbers."""
        self._free_numbers: list[int] = []
        self._tails: dict[tuple[str, int], Tail] = {}
        """By dtype and rank. If the shapes of its rows differ, a tail stores a shape for each."""

    def has(self, block: Block) -> bool:
        return self.blocks.get(block.number) is block

    def spilled(self, block: Block, data: ByteArray) -> None:
        """All data of the block is now in the spill file, at ``data``."""
        block.column = block.column.moved_to(data)
        self._count_on_disk(block)

    def _count_on_disk(self, block: Block) -> None:
        self._held.in_memory.pop(block, None)
        block.on_disk = True
        self._held.spilled_nbytes += block.column.data.nbytes

    def _copied(self, block: Block, rows: Positions) -> WireColumn:
        """A copy of these rows; of those on disk, on disk. Raises MemoryError if there is no room for it."""
        if not block.on_disk or self._held.file is None:
            return gather([(block.column, rows)], self._held.allocate)
        column = gather([(block.column, rows)])
        data = self._held.file.stored(column.data)
        if data is None:
            raise MemoryError
        return column.moved_to(data)

    def missing(self, cells: IntArray) -> NDArray[np.bool_]:
        """True where the cell has no value."""
        return self.cells.block_of[cells] < 0

    def nbytes_of(self, cells: IntArray) -> int:
        """Bytes in memory of the values of these cells, which must all have one."""
        rows = self.cells.row_of[cells]
        found = [(self.blocks[number], at) for number, at in groups(self.cells.block_of[cells])]
        return sum(block.column.rows_nbytes(rows[at]) for block, at in found if not block.on_disk)

    def add(self, pages: Pages, column: WireColumn) -> None:
        """Row i becomes the value of the i-th index; if an index repeats, its last row counts."""
        cells = self.cells.claim(pages)
        held = self.cells.block_of[cells] >= 0
        if 1 in held.tobytes():  # half the time of held.any() for a few
            self.delete(self.cells.of(Pages(distinct(pages.indexes[held]))))
        block, first = self._insert(cells, column)
        if not isinstance(cells, slice):  # a slice has no repeated cells
            stale = np.flatnonzero(self.cells.row_of[cells] != np.arange(first, first + column.rows))
            if len(stale):
                self._kill(block, first + stale)

    def whole(self, cells: slice) -> tuple[WireColumn, slice] | None:
        """Return the block that holds these cells in order, and their rows in it; None if there is none."""
        block = self.blocks.get(self.cells.block_of.item(cells.start))
        if block is None or block.first is None:
            return None
        rows = slice(cells.start - block.first, cells.stop - block.first)
        some_died = block.live < block.column.rows
        if rows.stop > block.column.rows or (some_died and (self.cells.block_of[cells] != block.number).any()):
            return None
        return block.column, rows

    def located(self, cells: IntArray) -> list[tuple[WireColumn, IntArray, IntArray]]:
        """(block, positions in ``cells``, their rows in the block) for every block that holds some of these cells."""
        rows = self.cells.row_of[cells].astype(np.int64)
        return [(self.blocks[number].column, at, rows[at]) for number, at in groups(self.cells.block_of[cells])]

    def delete(self, cells: IntArray) -> None:
        """Delete the values of these cells, which must all have one."""
        numbers, rows = self.cells.block_of[cells], self.cells.row_of[cells]
        self.cells.block_of[cells] = -1
        for number, at in groups(numbers):
            self._kill(self.blocks[number], rows[at])

    def compact(self, block: Block) -> None:
        """Drop its dead rows: now if it is small, else by later calls of ``move``."""
        if block.on_disk and block.column.nbytes > SPILL_STEP_NBYTES * block.column.rows:
            return  # one row would be too long a step
        if block.live_nbytes <= self._step_of(block):
            self.rewrite(block)
        elif block not in self._held.moving and not block.stays:
            block.left = 0
            self._held.moving[block] = self

    def move(self, block: Block) -> None:
        """Move the next live rows of a block with dead ones into a block of their own.

        Requests are served between two steps and find each value in one of the two blocks. Without memory, the block
        stays as it is until more of its rows die.
        """
        start, block.left = block.left, self._step_end(block.column, block.left, self._step_of(block))
        if not self._relocate(block, slice(start, block.left)):
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

    def _insert(self, cells: Positions, column: WireColumn) -> tuple[Block, int]:
        """Returns the block of these rows, and the number of the first one there."""
        held, file = self._held, self._held.file
        on_disk = file is not None and file.holds(column.data)
        is_small = column.nbytes < _SMALL_NBYTES and not on_disk
        tail = self._tails.get(_kind_of(column.layout)) if is_small else None
        full: Block | None = None
        if tail is not None:
            if column.layout != tail.layout:
                column = column.as_ragged()
            if column.layout != tail.layout or not tail.has_room(column, held.allocate):
                full, tail = tail.block, None
                self._close(full)
        if tail is not None:
            block, first = tail.block, tail.append(column, cells)
        else:
            number, first = self._free_numbers.pop() if self._free_numbers else len(self.blocks), 0
            block = self.blocks[number] = Block(number, column, cells)
            if on_disk:
                self._count_on_disk(block)
            elif column.nbytes < _SMALL_NBYTES:
                self._tails[_kind_of(column.layout)] = Tail(block)
            else:
                self._may_spill(block)
        held.held_nbytes += column.nbytes
        held.live_nbytes += column.nbytes
        self.cells.block_of[cells] = block.number
        self.cells.row_of[cells] = np.arange(first, first + column.rows)
        if full is not None and full.mostly_dead:
            self.compact(full)
        return block, first

    def _close(self, block: Block) -> None:
        """Nothing is appended to this block from now on."""
        if block.is_tail:
            block.is_tail = False
            del self._tails[_kind_of(block.column.layout)]
            self._may_spill(block)

    def _may_spill(self, block: Block) -> None:
        file = self._held.file
        if file is not None and block.column.data.nbytes >= file.least_nbytes:
            self._held.in_memory[block] = self

    def _remove(self, block: Block) -> None:
        self._close(block)
        del self.blocks[block.number]
        held = self._held
        held.moving.pop(block, None)
        held.in_memory.pop(block, None)
        if block.on_disk:
            held.spilled_nbytes -= block.column.data.nbytes
        self._free_numbers.append(block.number)
        held.held_nbytes -= block.column.nbytes
        held.live_nbytes -= block.live_nbytes

    def rewrite(self, block: Block) -> None:
        """Copy its live rows to where there are no dead ones, and free it.

        Without memory it stays as it is: the dead rows take room, but nothing is wrong.
        """
        self._relocate(block, slice(0, block.column.rows))

    def _relocate(self, block: Block, within: slice) -> bool:
        """Copy the live ones of these rows elsewhere, and free the block if it has no others. False: without memory."""
        cells, numbers = block.cells[within], np.arange(within.start, within.stop)
        lives = (self.cells.block_of[cells] == block.number) & (self.cells.row_of[cells] == numbers)
        if not lives.any():
            return True
        cells, rows = cells[lives], as_run(numbers[lives])
        try:
            column = self._copied(block, rows)
        except MemoryError:
            return False
        self._close(block)
        self._mark_dead(block, rows)
        if not block.live:
            self._remove(block)
        self._insert(as_run(cells), column)
        return True
