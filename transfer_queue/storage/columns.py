# SPDX-License-Identifier: Apache-2.0
"""Columns in memory: made from a TensorDict, and written once, straight from the tensor to their destination."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, is_non_tensor, is_tensor_collection

from transfer_queue.errors import InvalidRequestError, UnsupportedValueError
from transfer_queue.storage.assembling import is_simple_jagged, jagged_values
from transfer_queue.storage.base import DataParser
from transfer_queue.storage.copying import Copy, copy_spans, runs
from transfer_queue.storage.objects import encode_rows
from transfer_queue.storage.tensors import (
    are_alike,
    as_bytes,
    dtype_name,
    from_bytes,
    is_plain,
    join_rows,
    resolved,
)
from transfer_queue.storage.wire_columns import (
    ByteArray,
    IntArray,
    Layout,
    Positions,
    WireColumn,
    count_of,
    dense_layout,
    ragged_layout,
    running_sum,
)
from transfer_queue.transport.modes import is_blocking


def num_rows(data: Any) -> int:
    """Return the number of rows of a TensorDict or a dict of columns."""
    if is_tensor_collection(data):
        if not data.batch_size:
            raise InvalidRequestError("data has no batch dimension: build it with batch_size=[number of samples]")
        return int(data.batch_size[0])
    return max((len(column) for column in data.values()), default=0)


def check_rows(data: Any, indexes: Sized) -> None:
    """Raise InvalidRequestError unless there is one row per index."""
    if num_rows(data) != len(indexes):
        raise InvalidRequestError(
            f"put of {num_rows(data)} rows for {len(indexes)} samples: data and metadata must have the same number of "
            f"rows. Nothing was stored."
        )


def prepare(data: Any, allow_pickle: bool = False) -> dict[str, Column]:
    """Return every column of a TensorDict (or dict of columns), ready to be written; nothing is copied yet.

    Raises:
        UnsupportedValueError: a column or value that can't be stored as configured.
        InvalidRequestError: a column has another number of rows than the rest.
    """
    count = num_rows(data)
    found = {name: prepare_column(name, column, count, allow_pickle) for name, column in named_columns(data)}
    for name, column in found.items():
        if column.rows != count:
            raise InvalidRequestError(f"field {name!r} has {column.rows} rows, the batch has {count}")
    return found


def pack(data: Any, allow_pickle: bool = False) -> dict[str, WireColumn]:
    """Every column as one wire column; contiguous CPU tensors are not copied. Raises what ``prepare`` raises."""
    return {name: column.wire_column() for name, column in prepare(data, allow_pickle).items()}


def values_of(column: Any, count: int) -> list[Any]:
    """Return the rows of a column that is not a tensor."""
    if isinstance(column, np.ndarray):
        # tolist() would strip the unit from dates and durations, and turn nanoseconds into plain numbers.
        return list(column) if column.dtype.kind in "OMm" else column.tolist()
    if not is_non_tensor(column):
        return list(column)
    if isinstance(column, NonTensorStack):
        return column.tolist()
    shared = column.data
    return values_of(shared, count) if _has_rows(shared, count) else [shared] * count


def _has_rows(shared: Any, count: int) -> bool:
    """Whether what TensorDict keeps as one value has one entry per row: a list, or an array of text, dates, objects."""
    if isinstance(shared, np.ndarray):
        return shared.dtype.kind in "OUSMm" and shared.ndim > 0 and len(shared) == count
    return isinstance(shared, list) and len(shared) == count


async def parsed_rows(rows: TensorDict, parser: DataParser | None) -> TensorDict:
    """Apply a put's data_parser, if there is one. It may take long, so an event loop lets a thread run it."""
    if parser is None:
        return rows
    from transfer_queue.storage.batches import parsed

    return parsed(rows, parser) if is_blocking() else await asyncio.to_thread(parsed, rows, parser)


def named_columns(data: Any) -> Iterator[tuple[str, Any]]:
    if not is_tensor_collection(data):
        yield from data.items()
        return
    for name in data.keys():  # noqa: SIM118 (iterating a TensorDict gives rows)
        try:
            yield name, data.get(name)
        except RuntimeError:
            # A lazy stack with members of different shapes.
            yield name, [member.get(name) for member in data.unbind(0)]


def prepare_column(name: str, column: Any, count: int, allow_pickle: bool) -> Column:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
        column = torch.from_numpy(column)
    if isinstance(column, torch.Tensor):
        return _tensor_column(name, column)
    if is_tensor_collection(column) and not is_non_tensor(column):
        raise UnsupportedValueError(
            f"field {name!r} is a nested TensorDict, and a field is one column. "
            f"Flatten it first: data.flatten_keys('.') makes each leaf a field of its own."
        )
    values = values_of(column, count)
    return RowsColumn(values) if are_alike(values) else BytesColumn(encode_rows(values, name, allow_pickle))


def _tensor_column(name: str, tensor: torch.Tensor) -> Column:
    if tensor.is_nested:
        column = jagged_column(tensor)
        if column is None:
            rows = tensor.unbind()
            column = RowsColumn(rows) if are_alike(rows) else BytesColumn(encode_rows(rows, name))
        return column
    if not is_plain(tensor):
        raise UnsupportedValueError(
            f"field {name!r} is a {'quantized' if tensor.is_quantized else tensor.layout} tensor; "
            f"make it dense first (.to_dense(), .dequantize())."
        )
    if tensor.is_meta:
        raise UnsupportedValueError(f"field {name!r} is on the meta device: it has a shape and no values to store.")
    if tensor.ndim == 0:
        raise InvalidRequestError(f"field {name!r} is a single number: a column needs one entry per sample")
    return TensorColumn(tensor)


class Column(ABC):
    """One column. ``row_meta`` is [rows, ndim] shapes for ragged columns, [rows + 1] offsets for objects, else None."""

    layout: Layout
    rows: int
    row_meta: IntArray | None

    @abstractmethod
    def wire_column(self) -> WireColumn:
        """Return the whole column as a wire column, sharing memory with the data if its layout allows."""

    @abstractmethod
    def nbytes_of(self, at: Positions) -> int:
        """Bytes of the values of these rows."""

    @abstractmethod
    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        """Write these rows back to back with ``copy``; ``out`` has exactly their size."""

    def stored_in(self, out: ByteArray, at: Positions, rows: int, copy: Copy) -> WireColumn:
        """Write these rows into ``out``, and return the wire column that describes them there."""
        self.copy_into(out, at, copy)
        return WireColumn(self.layout, rows, out, None if self.row_meta is None else self.row_meta[at])


class TensorColumn(Column):
    """Row i is ``values[i]``, or ``values[bounds[i] : bounds[i + 1]]`` if there are bounds."""

    def __init__(self, values: torch.Tensor, bounds: IntArray | None = None) -> None:
        self._values = resolved(values)
        self._bounds = bounds
        name, size, shape = dtype_name(values.dtype), values.element_size(), tuple(values.shape)
        self._entry_nbytes = math.prod(shape[1:]) * size
        if bounds is None:
            self.layout, self.rows, self.row_meta = dense_layout(name, size, shape[1:]), shape[0], None
        else:
            self.layout, self.rows = ragged_layout(name, size, values.ndim), len(bounds) - 1
            self.row_meta = np.empty((self.rows, values.ndim), np.int64)
            self.row_meta[:, 0] = np.diff(bounds)
            self.row_meta[:, 1:] = shape[1:]

    def wire_column(self) -> WireColumn:
        return WireColumn(self.layout, self.rows, as_bytes(self._values), self.row_meta)

    def nbytes_of(self, at: Positions) -> int:
        if self._bounds is None:
            entries = count_of(at)
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


class RowsColumn(Column):
    """One tensor per row, all of one dtype and rank."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        first = rows[0]
        name, size = dtype_name(first.dtype), first.element_size()
        self._tensors = [resolved(row) for row in rows]
        self._nbytes = np.array([row.numel() * size for row in rows], np.int64)
        self.rows = len(rows)
        if len({row.shape for row in rows}) == 1:
            self.layout, self.row_meta = dense_layout(name, size, first.shape), None
        else:
            self.layout = ragged_layout(name, size, first.ndim)
            self.row_meta = np.array([row.shape for row in rows], np.int64)

    def wire_column(self) -> WireColumn:
        return join_rows(self._tensors)

    def nbytes_of(self, at: Positions) -> int:
        return int(self._nbytes[at].sum())

    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        begin = 0
        for number in range(self.rows)[at] if isinstance(at, slice) else at.tolist():
            row, nbytes = self._tensors[number], int(self._nbytes[number])
            if nbytes:
                from_bytes(out[begin : begin + nbytes], row.dtype, row.shape).copy_(row)
            begin += nbytes


class BytesColumn(Column):
    """A column that is already bytes: encoded objects, or values that were stored before."""

    def __init__(self, wire: WireColumn) -> None:
        self._wire = wire
        self.layout, self.rows, self.row_meta = wire.layout, wire.rows, wire.row_meta

    def wire_column(self) -> WireColumn:
        return self._wire

    def _spans(self, at: Positions) -> tuple[IntArray, IntArray]:
        """(first, one past the last) byte of each run of rows."""
        starts, stops = runs(at)
        if self.layout.kind == "dense":
            return starts * self.layout.row_nbytes, stops * self.layout.row_nbytes
        return self._wire.bounds[starts], self._wire.bounds[stops]

    def nbytes_of(self, at: Positions) -> int:
        starts, stops = self._spans(at)
        return int((stops - starts).sum())

    def copy_into(self, out: ByteArray, at: Positions, copy: Copy) -> None:
        starts, stops = self._spans(at)
        sizes = stops - starts
        copy_spans(out, np.cumsum(sizes) - sizes, self._wire.data, starts, sizes, copy)

    def stored_in(self, out: ByteArray, at: Positions, rows: int, copy: Copy) -> WireColumn:
        if self.layout.kind != "objects":
            return super().stored_in(out, at, rows, copy)
        self.copy_into(out, at, copy)
        return WireColumn(self.layout, rows, out, running_sum(np.diff(self._wire.bounds)[at]))


def jagged_column(tensor: Any) -> Column | None:
    """A column over a jagged tensor's values. None if they have holes or are ragged in a later dim."""
    if not is_simple_jagged(tensor):
        return None
    offsets, values = tensor.offsets().cpu().numpy(), jagged_values(tensor)
    if offsets[0] != 0 or offsets[-1] != len(values):
        values = values[offsets[0] : offsets[-1]]
    return TensorColumn(values, (offsets - offsets[0]).astype(np.int64, copy=False))
