# SPDX-License-Identifier: Apache-2.0
"""Wire columns, in client and server: one field of some rows as plain bytes, cut and selected by rows. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.copying import Copy, Spans, copy_now, copy_rows, copy_spans

IntArray: TypeAlias = NDArray[np.int64]
ByteArray: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = slice | IntArray
"""Rows of a batch, in order: a slice with both ends for consecutive rows, otherwise an array."""
Allocate: TypeAlias = Callable[[int], ByteArray]
"""Allocates this many bytes with undefined contents."""


PICKLE_SWITCH = "backend.SimpleStorage.allow_pickle: true"


class Code:
    """Extension types of msgpack for objects. Stores and checkpoints contain them: add new ones, never renumber."""

    TUPLE, SET, FROZENSET, MAP, COMPLEX, BIG_INT, TEXT, BYTEARRAY = range(1, 9)
    ARRAY, NUMPY_SCALAR, OBJECT_ARRAY, TENSOR, IMAGE = range(9, 14)
    PICKLE = 100


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How the rows of a wire column are laid out.

    ``shape`` is the shape of one row: complete for dense, ``-1`` per dim for ragged, empty for objects.
    """

    kind: Literal["dense", "ragged", "objects"]
    dtype: str = ""
    itemsize: int = 1
    shape: tuple[int, ...] = ()

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row; dense only."""
        return math.prod(self.shape) * self.itemsize

    @property
    def family(self) -> Layout:
        """The ragged layout of this dtype and rank. Wire columns of one family can be joined."""
        return ragged_layout(self.dtype, self.itemsize, len(self.shape)) if self.shape else self


OBJECTS = Layout("objects")


def dense_layout(dtype: str, itemsize: int, shape: Sequence[int]) -> Layout:
    return Layout("dense", dtype, itemsize, tuple(shape))


def ragged_layout(dtype: str, itemsize: int, ndim: int) -> Layout:
    return Layout("ragged", dtype, itemsize, (-1,) * ndim)


class WireColumn:
    """A wire column. ``data`` holds the rows back to back.

    ``row_meta`` is [rows, ndim] shapes (ragged) or [rows, 1] bytes (objects).
    ``selection`` selects rows from a larger block: row indices (dense) or start bytes (ragged), in order.
    It never changes after construction, because slices share its memory.
    """

    __slots__ = ("_bounds", "_extremes", "data", "layout", "nbytes", "row_meta", "rows", "selection")

    def __init__(
        self,
        layout: Layout,
        rows: int,
        data: ByteArray,
        row_meta: IntArray | None = None,
        bounds: IntArray | None = None,
        selection: IntArray | None = None,
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.data = data
        self.row_meta = row_meta
        self.nbytes = data.nbytes if row_meta is None else data.nbytes + row_meta.nbytes
        self._bounds = bounds
        self._extremes: tuple[int, int] | None = None
        self.selection = selection

    @classmethod
    def received(
        cls, layout: Layout, rows: int, data: ByteArray, row_meta: Any = None, selection: IntArray | None = None
    ) -> WireColumn:
        """Check and build the wire column that a sender described; ``row_meta`` is the received buffer.

        Raises:
            ProtocolError: lengths, shapes and offsets contradict each other.
        """
        flat = None if row_meta is None else _row_meta(layout, rows, row_meta)
        column = cls(layout, rows, data, flat, selection=selection)
        if selection is None:
            _check(column)
        else:
            _check_selection(column, selection)
        return column

    @property
    def bounds(self) -> IntArray:
        """[rows + 1] row boundaries in ``data``; ragged and objects only."""
        if self._bounds is None:
            assert self.row_meta is not None
            one_dim = self.row_meta.shape[1] == 1
            self._bounds = running_sum(self.row_meta[:, 0] if one_dim else self.row_meta.prod(axis=1))
            self._bounds *= self.layout.itemsize
        return self._bounds

    @property
    def extremes(self) -> tuple[int, int]:
        """The smallest and the largest number in ``row_meta``; ragged and objects with rows only."""
        if self._extremes is None:
            assert self.row_meta is not None
            self._extremes = int(self.row_meta.min()), int(self.row_meta.max())
        return self._extremes

    @property
    def starts(self) -> IntArray:
        """[rows] byte offsets in ``data`` where each row begins."""
        if self.layout.kind == "dense":
            return (np.arange(self.rows) if self.selection is None else self.selection) * self.layout.row_nbytes
        return self.bounds[:-1] if self.selection is None else self.selection

    @property
    def sizes(self) -> IntArray:
        """[rows] bytes of each row."""
        if self.layout.kind == "dense":
            return np.full(self.rows, self.layout.row_nbytes)
        return np.diff(self.bounds)

    def start_of(self, row: int) -> int:
        """The byte of ``data`` where this row begins and the previous one ends."""
        return row * self.layout.row_nbytes if self.layout.kind == "dense" else int(self.bounds[row])

    def rows_nbytes(self, rows: slice | NDArray[np.integer]) -> int:
        """Bytes that only these rows take."""
        count = count_of(rows)
        if self.layout.kind == "dense":
            return count * self.layout.row_nbytes
        assert self.row_meta is not None
        if isinstance(rows, slice):
            nbytes = self.bounds[rows.stop] - self.bounds[rows.start]
        else:
            nbytes = (self.bounds[rows + 1] - self.bounds[rows]).sum()
        return int(nbytes + count * self.row_meta.shape[1] * self.row_meta.itemsize)

    def moved_to(self, data: ByteArray) -> WireColumn:
        """The same column with its bytes there. It keeps nothing of the old one."""
        row_meta = None if self.row_meta is None else self.row_meta.copy()
        moved = WireColumn(self.layout, self.rows, data, row_meta, self._bounds, self.selection)
        moved._extremes = self._extremes
        return moved

    def as_ragged(self) -> WireColumn:
        """The same rows with explicit shapes; objects stay as they are."""
        if self.layout.kind != "dense":
            return self
        shapes = np.broadcast_to(np.array(self.layout.shape, np.int64), (self.rows, len(self.layout.shape)))
        starts = None if self.selection is None else self.starts
        bounds = np.arange(self.rows + 1) * self.layout.row_nbytes
        return WireColumn(self.layout.family, self.rows, self.data, shapes, bounds, starts)

    def slice(self, start: int, stop: int) -> WireColumn:
        """Rows start … stop - 1, sharing memory."""
        if start == 0 and stop == self.rows:
            return self
        if self.layout.kind == "dense":
            size = self.layout.row_nbytes
            return WireColumn(self.layout, stop - start, self.data[start * size : stop * size])
        assert self.row_meta is not None
        bounds = self.bounds[start : stop + 1]
        data, row_meta = self.data[bounds[0] : bounds[-1]], self.row_meta[start:stop]
        return WireColumn(self.layout, stop - start, data, row_meta, bounds - bounds[0])

    def pick(self, rows: Positions) -> WireColumn:
        """Rows in any order, sharing memory."""
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop)
        if self.row_meta is None:
            return WireColumn(self.layout, len(rows), self.data, selection=rows)
        return WireColumn(self.layout, len(rows), self.data, self.row_meta[rows], selection=self.bounds[rows])


PlacedColumns: TypeAlias = Sequence[tuple[Positions, WireColumn]]
"""Wire columns and the rows of the batch that each one fills. Each row occurs once."""


def running_sum(numbers: NDArray[np.int64]) -> IntArray:
    """[n + 1] prefix sums, from 0 to the total."""
    sums = np.empty(len(numbers) + 1, np.int64)
    sums[0] = 0
    numbers.cumsum(out=sums[1:])
    return sums


def runs_within(bounds: IntArray, most_nbytes: int, most_rows: int) -> list[tuple[int, int]]:
    """Cut rows with these [rows + 1] bounds into runs of at most so many bytes and rows, and of at least one row.

    Returns (first row, one past the last) of each.
    """
    runs, start, count = [], 0, len(bounds) - 1
    while start < count:
        stop = int(np.searchsorted(bounds, bounds[start] + most_nbytes, side="right")) - 1
        stop = min(max(stop, start + 1), start + most_rows, count)
        runs.append((start, stop))
        start = stop
    return runs


def _row_meta(layout: Layout, rows: int, buffer: Any) -> IntArray:
    try:
        flat: IntArray = np.frombuffer(buffer, np.int64)
    except ValueError as error:
        raise ProtocolError(f"the sizes of a {layout.kind} column are no whole number of int64: {error}") from error
    ndim = len(layout.shape) or 1
    if len(flat) != rows * ndim:
        raise ProtocolError(f"a {layout.kind} column of {rows} rows came with {len(flat)} sizes, not {rows * ndim}")
    return flat.reshape(rows, ndim)


def _check(column: WireColumn) -> None:
    """Refuse a column that would make a later copy read or write outside its buffer."""
    layout, have = column.layout, column.data.nbytes
    if layout.kind == "dense":
        expected = column.rows * layout.row_nbytes
        if min(layout.shape, default=0) < 0 or have != expected:
            raise ProtocolError(f"a dense column of {column.rows} rows has {have} bytes, its layout says {expected}")
        return
    row_meta = column.row_meta
    assert row_meta is not None
    # In floats, because an int64 product may wrap around to a plausible value.
    if row_meta.size:
        least, most = column.extremes
        if row_meta.shape[1] > 1:
            most = row_meta.astype(np.float64).prod(axis=1).max()
        if least < 0 or most * layout.itemsize > have:
            raise ProtocolError(f"rows of a {layout.kind} column don't fit its {have} bytes")
    if column.bounds[-1] != have:
        raise ProtocolError(f"a {layout.kind} column has {have} bytes, its rows end at {column.bounds[-1]}")


def _check_selection(column: WireColumn, selection: IntArray) -> None:
    """The same for selected rows of a larger block."""
    have, first, last = column.data.nbytes, int(selection.min()), int(selection.max())
    if len(selection) != column.rows:
        raise ProtocolError(f"{len(selection)} places of {column.rows} rows")
    if column.layout.kind == "dense":
        ends = (last + 1) * column.layout.row_nbytes
    else:
        assert column.row_meta is not None
        sizes = column.row_meta.astype(np.float64).prod(axis=1) * column.layout.itemsize
        ends = int((selection + sizes).max()) if column.row_meta.min() >= 0 else -1
    if first < 0 or not 0 <= ends <= have:
        raise ProtocolError(f"rows of a {column.layout.kind} column reach from {first} to byte {ends} of {have}")


SLICE_NBYTES = 64 * 1024
"""Runs of rows at least this long are sent in place. Shorter runs are copied together, because a frame costs more."""


def as_run(positions: Positions | NDArray[Any]) -> Positions:
    """Return the same positions, as a slice if they are consecutive."""
    if isinstance(positions, slice):
        return positions
    count = len(positions)
    if count == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first != count - 1:
        return positions
    # np.diff(...) and .all() take twice as long for a few hundred numbers.
    if count < 3 or int(np.count_nonzero(positions[1:] - positions[:-1] == 1)) == count - 1:
        return slice(first, first + count)
    return positions


def count_of(positions: slice | NDArray[Any]) -> int:
    return positions.stop - positions.start if isinstance(positions, slice) else len(positions)


def distinct(numbers: IntArray) -> IntArray:
    """Return each number once, ascending."""
    ascending = len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all())
    return numbers if ascending else np.unique(numbers)


def heap(nbytes: int) -> ByteArray:
    """Allocate memory of this process."""
    return np.empty(nbytes, np.uint8)


def join(
    placed: PlacedColumns, count: int, layout: Layout, allocate: Allocate = heap, copy: Copy = copy_now
) -> WireColumn:
    """Copy wire columns of this layout, or of its family, into a new one of ``count`` rows, each row to its place."""
    at, column = placed[0]
    if len(placed) == 1 and column.layout == layout and column.selection is None and isinstance(as_run(at), slice):
        whole = column.moved_to(allocate(column.data.nbytes))
        copy(whole.data, column.data)
        return whole
    if layout.kind == "dense":
        data = allocate(count * layout.row_nbytes)
        for at, column in placed if data.nbytes else ():
            copy_rows(data.reshape(-1, layout.row_nbytes), at, column.data, column.selection, copy)
        return WireColumn(layout, count, data)
    placed = [(at, column.as_ragged()) for at, column in placed]
    shapes, sizes = np.empty((count, len(layout.shape) or 1), np.int64), np.empty(count, np.int64)
    for at, column in placed:
        assert column.row_meta is not None
        sizes[at], shapes[at] = column.sizes, column.row_meta
    bounds = running_sum(sizes)
    data = allocate(int(bounds[-1]))
    for at, column in placed:
        copy_spans(data, column.data, Spans(bounds[:-1][at], column.starts, sizes[at]), copy)
    return WireColumn(layout, count, data, shapes, bounds)


def gather(selected: Sequence[tuple[WireColumn, Positions]], allocate: Allocate = heap) -> WireColumn:
    """Copy these rows of these wire columns, all of one family, into one new wire column, in this order."""
    layout = selected[0][0].layout
    if any(column.layout != layout for column, _ in selected):
        layout = layout.family
    placed, count = [], 0
    for column, rows in selected:
        some = column.pick(rows)
        placed.append((slice(count, count + some.rows), some))
        count += some.rows
    return join(placed, count, layout, allocate)


def select(columns: Sequence[WireColumn], which: IntArray, rows: IntArray) -> list[tuple[Positions, WireColumn]]:
    """Select row ``rows[i]`` of ``columns[which[i]]`` for every i. Returns columns and the positions they fill.

    Long runs of one column are slices that share its memory. All other rows are copied together, by family.
    """
    if len(rows) == 0:
        return []
    cuts = np.flatnonzero((np.diff(which) != 0) | (np.diff(rows) != 1)) + 1
    starts, stops = np.append(0, cuts), np.append(cuts, len(rows))
    if len(starts) == 1:
        return [(slice(0, len(rows)), columns[which[0]].slice(int(rows[0]), int(rows[-1]) + 1))]
    row_nbytes = np.array([column.nbytes / max(column.rows, 1) for column in columns])
    lengths = stops - starts
    is_long = lengths * row_nbytes[which[starts]] >= SLICE_NBYTES
    placed: list[tuple[Positions, WireColumn]] = []
    for start, stop in zip(starts[is_long].tolist(), stops[is_long].tolist(), strict=True):
        first = int(rows[start])
        placed.append((slice(start, stop), columns[which[start]].slice(first, first + stop - start)))
    short = np.flatnonzero(np.repeat(~is_long, lengths))
    families: dict[Layout, list[tuple[WireColumn, IntArray]]] = {}
    for number, own in groups(which[short]):
        families.setdefault(columns[number].layout.family, []).append((columns[number], short[own]))
    for each in families.values():
        at = as_run(np.concatenate([own for _, own in each]))
        placed.append((at, gather([(column, rows[own]) for column, own in each])))
    return placed


def groups(labels: NDArray[Any]) -> list[tuple[int, IntArray]]:
    """Return (label, positions with this label), labels and positions ascending."""
    if len(labels) == 0:
        return []
    if len(labels) == 1 or (labels == labels[0]).all():
        return [(int(labels[0]), np.arange(len(labels)))]
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return [(int(labels[own[0]]), own) for own in np.split(order, cuts)]
