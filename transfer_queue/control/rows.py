# SPDX-License-Identifier: Apache-2.0
"""The rows of one partition, in growing NumPy columns, ascending by global index; and the counter of indexes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import Indexes

Rows = npt.NDArray[np.intp]
_MIN_ROWS = 64
_FIXED = {"index": np.int64, "put_offset": np.int32, "put_size": np.int32, "put_number": np.int32}
"""Columns that a sample never changes."""


class RowState:
    """The states of a row. Status calls count FREE, RESERVED_FREE and LIVE rows; only LIVE rows can be fetched.

    Checkpoints contain these numbers.
    """

    # Plain ints: NumPy takes 2 us to compare a column with a member of an Enum.

    FREE = 0  # pre-allocated for the next insert
    RESERVED = 1  # reserved by a writer
    RESERVED_FREE = 2  # reserved by a writer, from the pre-allocated ones
    LIVE = 3  # a sample
    DEAD = 4  # cleared or released; removed by the next compaction
    HEAD = 5  # a group's own row: named by its key, and never fetched


def one_of(*states: int) -> npt.NDArray[np.bool_]:
    """A table to be indexed by a state column: True for these states."""
    table = np.zeros(RowState.HEAD + 1, dtype=np.bool_)
    table[list(states)] = True
    return table


PUBLISHED = one_of(RowState.LIVE, RowState.HEAD)
"""Rows that users know of."""


def ascending(rows: Rows) -> Rows:
    """The rows in order, each once."""
    return rows if len(rows) < 2 or (rows[1:] > rows[:-1]).all() else np.unique(rows)


def all_of(mask: npt.NDArray[np.bool_]) -> bool:
    """``mask.all()``, which is several times as expensive for a request of one sample."""
    return 0 not in mask.tobytes()


def positions_in(values: Indexes, wanted: Indexes) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """(positions, found): where the wanted indexes are among the ascending ``values``. Position 0 if not found."""
    if not len(values):
        return np.zeros(len(wanted), dtype=np.intp), np.zeros(len(wanted), dtype=np.bool_)
    positions = values.searchsorted(wanted)
    positions[positions == len(values)] = 0
    found: npt.NDArray[np.bool_] = values[positions] == wanted
    return positions, found


class PendingCopies(list["Callable[[PendingCopies], None]"]):
    """Freezes that read a partition where it lies: each copies it before anything that is saved of it changes.

    So whatever changes a partition calls ``make`` first. What each put or fetch does asks first whether there are any.
    A freeze knows a partition by this object.
    """

    def make(self) -> None:
        while self:
            self[-1](self)
            self.pop()  # not before, so that a copy that failed is tried again


class RowTable:
    """Named columns of equal length that grow together, and shrink once half of the rows are dead.

    Row numbers are internal and change in ``compact``; other files store global indexes. Beyond the used rows, a
    column contains zeros, or None where it is of objects, so that new rows need no writing.
    """

    def __init__(self) -> None:
        self.size = 0
        self.capacity = _MIN_ROWS
        self.num_dead = 0
        self.copies = PendingCopies()
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self.add_column("state", np.uint8)
        for name, dtype in _FIXED.items():
            self.add_column(name, dtype)

    def add_column(self, name: str, dtype: Any, width: int | None = None) -> None:
        """Add a column that is 0, or None for objects, in every present and future row."""
        shape = (self.capacity,) if width is None else (self.capacity, width)
        self._columns[name] = _empty(shape, dtype)

    def ensure_column(self, name: str, dtype: Any, width: int | None = None) -> npt.NDArray[Any]:
        """The used rows of a column that may be new."""
        if name not in self._columns:
            self.add_column(name, dtype, width)
        return self.column(name)

    def drop_column(self, name: str) -> None:
        """Delete a column."""
        self._columns.pop(name, None)

    def has_column(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> npt.NDArray[Any]:
        """View of the used rows, valid until the next ``append`` or ``compact``."""
        return self._columns[name][: self.size]

    def frozen(self) -> RowTable:
        """The rows as they are now, whatever becomes of them here. Columns of objects are left out.

        Columns that a sample never changes aren't copied: they take half of the memory. Rows that are no samples yet
        may change there.
        """
        copy = RowTable()
        copy.size, copy.capacity, copy.num_dead = self.size, self.size, self.num_dead
        for name, column in self._columns.items():
            if column.dtype != np.object_:
                copy._columns[name] = column[: self.size] if name in _FIXED else column[: self.size].copy()
        return copy

    def append(self, indexes: Indexes, state: int) -> Rows:
        """Add rows at the end. ``indexes`` must be larger than all existing ones; the allocator only counts up."""
        count = len(indexes)
        start, stop = self.size, self.size + count
        if stop > self.capacity:
            self._grow(stop)
        self.size = stop
        self._columns["index"][start:stop] = indexes
        self._columns["state"][start:stop] = state
        return np.arange(start, stop)

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self.capacity + self.capacity // 2, _MIN_ROWS)
        for name, column in self._columns.items():
            if column.dtype == np.object_:
                # Copies would count a million references up, and then down again. No view of it is in use.
                column.resize(capacity, refcheck=False)
                continue
            grown = _empty((capacity, *column.shape[1:]), column.dtype)
            grown[: self.size] = column[: self.size]
            self._columns[name] = grown
        self.capacity = capacity

    def find(self, indexes: Indexes) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """(rows, found): found is False if the partition has no such live row; its row number is then 0."""
        rows, found = positions_in(self.column("index"), indexes)
        if self.num_dead:
            found &= self.column("state")[rows] != RowState.DEAD
        if not all_of(found):
            rows[~found] = 0
        return rows, found

    def mark_dead(self, rows: Rows) -> None:
        """Mark rows as dead. They must not be dead yet."""
        self.column("state")[rows] = RowState.DEAD
        self.num_dead += len(rows)

    def wants_compaction(self) -> bool:
        return self.num_dead > _MIN_ROWS and self.num_dead * 2 > self.size

    def compact(self) -> None:
        """Drop dead rows. Every row number known outside is void afterwards."""
        alive = (self.column("state") != RowState.DEAD).nonzero()[0]
        size = len(alive)
        capacity = max(_MIN_ROWS, size + size // 4)
        for name, column in self._columns.items():
            kept = _empty((capacity, *column.shape[1:]), column.dtype)
            column.take(alive, axis=0, out=kept[:size], mode="clip")  # any other mode goes by way of a copy
            self._columns[name] = kept
        self.size, self.capacity, self.num_dead = size, capacity, 0


def _empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """None or 0 everywhere. Memory full of zeros takes no pages before it is written."""
    return np.empty(shape, dtype=dtype) if dtype == np.object_ else np.zeros(shape, dtype=dtype)


MAX_INDEX = 2**62
"""Never reached by counting; indexes from a checkpoint must stay below."""


class IndexAllocator:
    """The only index counter of the queue.

    ``num_used``: samples and reservations of all partitions, which count towards the capacity. Partitions update it.
    """

    def __init__(self) -> None:
        self.next_index = 0
        self.num_used = 0

    def allocate(self, count: int) -> Indexes:
        """Allocate ``count`` new contiguous indexes."""
        start, self.next_index = self.next_index, self.next_index + count
        return np.arange(start, start + count, dtype=np.int64)
