# SPDX-License-Identifier: Apache-2.0
"""What one storage unit holds: blocks of columns by (index, field). It has no socket and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.pieces import Allocate, IntArray, Piece, Positions
from transfer_queue.storage.selection import as_run, distinct, heap
from transfer_queue.storage.shm.field_blocks import STEP_NBYTES, FieldBlocks
from transfer_queue.storage.shm.messages import FieldParts
from transfer_queue.storage.shm.slots import Slots

Located: TypeAlias = list[tuple[str, Piece, Positions, Positions]]
"""(field, block, positions in the batch, their row indices in the block)."""


class BlockStore:
    """Keeps values as received, one block per field and write.

    A block that is mostly dead is copied and freed: a small one at once, a large one in steps, by ``move``.
    """

    def __init__(self, allocate: Allocate = heap, step_nbytes: int = STEP_NBYTES) -> None:
        """``allocate``: memory for blocks that are made from others here.
        ``step_nbytes``: how much is moved at once.
        """
        self._allocate = allocate
        self._step_nbytes = step_nbytes
        self._slots = Slots()
        self._fields: dict[str, FieldBlocks] = {}

    @property
    def live_nbytes(self) -> int:
        """Bytes of the values that can still be read."""
        return sum(field.live_nbytes for field in self._fields.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, including dead rows."""
        return sum(field.held_nbytes for field in self._fields.values())

    @property
    def num_blocks(self) -> int:
        return sum(field.num_blocks for field in self._fields.values())

    @property
    def num_values(self) -> int:
        return sum(field.values for field in self._fields.values())

    @property
    def num_samples(self) -> int:
        """Indexes with at least one field. It looks at every slot: use it for statistics only."""
        held = np.zeros(self._slots.capacity, np.bool_)
        for field in self._fields.values():
            present = field.present_slots()
            held[: len(present)] |= present[: len(held)]
        return int(held.sum())

    def write(self, indexes: IntArray, parts: FieldParts) -> None:
        """Store these values, replacing existing ones. It keeps the memory of the columns and copies nothing."""
        slots = self._claim(indexes, parts)
        for name, positions, piece in parts:
            mine = slots if _is_all(positions, len(slots)) else slots[positions]
            self._slots.keep(self._fields[name].add(mine, piece))

    def _claim(self, indexes: IntArray, parts: FieldParts) -> IntArray:
        # An index without any value must not get a page, because nothing would ever release it.
        if any(_is_all(positions, len(indexes)) for _, positions, _ in parts):
            self._slots.claim(indexes)
        else:
            covered = np.zeros(len(indexes), np.bool_)
            for _, positions, _ in parts:
                covered[positions] = True
            self._slots.claim(indexes[covered])
        for name, _, _ in parts:
            self._fields.setdefault(name, FieldBlocks(self._allocate, self._step_nbytes))
        for field in self._fields.values():
            field.grow(self._slots.capacity)
        return self._slots.find(indexes)

    def read(self, indexes: IntArray, fields: Sequence[str]) -> FieldParts:
        """Return these fields of all these indexes, which may repeat and come in any order.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never written.
        """
        if not len(indexes):
            return []
        parts: FieldParts = []
        for name, field, slots, whole in self._found(indexes, fields):
            if whole is None:
                parts += [(name, at, piece) for at, piece in field.pick(slots)]
            else:
                piece, rows = whole
                parts.append((name, slice(0, len(slots)), piece.slice(rows.start, rows.stop)))
        return parts

    def locate(self, indexes: IntArray, fields: Sequence[str]) -> Located:
        """Return where ``read`` finds the values. Slices mean that one block without dead rows holds all of a field.

        Raises:
            StorageKeyNotFoundError: as ``read`` does.
        """
        located: Located = []
        for name, field, slots, whole in self._found(indexes, fields):
            if whole is None:
                located += [(name, *block) for block in field.located(slots)]
            else:
                piece, rows = whole
                located.append((name, piece, slice(0, len(slots)), rows))
        return located

    def _found(
        self, indexes: IntArray, fields: Sequence[str]
    ) -> Iterator[tuple[str, FieldBlocks, IntArray, tuple[Piece, slice] | None]]:
        """(field name, blocks, slots, (block, rows) if one block without dead rows holds all slots in order)."""
        slots = self._slots.find(indexes)
        run = as_run(slots)
        known = run if isinstance(run, slice) and run.start >= 0 and len(slots) else None
        for name in fields:
            field = self._fields.get(name)
            whole = None if field is None or known is None else field.whole(known)
            if whole is None:
                missing = indexes if field is None else indexes[field.missing(slots)]
                if len(missing):
                    raise StorageKeyNotFoundError(
                        f"no value of field {name!r} for sample {missing[0]} ({len(missing)} of the {len(indexes)} "
                        f"samples asked for lack it here): it was cleared, or never put. Fetch metadata anew."
                    )
            if field is not None:
                yield name, field, slots, whole

    def lacking(self, indexes: IntArray, fields: Iterable[str]) -> dict[str, IntArray]:
        """By field, which of the indexes have no value."""
        slots = self._slots.find(indexes)
        held = {name: self._fields.get(name) for name in fields}
        return {name: indexes if field is None else indexes[field.missing(slots)] for name, field in held.items()}

    def likely_nbytes(self, indexes: IntArray, fields: Iterable[str]) -> float:
        """Estimate the bytes of these fields from the blocks that hold the first and the last index."""
        if not len(indexes):
            return 0.0
        ends = [self._slots.find_one(int(indexes[at])) for at in (0, -1)]
        held = [self._fields[name] for name in fields if name in self._fields]
        return len(indexes) * sum(field.mean_nbytes_beside(ends) for field in held)

    def delete(self, indexes: IntArray, fields: Iterable[str] | None = None) -> int:
        """Delete these fields (None: all) of these indexes, skipping unknown ones. Returns the number of values
        deleted.
        """
        slots = distinct(self._slots.find(indexes))
        deleted = 0
        for name in list(self._fields if fields is None else fields):
            field = self._fields.get(name)
            if field is None:
                continue
            mine = slots[~field.missing(slots)]
            if not len(mine):
                continue
            field.delete(mine)
            self._slots.release(mine)
            deleted += len(mine)
            if not field.values:
                del self._fields[name]
        return deleted

    def replaced_nbytes(self, indexes: IntArray, fields: Iterable[str]) -> int:
        """Bytes that a write of these fields of these indexes would free."""
        slots = distinct(self._slots.find(indexes))
        held = [self._fields[name] for name in set(fields) if name in self._fields]
        return sum(field.nbytes_of(slots[~field.missing(slots)]) for field in held)

    @property
    def is_moving(self) -> bool:
        """Whether ``move`` has work to do."""
        return any(field.is_moving for field in self._fields.values())

    def move(self) -> None:
        """Make one step towards at most half of the held bytes being dead."""
        for field in self._fields.values():
            if field.is_moving:
                field.move()
                return

    def pack(self) -> None:
        """Compact all blocks with dead rows: small ones now, large ones by later calls of ``move``."""
        if self.held_nbytes > self.live_nbytes:
            for field in self._fields.values():
                field.pack()

    def squeeze(self) -> None:
        """Compact all blocks with dead rows now."""
        if self.held_nbytes > self.live_nbytes:
            for field in self._fields.values():
                field.squeeze()


def _is_all(positions: Positions, count: int) -> bool:
    return isinstance(positions, slice) and positions.start == 0 and positions.stop == count
