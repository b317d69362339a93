# SPDX-License-Identifier: Apache-2.0
"""What one storage unit holds, in the server: blocks of columns by (index, field). It has no socket and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.messages import FieldColumns, Located
from transfer_queue.storage.unit.field_blocks import PAGE, PAGE_BITS, Block, FieldBlocks, HeldBlocks
from transfer_queue.storage.unit.spill import SPILL_STEP_NBYTES, SpillFile
from transfer_queue.storage.wire import Allocate, ByteArray, IntArray, as_run, distinct, heap


class BlockStore(HeldBlocks):
    """Keeps values as received, one block per field and write.

    A block that is mostly dead is copied and freed: a small one at once, a large one in steps, by ``move``.
    """

    def __init__(self, allocate: Allocate = heap, file: SpillFile | None = None) -> None:
        """See ``HeldBlocks``."""
        super().__init__(allocate, file)
        self._spilling: Iterator[None] | None = None
        self._no_room_on_disk = False
        self._table = PageTable()
        self._fields: dict[str, FieldBlocks] = {}

    @property
    def num_samples(self) -> int:
        """Indexes with at least one field. It looks at every slot: use it for statistics only."""
        held = np.zeros(self._table.capacity, np.bool_)
        for field in self._fields.values():
            field.cells.mark_present(held)
        return int(held.sum())

    @property
    def num_values(self) -> int:
        return sum(block.live for field in self._fields.values() for block in field.blocks.values())

    @property
    def num_blocks(self) -> int:
        return sum(len(field.blocks) for field in self._fields.values())

    def write(self, indexes: IntArray, columns: FieldColumns) -> None:
        """Store these values, replacing existing ones. It keeps the memory of the columns and copies nothing."""
        slots = self._claim(indexes, columns)
        for name, positions, column in columns:
            field = self._fields.get(name)
            if field is None:
                field = self._fields[name] = FieldBlocks(self)
            self._table.keep(field.add(slots[positions], column))

    def _claim(self, indexes: IntArray, columns: FieldColumns) -> IntArray:
        """The slot of each index; -1 for one without any value, whose page nothing would ever release."""
        for _, positions, column in columns:
            if column.rows == len(indexes) and isinstance(positions, slice):  # of all samples, as nearly always
                return self._table.claim(indexes)
        covered = np.zeros(len(indexes), np.bool_)
        for _, positions, _ in columns:
            covered[positions] = True
        self._table.claim(indexes[covered])
        return self._table.find(indexes)

    def locate(self, indexes: IntArray, fields: Sequence[str]) -> Located:
        """Return where these fields of all these indexes lie, which may repeat and come in any order.

        Slices mean that one block without dead rows holds all of a field.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never written.
        """
        located: Located = []
        slots = self._table.find(indexes)
        run = as_run(slots)
        known = run if isinstance(run, slice) and run.start >= 0 and len(slots) else None
        for name in fields:
            field = self._fields.get(name)
            if field is not None and known is not None and (whole := field.whole(known)) is not None:
                column, rows = whole
                located.append((name, column, slice(0, len(slots)), rows))
                continue
            cells = None if field is None else field.cells.of(slots)
            missing = indexes if field is None or cells is None else indexes[field.missing(cells)]
            if len(missing):
                raise StorageKeyNotFoundError(
                    f"no value of field {name!r} for sample {missing[0]} ({len(missing)} of the {len(indexes)} "
                    f"samples asked for lack it here): it was cleared, or never put. Go on with the next batch."
                )
            if field is not None and cells is not None:
                located += [(name, *block) for block in field.located(cells)]
        return located

    def held(self, indexes: IntArray) -> dict[str, IntArray]:
        """By field, which of the indexes have a value; fields without any are left out."""
        slots = self._table.find(indexes)
        held = {name: indexes[~field.missing(field.cells.of(slots))] for name, field in self._fields.items()}
        return {name: some for name, some in held.items() if len(some)}

    def delete(self, indexes: IntArray) -> None:
        """Delete all fields of these indexes, skipping unknown ones."""
        slots = distinct(self._table.find(indexes))
        self.look_for_disk()
        for name, field in list(self._fields.items()):
            cells = field.cells.of(slots)
            mine = ~field.missing(cells)
            if 1 not in mine.tobytes():
                continue
            field.delete(cells[mine])
            self._table.release(slots[mine])
            if not field.blocks:
                del self._fields[name]

    def replaced_nbytes(self, indexes: IntArray, fields: Iterable[str]) -> int:
        """Bytes that a write of these fields of these indexes would free."""
        slots = distinct(self._table.find(indexes))
        held = [self._fields[name] for name in set(fields) if name in self._fields]
        found = [(field, field.cells.of(slots)) for field in held]
        return sum(field.nbytes_of(cells[~field.missing(cells)]) for field, cells in found)

    @property
    def is_moving(self) -> bool:
        """Whether ``move`` has work to do."""
        return self._spilling is not None or bool(self.moving)

    def move(self) -> None:
        """Make one step: of spilling, or else towards at most half of the held bytes being dead."""
        if self._spilling is not None:
            try:
                next(self._spilling)
            except StopIteration:
                self._spilling = None
            return
        block, field = next(iter(self.moving.items()))
        field.move(block)

    # ---- spilling ----

    def look_for_disk(self) -> None:
        """There may be room on the disk again."""
        self._no_room_on_disk = False

    def start_spilling(self) -> None:
        """Let ``move`` bring the oldest block to the file, if it has room and nothing is on its way there."""
        if self.file is None or self._spilling is not None or self._no_room_on_disk or not self.in_memory:
            return
        block, field = next(iter(self.in_memory.items()))
        target = self.file.allocate(block.column.data.nbytes)
        if target is None:
            self._no_room_on_disk = True
            return
        self._spilling = self._spill(self.file, field, block, target)

    def _spill(self, file: SpillFile, field: FieldBlocks, block: Block, target: ByteArray) -> Iterator[None]:
        """Copy a block to the file, where readers find it once all of it is there. Yields between steps."""
        data = block.column.data
        for start in range(0, data.nbytes, SPILL_STEP_NBYTES):
            if start:
                yield
            if not field.has(block):
                return
            if not file.write(target, start, data[start : start + SPILL_STEP_NBYTES]):
                self._no_room_on_disk = True
                return
        field.spilled(block, target)

    def pack(self) -> None:
        """Compact all blocks with dead rows: small ones now, large ones by later calls of ``move``."""
        for field, block in self._with_dead_rows():
            field.compact(block)

    def squeeze(self) -> None:
        """Compact all blocks with dead rows now."""
        for field, block in self._with_dead_rows():
            field.rewrite(block)

    def _with_dead_rows(self) -> list[tuple[FieldBlocks, Block]]:
        if self.held_nbytes == self.live_nbytes:
            return []
        blocks = [(field, block) for field in self._fields.values() for block in field.blocks.values()]
        return [(field, block) for field, block in blocks if block.live < block.column.rows and not block.on_disk]


class PageTable:
    """Indexes only grow, so an array over all of them would grow forever. Pages bound the tables by what is kept."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pages: dict[int, int] = {}
        self._free: list[int] = []
        self._names: list[int] = []
        self._kept: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """One more than the largest slot used so far, rounded up."""
        return len(self._kept) << PAGE_BITS

    def find(self, indexes: IntArray) -> IntArray:
        """The slot of each index, -1 if its page is unknown."""
        name = _one_page(indexes)
        if name is not None:
            page = self._pages.get(name, -1)
            return indexes - ((name - page) << PAGE_BITS) if page >= 0 else np.full(len(indexes), -1, np.int64)
        names = indexes >> PAGE_BITS
        first = np.flatnonzero(np.diff(names, prepend=names[:1] - 1))  # of each run on one page
        found = np.array([self._pages.get(name, -1) for name in names[first].tolist()], np.int64)
        pages = np.repeat(found, np.diff(first, append=len(names)))
        return np.where(pages < 0, -1, (pages << PAGE_BITS) | (indexes & (PAGE - 1)))

    def claim(self, indexes: IntArray) -> IntArray:
        """The slot of each index, which may be new. ``keep`` must follow: a page without values is never released."""
        one = _one_page(indexes)
        for name in dict.fromkeys((indexes >> PAGE_BITS).tolist()) if one is None else (one,):
            if name not in self._pages:
                self._pages[name] = page = self._free.pop() if self._free else len(self._names)
                self._names[page : page + 1] = [name]
                if page >= len(self._kept):
                    self._kept = np.append(self._kept, np.zeros(max(16, len(self._kept)), np.int64))
        return self.find(indexes) if one is None else indexes - ((one - self._pages[one]) << PAGE_BITS)

    def keep(self, slots: IntArray) -> None:
        """Add one value to each of these slots."""
        page = _one_page(slots)
        if page is None:
            np.add.at(self._kept, slots >> PAGE_BITS, 1)
        else:
            self._kept[page] += len(slots)

    def release(self, slots: IntArray) -> None:
        """Remove one value from each of these slots; pages without any are recycled."""
        pages = slots >> PAGE_BITS
        np.subtract.at(self._kept, pages, 1)
        for page in np.unique(pages[self._kept[pages] == 0]).tolist():
            del self._pages[self._names[page]]
            self._free.append(page)
        if not self._pages:
            self._reset()


def _one_page(numbers: IntArray) -> int | None:
    """The page that all numbers are on; None if there are several pages or no numbers."""
    if len(numbers) == 1:  # most small requests
        return int(numbers[0]) >> PAGE_BITS
    if len(numbers) == 0:
        return None
    pages = numbers >> PAGE_BITS
    return int(pages[0]) if (pages == pages[0]).all() else None
