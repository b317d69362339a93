# SPDX-License-Identifier: Apache-2.0
"""What one storage unit holds: column blocks by (index, field). Bookkeeping and bytes only, no socket or clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.pieces import IntArray
from transfer_queue.storage.simple.field_blocks import FieldBlocks
from transfer_queue.storage.simple.messages import FieldParts
from transfer_queue.storage.simple.slots import Slots


class BlockStore:
    """Values lie as they came, one block per field and write. A block that is mostly dead is copied and freed."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._fields: dict[str, FieldBlocks] = {}

    @property
    def live_nbytes(self) -> int:
        """Bytes of the values that can still be read."""
        return sum(field.live_nbytes for field in self._fields.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, dead rows included."""
        return sum(field.held_nbytes for field in self._fields.values())

    @property
    def num_blocks(self) -> int:
        return sum(field.num_blocks for field in self._fields.values())

    @property
    def num_values(self) -> int:
        return sum(field.values for field in self._fields.values())

    @property
    def num_samples(self) -> int:
        """Indexes with at least one field. Looks at every slot: for statistics, not for each request."""
        held = np.zeros(self._slots.capacity, np.bool_)
        for field in self._fields.values():
            present = field.present_slots()
            held[: len(present)] |= present[: len(held)]
        return int(held.sum())

    def write(self, indexes: IntArray, parts: FieldParts) -> None:
        """Keep these values; a value that is there already is replaced. The pieces' memory is kept, not copied."""
        slots = self._claim(indexes, parts)
        for name, positions, piece in parts:
            field = self._fields[name]
            mine = slots[positions]
            fresh = mine[field.missing(mine)]
            self._slots.keep(np.unique(fresh))
            field.add(mine, piece)

    def _claim(self, indexes: IntArray, parts: FieldParts) -> IntArray:
        # An index that no part gives a value must not get a page: nothing would ever release it.
        covered = np.zeros(len(indexes), np.bool_)
        for _, positions, _ in parts:
            covered[positions] = True
        self._slots.claim(indexes[covered])
        for name, _, _ in parts:
            self._fields.setdefault(name, FieldBlocks())
        for field in self._fields.values():
            field.grow(self._slots.capacity)
        return self._slots.find(indexes)

    def read(self, indexes: IntArray, fields: Sequence[str]) -> FieldParts:
        """These fields of all these indexes, which may repeat and come in any order.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never written.
        """
        slots = self._slots.find(indexes)
        parts: FieldParts = []
        for name in fields:
            field = self._fields.get(name)
            missing = indexes if field is None else indexes[field.missing(slots)]
            if len(missing):
                raise StorageKeyNotFoundError(
                    f"no value of field {name!r} for sample {missing[0]} ({len(missing)} of the {len(indexes)} samples "
                    f"asked for lack it here): it was cleared, or never put. Fetch metadata anew."
                )
            if field is not None and len(indexes):
                parts += [(name, positions, piece) for positions, piece in field.pick(slots)]
        return parts

    def drop(self, indexes: IntArray, fields: Iterable[str] | None = None) -> int:
        """Forget these fields (None: all) of these indexes, unknown ones skipped, and say how many values that were."""
        slots = np.unique(self._slots.find(indexes))
        dropped = 0
        for name in list(self._fields if fields is None else fields):
            field = self._fields.get(name)
            if field is None:
                continue
            mine = slots[~field.missing(slots)]
            field.drop(mine)
            self._slots.release(mine)
            dropped += len(mine)
            if not field.values:
                del self._fields[name]
        return dropped

    def replaced_nbytes(self, indexes: IntArray, parts: FieldParts) -> int:
        """Bytes that ``write`` of the same arguments would free."""
        slots = self._slots.find(indexes)
        total = 0
        for name in {name for name, _, _ in parts}:
            field = self._fields.get(name)
            if field is not None:
                mine = np.unique(np.concatenate([slots[positions] for part, positions, _ in parts if part == name]))
                total += field.nbytes_of(mine[~field.missing(mine)])
        return total

    def squeeze(self) -> None:
        """Copy live rows together until nothing dead is held."""
        if self.held_nbytes > self.live_nbytes:
            for field in self._fields.values():
                field.squeeze()
