# SPDX-License-Identifier: Apache-2.0
"""What one storage unit holds, in the server: blocks of columns by (index, field). It has no socket and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.messages import FieldColumns, Located
from transfer_queue.storage.unit.field_blocks import PAGE, Block, FieldBlocks, HeldBlocks, Pages
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
        self._fields: dict[str, FieldBlocks] = {}

    @property
    def num_samples(self) -> int:
        """Indexes with at least one field. It looks at every cell: use it for statistics only."""
        tables = [field.cells for field in self._fields.values()]
        pages = [np.fromiter(cells.pages, np.int64, len(cells.pages)) for cells in tables]
        names = np.unique(np.concatenate([np.empty(0, np.int64), *pages]))
        held = np.zeros((len(names), PAGE), np.bool_)
        for cells, own in zip(tables, pages, strict=True):
            places = np.fromiter(cells.pages.values(), np.int64, len(own))
            held[np.searchsorted(names, own)] |= cells.block_of.reshape(-1, PAGE)[places] >= 0
        return int(held.sum())

    @property
    def num_values(self) -> int:
        return sum(block.live for field in self._fields.values() for block in field.blocks.values())

    @property
    def num_blocks(self) -> int:
        return sum(len(field.blocks) for field in self._fields.values())

    def write(self, indexes: IntArray, columns: FieldColumns) -> None:
        """Store these values, replacing existing ones. It keeps the memory of the columns and copies nothing."""
        pages = Pages(indexes)
        for name, positions, column in columns:
            field = self._fields.get(name)
            if field is None:
                field = self._fields[name] = FieldBlocks(self)
            is_of_all = column.rows == len(indexes) and isinstance(positions, slice)
            field.add(pages if is_of_all else Pages(indexes[positions]), column)

    def locate(self, indexes: IntArray, fields: Sequence[str]) -> Located:
        """Return where these fields of all these indexes lie, which may repeat and come in any order.

        Slices mean that one block without dead rows holds all of a field.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never written.
        """
        located: Located = []
        pages = Pages(indexes)
        for name in fields:
            field = self._fields.get(name)
            cells = None if field is None else field.cells.of(pages)
            run = None if cells is None or not len(cells) else as_run(cells)
            if field is not None and isinstance(run, slice) and (whole := field.whole(run)) is not None:
                column, rows = whole
                located.append((name, column, slice(0, len(indexes)), rows))
                continue
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
        pages = Pages(indexes)
        held = {name: indexes[~field.missing(field.cells.of(pages))] for name, field in self._fields.items()}
        return {name: some for name, some in held.items() if len(some)}

    def delete(self, indexes: IntArray) -> None:
        """Delete all fields of these indexes, skipping unknown ones."""
        pages = Pages(distinct(indexes))
        self.look_for_disk()
        for name, field in list(self._fields.items()):
            cells = field.cells.of(pages)
            mine = ~field.missing(cells)
            if 1 not in mine.tobytes():
                continue
            field.delete(cells[mine])
            field.cells.release(pages)
            if not field.blocks:
                del self._fields[name]

    def replaced_nbytes(self, indexes: IntArray, fields: Iterable[str]) -> int:
        """Bytes that a write of these fields of these indexes would free."""
        pages = Pages(distinct(indexes))
        held = [self._fields[name] for name in set(fields) if name in self._fields]
        found = [(field, field.cells.of(pages)) for field in held]
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
