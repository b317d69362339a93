# SPDX-License-Identifier: Apache-2.0
"""Wire columns: one field of some rows as plain bytes, cut and selected by rows. Uses no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.copying import copy_rows, copy_spans

IntArray: TypeAlias = NDArray[np.int64]
ByteArray: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = slice | IntArray
"""Rows of a batch, in order: a slice with both ends for consecutive rows, otherwise an array."""
Allocate: TypeAlias = Callable[[int], ByteArray]
"""Allocates this many bytes with undefined contents."""


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


class Piece:
    """A wire column. ``data`` holds the rows back to back.

    ``side`` is [rows, ndim] shapes (ragged) or [rows + 1] offsets (objects).
    ``picks`` selects rows from a larger block: row indices (dense) or start bytes (ragged), in order.
    It never changes after construction, because slices share its memory.
    """

    __slots__ = ("_bounds", "_extremes", "data", "layout", "picks", "rows", "side")

    def __init__(
        self,
        layout: Layout,
        rows: int,
        data: ByteArray,
        side: IntArray | None = None,
        bounds: IntArray | None = None,
        picks: IntArray | None = None,
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.data = data
        self.side = side
        self._bounds = bounds
        self._extremes: tuple[int, int] | None = None
        self.picks = picks

    @classmethod
    def received(
        cls, layout: Layout, rows: int, data: ByteArray, side: Any = None, picks: IntArray | None = None
    ) -> Piece:
        """Check and build the wire column that a sender described; ``side`` is the received buffer.

        Raises:
            ProtocolError: lengths, shapes and offsets contradict each other.
        """
        flat = None if side is None else _side(layout, rows, np.frombuffer(side, np.int64))
        piece = cls(layout, rows, data, flat, picks=picks)
        if picks is None:
            _check(piece)
        else:
            _check_picks(piece, picks)
        return piece

    @property
    def side_frame(self) -> IntArray | None:
        """``side`` as a message frame."""
        return None if self.side is None else np.ascontiguousarray(self.side).reshape(-1)

    @property
    def nbytes(self) -> int:
        if self.side is None:
            return self.data.nbytes
        # The closing offset of objects is not counted, so that the rows add up to the whole.
        return self.data.nbytes + self.side.nbytes - (8 if self.side.ndim == 1 else 0)

    @property
    def bounds(self) -> IntArray:
        """[rows + 1] row boundaries in ``data``; ragged and objects only."""
        if self._bounds is None:
            assert self.side is not None
            if self.layout.kind == "ragged":
                one_dim = self.side.shape[1] == 1
                self._bounds = running_sum(self.side[:, 0] if one_dim else self.side.prod(axis=1))
                self._bounds *= self.layout.itemsize
            else:
                self._bounds = self.side if self.side[0] == 0 else self.side - self.side[0]
        return self._bounds

    @property
    def extremes(self) -> tuple[int, int]:
        """The smallest and the largest number in ``side``; only for ragged columns with rows."""
        if self._extremes is None:
            assert self.side is not None
            self._extremes = int(self.side.min()), int(self.side.max())
        return self._extremes

    @property
    def starts(self) -> IntArray:
        """[rows] byte offsets in ``data`` where each row begins."""
        if self.layout.kind == "dense":
            return (np.arange(self.rows) if self.picks is None else self.picks) * self.layout.row_nbytes
        return self.bounds[:-1] if self.picks is None else self.picks

    def begin(self, row: int) -> int:
        """The byte of ``data`` where this row begins and the previous one ends."""
        return row * self.layout.row_nbytes if self.layout.kind == "dense" else int(self.bounds[row])

    def rows_nbytes(self, rows: NDArray[np.integer]) -> int:
        """Bytes that only these rows take."""
        if self.layout.kind == "dense":
            return len(rows) * self.layout.row_nbytes
        assert self.side is not None
        side_nbytes = 8 if self.side.ndim == 1 else 8 * self.side.shape[1]
        return int((self.bounds[rows + 1] - self.bounds[rows]).sum()) + len(rows) * side_nbytes

    def as_ragged(self) -> Piece:
        """The same rows with explicit shapes; objects stay as they are."""
        if self.layout.kind != "dense":
            return self
        shapes = np.broadcast_to(np.array(self.layout.shape, np.int64), (self.rows, len(self.layout.shape)))
        starts = None if self.picks is None else self.starts
        bounds = np.arange(self.rows + 1) * self.layout.row_nbytes
        return Piece(self.layout.family, self.rows, self.data, shapes, bounds, starts)

    def slice(self, start: int, stop: int) -> Piece:
        """Rows start … stop - 1, sharing memory."""
        if start == 0 and stop == self.rows:
            return self
        if self.layout.kind == "dense":
            size = self.layout.row_nbytes
            return Piece(self.layout, stop - start, self.data[start * size : stop * size])
        assert self.side is not None
        bounds = self.bounds[start : stop + 1]
        side = self.side[start : stop + (self.layout.kind == "objects")]
        return Piece(self.layout, stop - start, self.data[bounds[0] : bounds[-1]], side, bounds - bounds[0])


def running_sum(numbers: NDArray[np.int64]) -> IntArray:
    """[n + 1] prefix sums, from 0 to the total."""
    sums = np.empty(len(numbers) + 1, np.int64)
    sums[0] = 0
    numbers.cumsum(out=sums[1:])
    return sums


def _side(layout: Layout, rows: int, flat: IntArray) -> IntArray:
    expected = rows + 1 if layout.kind == "objects" else rows * len(layout.shape)
    if len(flat) != expected:
        raise ProtocolError(f"a {layout.kind} column of {rows} rows came with {len(flat)} offsets, expected {expected}")
    return flat if layout.kind == "objects" else flat.reshape(rows, len(layout.shape))


def _check(piece: Piece) -> None:
    """Refuse a column that would make a later copy read or write outside its buffer."""
    layout, have = piece.layout, piece.data.nbytes
    if layout.kind == "dense":
        expected = piece.rows * layout.row_nbytes
        if min(layout.shape, default=0) < 0 or have != expected:
            raise ProtocolError(f"a dense column of {piece.rows} rows has {have} bytes, its layout says {expected}")
        return
    side = piece.side
    assert side is not None
    # In floats, because an int64 product may wrap around to a plausible value.
    if layout.kind == "ragged" and side.size:
        least, most = piece.extremes
        if side.shape[1] > 1:
            most = side.astype(np.float64).prod(axis=1).max()
        if least < 0 or most * layout.itemsize > have:
            raise ProtocolError(f"row shapes of a ragged column don't fit its {have} bytes")
    sizes_ok = layout.kind == "ragged" or bool((np.diff(side) >= 0).all())
    if not sizes_ok or piece.bounds[-1] != have:
        raise ProtocolError(f"a {layout.kind} column has {have} bytes, its rows end at {piece.bounds[-1]}")


def _check_picks(piece: Piece, picks: IntArray) -> None:
    """The same for selected rows of a larger block."""
    have, first, last = piece.data.nbytes, int(picks.min()), int(picks.max())
    if len(picks) != piece.rows:
        raise ProtocolError(f"{len(picks)} places of {piece.rows} rows")
    if piece.layout.kind == "dense":
        ends = (last + 1) * piece.layout.row_nbytes
    else:
        assert piece.side is not None
        sizes = piece.side.astype(np.float64).prod(axis=1) * piece.layout.itemsize
        ends = int((picks + sizes).max()) if piece.side.min() >= 0 else -1
    if first < 0 or not 0 <= ends <= have:
        raise ProtocolError(f"rows of a {piece.layout.kind} column reach from {first} to byte {ends} of {have}")


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
    if int(positions[-1]) - first == count - 1 and (count < 3 or _is_ascending_by_one(positions)):
        return slice(first, first + count)
    return positions


def _is_ascending_by_one(numbers: NDArray[Any]) -> bool:
    # np.diff(...) and .all() take twice as long for a few hundred numbers.
    return int(np.count_nonzero(numbers[1:] - numbers[:-1] == 1)) == len(numbers) - 1


def distinct(numbers: IntArray) -> IntArray:
    """Return each number once, ascending."""
    ascending = len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all())
    return numbers if ascending else np.unique(numbers)


def heap(nbytes: int) -> ByteArray:
    """Allocate memory of this process."""
    return np.empty(nbytes, np.uint8)


def gather(parts: Sequence[tuple[Piece, Positions]], allocate: Allocate = heap) -> Piece:
    """Copy these rows of these wire columns, all of one family, into one new wire column, in this order."""
    layout = parts[0][0].layout
    if any(piece.layout != layout for piece, _ in parts):
        parts, layout = [(piece.as_ragged(), rows) for piece, rows in parts], layout.family
    counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in parts]
    total = sum(counts)
    if layout.kind == "dense":
        return Piece(layout, total, _gather_dense(parts, counts, allocate(total * layout.row_nbytes)))
    starts, sizes = zip(*(_extent(piece, rows) for piece, rows in parts), strict=True)
    bounds = running_sum(np.concatenate(sizes))
    data = allocate(int(bounds[-1]))
    at = 0
    for (piece, _), count, start, size in zip(parts, counts, starts, sizes, strict=True):
        copy_spans(data, bounds[at : at + count], piece.data, start, size)
        at += count
    if layout.kind == "objects":
        return Piece(layout, total, data, bounds, bounds)
    shapes = np.concatenate([piece.side[rows] for piece, rows in parts if piece.side is not None])
    return Piece(layout, total, data, shapes, bounds)


def _extent(piece: Piece, rows: Positions) -> tuple[IntArray, IntArray]:
    """Return where these rows begin in the column, and their sizes."""
    starts = piece.bounds[:-1][rows]
    return starts, piece.bounds[1:][rows] - starts


def _gather_dense(parts: Sequence[tuple[Piece, Positions]], counts: Sequence[int], out: ByteArray) -> ByteArray:
    if out.nbytes == 0:
        return out
    at, row_nbytes = 0, parts[0][0].layout.row_nbytes
    for (piece, rows), count in zip(parts, counts, strict=True):
        if isinstance(rows, slice):
            copy_rows(out, slice(at, at + count), piece.slice(rows.start, rows.stop).data, None, row_nbytes)
        else:
            copy_rows(out, slice(at, at + count), piece.data, rows, row_nbytes)
        at += count
    return out


def pick(pieces: Sequence[Piece], which: IntArray, rows: IntArray) -> list[tuple[Positions, Piece]]:
    """Select row ``rows[i]`` of ``pieces[which[i]]`` for every i, in few parts, each with the positions i that it
    fills.

    Long runs of one column are slices that share its memory. All other rows are copied together, one part per family.
    """
    if len(rows) == 0:
        return []
    cuts = np.flatnonzero((np.diff(which) != 0) | (np.diff(rows) != 1)) + 1
    starts, stops = np.append(0, cuts), np.append(cuts, len(rows))
    if len(starts) == 1:
        return [(slice(0, len(rows)), pieces[which[0]].slice(int(rows[0]), int(rows[-1]) + 1))]
    row_nbytes = np.array([piece.nbytes / max(piece.rows, 1) for piece in pieces])
    lengths = stops - starts
    is_long = lengths * row_nbytes[which[starts]] >= SLICE_NBYTES
    parts: list[tuple[Positions, Piece]] = []
    for start, stop in zip(starts[is_long].tolist(), stops[is_long].tolist(), strict=True):
        first = int(rows[start])
        parts.append((slice(start, stop), pieces[which[start]].slice(first, first + stop - start)))
    if not is_long.all():
        short = np.flatnonzero(np.repeat(~is_long, lengths))
        parts += _copied(pieces, which[short], rows[short], short)
    return parts


def cut(piece: Piece, at: Positions) -> list[tuple[Positions, Piece]]:
    """``pick`` from one wire column."""
    if isinstance(at, slice):
        return [(slice(0, at.stop - at.start), piece.slice(at.start, at.stop))]
    return pick([piece], np.zeros(len(at), np.int64), at)


def groups(labels: NDArray[Any]) -> list[tuple[int, IntArray]]:
    """Return (label, positions with this label), labels and positions ascending."""
    if len(labels) == 0:
        return []
    if len(labels) == 1 or (labels == labels[0]).all():
        return [(int(labels[0]), np.arange(len(labels)))]
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return [(int(labels[part[0]]), part) for part in np.split(order, cuts)]


def _copied(pieces: Sequence[Piece], which: IntArray, rows: IntArray, at: IntArray) -> list[tuple[Positions, Piece]]:
    families: dict[Layout, list[tuple[Piece, IntArray, IntArray]]] = {}
    for number, mine in groups(which):
        families.setdefault(pieces[number].layout.family, []).append((pieces[number], rows[mine], at[mine]))
    return [
        (as_run(np.concatenate([where for *_, where in part])), gather([(piece, chosen) for piece, chosen, _ in part]))
        for part in families.values()
    ]
