# SPDX-License-Identifier: Apache-2.0
"""A column piece: one field of some rows as plain bytes, with what is needed to cut it by rows. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.spans import as_words, copy_spans

IntArray: TypeAlias = NDArray[np.int64]
ByteArray: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = slice | IntArray
"""Which rows of a batch, in order: a consecutive run as a slice with both ends, anything else as an array."""

SLICE_NBYTES = 64 * 1024
"""Runs of rows at least this long travel as they lie; shorter ones are copied together: a frame costs more."""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How rows lie in a piece.

    ``shape`` is one row's: whole for dense, ``-1`` per dim for ragged (the rank counts), empty for objects.
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
        """Pieces of one family can be joined: rows of one dtype and rank are ragged at worst."""
        return ragged_layout(self.dtype, self.itemsize, len(self.shape)) if self.shape else self


OBJECTS = Layout("objects")


def dense_layout(dtype: str, itemsize: int, shape: Sequence[int]) -> Layout:
    return Layout("dense", dtype, itemsize, tuple(shape))


def ragged_layout(dtype: str, itemsize: int, ndim: int) -> Layout:
    return Layout("ragged", dtype, itemsize, (-1,) * ndim)


class Piece:
    """``data`` holds the rows back to back. ``side`` is [rows, ndim] shapes (ragged) or [rows + 1] offsets (objects).

    Never changed once made: slices share its memory.
    """

    __slots__ = ("_bounds", "data", "layout", "rows", "side")

    def __init__(
        self, layout: Layout, rows: int, data: ByteArray, side: IntArray | None = None, bounds: IntArray | None = None
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.data = data
        self.side = side
        self._bounds = bounds

    @classmethod
    def from_frames(cls, layout: Layout, rows: int, frames: Sequence[Any]) -> Piece:
        """The piece that ``frames()`` of its sender described.

        Raises:
            ProtocolError: lengths, shapes and offsets contradict each other.
        """
        data = np.frombuffer(frames[0], np.uint8)
        side = _side(layout, rows, np.frombuffer(frames[1], np.int64)) if layout.kind != "dense" else None
        piece = cls(layout, rows, data, side)
        _check(piece)
        return piece

    def frames(self) -> list[Any]:
        """The buffers as they travel, not copied."""
        return [self.data] if self.side is None else [self.data, np.ascontiguousarray(self.side).reshape(-1)]

    @property
    def nbytes(self) -> int:
        if self.side is None:
            return self.data.nbytes
        # The closing offset of objects is nobody's: rows must add up to the whole.
        return self.data.nbytes + self.side.nbytes - (8 if self.side.ndim == 1 else 0)

    @property
    def bounds(self) -> IntArray:
        """[rows + 1] where each row begins and ends in ``data``; ragged and objects only."""
        if self._bounds is None:
            assert self.side is not None
            if self.layout.kind == "ragged":
                sizes = self.side.prod(axis=1) * self.layout.itemsize
                self._bounds = np.concatenate((np.zeros(1, np.int64), sizes.cumsum()))
            else:
                self._bounds = self.side if self.side[0] == 0 else self.side - self.side[0]
        return self._bounds

    def rows_nbytes(self, rows: NDArray[np.integer]) -> int:
        """Bytes that these rows alone take."""
        if self.layout.kind == "dense":
            return len(rows) * self.layout.row_nbytes
        assert self.side is not None
        side_nbytes = 8 if self.side.ndim == 1 else 8 * self.side.shape[1]
        return int((self.bounds[rows + 1] - self.bounds[rows]).sum()) + len(rows) * side_nbytes

    def as_ragged(self) -> Piece:
        """The same rows with their shapes spelled out; objects stay as they are."""
        if self.layout.kind != "dense":
            return self
        shapes = np.broadcast_to(np.array(self.layout.shape, np.int64), (self.rows, len(self.layout.shape)))
        bounds = np.arange(self.rows + 1) * self.layout.row_nbytes
        return Piece(self.layout.family, self.rows, self.data, shapes, bounds)

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


def _side(layout: Layout, rows: int, flat: IntArray) -> IntArray:
    expected = rows + 1 if layout.kind == "objects" else rows * len(layout.shape)
    if len(flat) != expected:
        raise ProtocolError(f"a {layout.kind} column of {rows} rows came with {len(flat)} offsets, expected {expected}")
    return flat if layout.kind == "objects" else flat.reshape(rows, len(layout.shape))


def _check(piece: Piece) -> None:
    """Refuse what would make a later copy read or write outside its buffer."""
    layout, have = piece.layout, piece.data.nbytes
    if layout.kind == "dense":
        expected = piece.rows * layout.row_nbytes
        if min(layout.shape, default=0) < 0 or have != expected:
            raise ProtocolError(f"a dense column of {piece.rows} rows has {have} bytes, its layout says {expected}")
        return
    side = piece.side
    assert side is not None
    # As floats first: a product of int64 may wrap to something that looks right.
    if layout.kind == "ragged" and side.size:
        sizes = side.astype(np.float64).prod(axis=1)
        if side.min() < 0 or sizes.max() * layout.itemsize > have:
            raise ProtocolError(f"row shapes of a ragged column don't fit its {have} bytes")
    sizes_ok = layout.kind == "ragged" or bool((np.diff(side) >= 0).all())
    if not sizes_ok or piece.bounds[-1] != have:
        raise ProtocolError(f"a {layout.kind} column has {have} bytes, its rows end at {piece.bounds[-1]}")


def as_run(positions: IntArray) -> Positions:
    """The same positions, as a slice when they are consecutive."""
    count = len(positions)
    if count == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first == count - 1 and (count < 3 or bool((np.diff(positions) == 1).all())):
        return slice(first, first + count)
    return positions


def gather(parts: Sequence[tuple[Piece, IntArray]]) -> Piece:
    """Copy these rows of these pieces, all of one family, into one new piece, in this order."""
    layout = parts[0][0].layout
    if any(piece.layout != layout for piece, _ in parts):
        parts, layout = [(piece.as_ragged(), rows) for piece, rows in parts], layout.family
    total = sum(len(rows) for _, rows in parts)
    if layout.kind == "dense":
        return Piece(layout, total, _gather_dense(parts, total, layout.row_nbytes))
    sizes = np.concatenate([piece.bounds[rows + 1] - piece.bounds[rows] for piece, rows in parts])
    bounds = np.zeros(total + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    data = np.empty(int(bounds[-1]), np.uint8)
    at = 0
    for piece, rows in parts:
        end = at + len(rows)
        copy_spans(data, bounds[at:end], piece.data, piece.bounds[rows], sizes[at:end])
        at = end
    if layout.kind == "objects":
        return Piece(layout, total, data, bounds, bounds)
    shapes = np.concatenate([piece.side[rows] for piece, rows in parts if piece.side is not None])
    return Piece(layout, total, data, shapes, bounds)


def _gather_dense(parts: Sequence[tuple[Piece, IntArray]], total: int, row_nbytes: int) -> ByteArray:
    out = np.empty(total * row_nbytes, np.uint8)
    if out.nbytes == 0:
        return out
    at = 0
    for piece, rows in parts:
        target, source = as_words(out[at : at + len(rows) * row_nbytes], piece.data, row_nbytes)
        # mode="clip" writes straight into ``out``; the default would go through a buffer.
        np.take(source, rows, axis=0, out=target, mode="clip")
        at += len(rows) * row_nbytes
    return out


def pick(pieces: Sequence[Piece], which: IntArray, rows: IntArray) -> list[tuple[Positions, Piece]]:
    """Row ``rows[i]`` of ``pieces[which[i]]`` for every i, in few parts, each with the positions i that it fills.

    Long runs of one piece are slices that share its memory; all other rows are copied together, one part per family.
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


def groups(labels: NDArray[Any]) -> list[tuple[int, IntArray]]:
    """(label, positions that carry it), labels and positions ascending."""
    if len(labels) == 0:
        return []
    if (labels == labels[0]).all():
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
