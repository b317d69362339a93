# SPDX-License-Identifier: Apache-2.0
"""Columns in memory that are about to be stored. Each is written once, straight from the tensor to its destination."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.storage.assembling import is_simple_jagged, jagged_values
from transfer_queue.storage.pieces import (
    ByteArray,
    IntArray,
    Layout,
    Piece,
    Positions,
    dense_layout,
    ragged_layout,
    running_sum,
)
from transfer_queue.storage.spans import Copy, copy_spans, runs
from transfer_queue.storage.tensors import as_bytes, dtype_name, from_bytes, resolved, rows_piece


class Source(ABC):
    """One column. ``side`` is [rows, ndim] shapes for ragged columns, [rows + 1] offsets for objects, else None."""

    layout: Layout
    rows: int
    side: IntArray | None

    @abstractmethod
    def piece(self) -> Piece:
        """Return the whole column as a wire column, sharing memory with the data if its layout allows."""

    @abstractmethod
    def nbytes_of(self, at: Positions) -> int:
        """Bytes of the values of these rows."""

    @abstractmethod
    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        """Write these rows back to back with ``copy``; ``out`` has exactly their size."""

    def stored_in(self, out: ByteArray, at: Positions, rows: int, copy: Copy) -> Piece:
        """Write these rows into ``out``, and return the wire column that describes them there."""
        self.copy_into(out, at, copy)
        return Piece(self.layout, rows, out, None if self.side is None else self.side[at])


class TensorSource(Source):
    """Row i is ``values[i]``, or ``values[bounds[i] : bounds[i + 1]]`` if there are bounds."""

    def __init__(self, values: torch.Tensor, bounds: IntArray | None = None) -> None:
        self._values = resolved(values)
        self._bounds = bounds
        name, size, shape = dtype_name(values.dtype), values.element_size(), tuple(values.shape)
        self._entry_nbytes = math.prod(shape[1:]) * size
        if bounds is None:
            self.layout, self.rows, self.side = dense_layout(name, size, shape[1:]), shape[0], None
        else:
            self.layout, self.rows = ragged_layout(name, size, values.ndim), len(bounds) - 1
            self.side = np.empty((self.rows, values.ndim), np.int64)
            self.side[:, 0] = np.diff(bounds)
            self.side[:, 1:] = shape[1:]

    def piece(self) -> Piece:
        return Piece(self.layout, self.rows, as_bytes(self._values), self.side)

    def nbytes_of(self, at: Positions) -> int:
        if self._bounds is None:
            entries = at.stop - at.start if isinstance(at, slice) else len(at)
        elif isinstance(at, slice):
            entries = int(self._bounds[at.stop] - self._bounds[at.start])
        else:
            entries = int((self._bounds[at + 1] - self._bounds[at]).sum())
        return entries * self._entry_nbytes

    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        starts, stops = runs(at)
        if self._bounds is not None:
            starts, stops = self._bounds[starts], self._bounds[stops]
        if self._values.is_contiguous() and self._values.device.type == "cpu":
            sizes = (stops - starts) * self._entry_nbytes
            copy_spans(out, np.cumsum(sizes) - sizes, as_bytes(self._values), starts * self._entry_nbytes, sizes, copy)
            return
        entries = int((stops - starts).sum())
        target = from_bytes(out, self._values.dtype, (entries, *self._values.shape[1:]))
        begin = 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            target[begin : begin + stop - start].copy_(self._values[start:stop])
            begin += stop - start


class RowsSource(Source):
    """One tensor per row, all of one dtype and rank."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        first = rows[0]
        name, size = dtype_name(first.dtype), first.element_size()
        self._tensors = [resolved(row) for row in rows]
        self._nbytes = np.array([row.numel() * size for row in rows], np.int64)
        self.rows = len(rows)
        if len({row.shape for row in rows}) == 1:
            self.layout, self.side = dense_layout(name, size, first.shape), None
        else:
            self.layout = ragged_layout(name, size, first.ndim)
            self.side = np.array([row.shape for row in rows], np.int64)

    def piece(self) -> Piece:
        return rows_piece(self._tensors)

    def nbytes_of(self, at: Positions) -> int:
        return int(self._nbytes[at].sum())

    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        begin = 0
        for number in range(self.rows)[at] if isinstance(at, slice) else at.tolist():
            row, nbytes = self._tensors[number], int(self._nbytes[number])
            if nbytes:
                from_bytes(out[begin : begin + nbytes], row.dtype, row.shape).copy_(row)
            begin += nbytes


class BytesSource(Source):
    """A column that is already bytes: encoded objects, or values that were stored before."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.layout, self.rows, self.side = piece.layout, piece.rows, piece.side

    def piece(self) -> Piece:
        return self._piece

    def _spans(self, at: Positions) -> tuple[IntArray, IntArray]:
        """(first, one past the last) byte of each run of rows."""
        starts, stops = runs(at)
        if self.layout.kind == "dense":
            return starts * self.layout.row_nbytes, stops * self.layout.row_nbytes
        return self._piece.bounds[starts], self._piece.bounds[stops]

    def nbytes_of(self, at: Positions) -> int:
        starts, stops = self._spans(at)
        return int((stops - starts).sum())

    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        starts, stops = self._spans(at)
        sizes = stops - starts
        copy_spans(out, np.cumsum(sizes) - sizes, self._piece.data, starts, sizes, copy)

    def stored_in(self, out: ByteArray, at: Positions, rows: int, copy: Copy) -> Piece:
        if self.layout.kind != "objects":
            return super().stored_in(out, at, rows, copy)
        self.copy_into(out, at, copy)
        return Piece(self.layout, rows, out, running_sum(np.diff(self._piece.bounds)[at]))


def jagged_source(tensor: Any) -> Source | None:
    """A column over a jagged tensor's values. None if they have holes or are ragged in a later dim."""
    if not is_simple_jagged(tensor):
        return None
    offsets, values = tensor.offsets().cpu().numpy(), jagged_values(tensor)
    if offsets[0] != 0 or offsets[-1] != len(values):
        values = values[offsets[0] : offsets[-1]]
    return TensorSource(values, (offsets - offsets[0]).astype(np.int64, copy=False))
