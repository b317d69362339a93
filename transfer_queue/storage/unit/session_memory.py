# SPDX-License-Identifier: Apache-2.0
"""What calls hold of a storage unit, in the server: leases to write, pins to read, writes that aren't committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from transfer_queue.calls import Holding, Until
from transfer_queue.storage.messages import FieldColumns
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.wire import ByteArray, IntArray, as_run, gather


class Memory(Holding):
    """Memory of the arena that a client may use. It is free when nothing refers to it."""

    until = Until.DONE
    __slots__ = ("_freed", "extents")

    def __init__(self, extents: Iterable[ByteArray], freed: Callable[[], None]) -> None:
        """``freed`` is called when the client no longer has it."""
        self.extents = list(extents)
        self._freed = freed

    def keep(self) -> None:
        self._freed()

    def undo(self) -> bool:
        self._freed()
        return True


class MemoryLease(Memory):
    """A client copies values into it, for a write that follows."""

    __slots__ = ()


class Pin(Memory):
    """A client copies values from it."""

    __slots__ = ()


class StoredRows(Holding):
    """Values of new samples. Nobody knows their indexes yet; if their put fails, they are deleted."""

    outlives_session = True
    __slots__ = ("_delete", "_indexes")

    def __init__(self, indexes: IntArray, delete: Callable[[IntArray], object]) -> None:
        self._indexes, self._delete = indexes, delete

    def undo(self) -> bool:
        self._delete(self._indexes)
        return True


class UncommittedWrite(Holding):
    """Values for samples that exist, stored aside until they are published. Only the controller knows if they were."""

    until = Until.DONE
    __slots__ = ("_over", "write")

    def __init__(self, write: RowsToWrite, over: Callable[[UncommittedWrite], None]) -> None:
        """``over`` is called when it is committed or aborted."""
        self.write, self._over = write, over

    def undo(self) -> bool:
        self._over(self)
        return True

    def end(self, died: bool) -> bool:
        return True


class RowsToWrite(msgspec.Struct, frozen=True):
    """Rows for these indexes, as received. ``leased``: some columns lie in memory that was leased for them."""

    indexes: IntArray
    columns: FieldColumns
    leased: bool = False

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for _, _, column in self.columns)

    def count_into(self, totals: dict[str, int], arena: Arena | None) -> None:
        """Add its bytes to those that came in messages (``message``) and in leased memory of the arena (``memory``)."""
        for _, _, column in self.columns:
            in_arena = self.leased and arena is not None and arena.offset_of(column.data) >= 0
            totals["memory"] += column.data.nbytes if in_arena else 0
            totals["message"] += column.nbytes - (column.data.nbytes if in_arena else 0)

    def without(self, indexes: IntArray) -> RowsToWrite:
        """The same write without the rows of these indexes."""
        kept, columns = ~np.isin(self.indexes, indexes), []
        for name, at, column in self.columns:
            rows = np.flatnonzero(kept[at])
            if len(rows) == column.rows:
                columns.append((name, at, column))
            elif len(rows):
                columns.append((name, as_run(np.arange(len(kept))[at][rows]), gather([(column, as_run(rows))])))
        return msgspec.structs.replace(self, columns=columns)
