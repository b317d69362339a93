# SPDX-License-Identifier: Apache-2.0
"""Builds batches: from the wire columns of a read, or from what a put's data_parser returns. Runs in clients only."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from transfer_queue.errors import ConfigError, InvalidRequestError, ProtocolError
from transfer_queue.storage import recycling
from transfer_queue.storage.assembling import Jagged, batch, object_column
from transfer_queue.storage.base import DataParser
from transfer_queue.storage.columns import column_in_memory, named_columns, num_rows, values_of
from transfer_queue.storage.copying import AT_ONCE, Copies, Copy, copy_rows, copy_spans
from transfer_queue.storage.objects import decode_rows
from transfer_queue.storage.tensors import (
    are_alike,
    dtype_of,
    from_bytes,
    rows_of,
    rows_piece,
)
from transfer_queue.storage.wire_columns import OBJECTS, ByteArray, IntArray, Piece, Positions, running_sum

Parts = Sequence[tuple[Positions, Piece]]
LAYOUTS = ("jagged", "dense")


def unpack(parts: Mapping[str, Parts], count: int, layout: str = "jagged", allow_pickle: bool = False) -> TensorDict:
    """Make one batch of ``count`` rows in fresh memory, columns sorted by name.

    Args:
        parts: Per field, wire columns with the rows of the batch that they fill; each row exactly once.
        layout: "jagged": every tensor column is nested, unless its rows are 0-dim. "dense": only where shapes differ.
    """
    check_layout(layout)
    copies = Copies()
    way = _Way(layout, Jagged(), copies)
    columns = {name: _column(name, parts[name], count, allow_pickle, way) for name in sorted(parts)}
    copies.finish()
    return batch(columns, count)


def relaid(data: TensorDict, layout: str) -> TensorDict:
    """Return the same batch with its tensor columns in this layout and its columns sorted by name."""
    check_layout(layout)
    count, columns, way = num_rows(data), {}, _Way(layout, Jagged())
    for name, column in sorted(named_columns(data)):
        if (
            isinstance(column, torch.Tensor)
            and count
            and (column.is_nested or (layout == "jagged" and column.ndim > 1))
        ):
            column = _of_piece(column_in_memory(name, column, count, False).piece(), way)
        columns[name] = column
    return batch(columns, count)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}")


def column_of(values: Sequence[Any]) -> Any:
    """Make a column from one value per row: tensors of one dtype and rank are joined, anything else stays objects."""
    if are_alike(values):
        return _of_piece(rows_piece(values), _Way("jagged", Jagged()))
    if any(map(is_tensor_collection, set(map(type, values)))):
        # NonTensorStack would take a TensorDict for one of its own members.
        return NonTensorStack(*(NonTensorData(data=value) for value in values))
    return object_column(values)


class _Way(NamedTuple):
    """How the columns of one batch are made."""

    layout: str
    jagged: Jagged
    copy: Copy = AT_ONCE


def _of_piece(piece: Piece, way: _Way) -> Any:
    return _column("", [(slice(0, piece.rows), piece)], piece.rows, False, way)


def _column(name: str, parts: Parts, count: int, allow_pickle: bool, way: _Way) -> Any:
    rows = sum(piece.rows for _, piece in parts)
    if rows != count:
        raise ProtocolError(f"storage answered {rows} rows of field {name!r}, {count} were asked for")
    first = parts[0][1].layout
    if first.kind == "dense" and (len(parts) == 1 or all(piece.layout == first for _, piece in parts)):
        shape = (count, *first.shape)
        if way.layout == "dense" or not first.shape:
            return _dense(parts, shape, way)
        return way.jagged.even(_dense(parts, (count * shape[1], *shape[2:]), way), count, shape[1])
    if first.kind != "objects" and len({piece.layout.family for _, piece in parts}) == 1:
        return _ragged(parts, count, way)
    values: list[Any] = [None] * count
    for positions, piece in parts:
        where = range(count)[positions] if isinstance(positions, slice) else positions.tolist()
        decoded = decode_rows(piece, name, allow_pickle) if piece.layout == OBJECTS else rows_of(piece)
        for position, value in zip(where, decoded, strict=True):
            values[position] = value
    return _of_values(values, way)


def _of_values(values: Sequence[Any], way: _Way) -> Any:
    column = column_of(values)
    if way.layout == "dense" and isinstance(column, torch.Tensor) and column.is_nested:
        return _of_piece(rows_piece(values), way._replace(copy=AT_ONCE))
    return column


def _dense(parts: Parts, shape: Sequence[int], way: _Way) -> torch.Tensor:
    layout, row_nbytes = parts[0][1].layout, parts[0][1].layout.row_nbytes
    out = recycling.empty(math.prod(shape) * layout.itemsize)
    for positions, piece in parts if out.nbytes else ():
        copy_rows(out, positions, piece.data, piece.picks, row_nbytes, way.copy)
    return from_bytes(out, dtype_of(layout.dtype), shape)


def _ragged(parts: Parts, count: int, way: _Way) -> Any:
    piece = parts[0][1]
    first = piece.layout
    if len(parts) == 1 and (whole := _whole(parts, count, way)) is not None:
        return _shaped(whole, dtype_of(first.dtype), _shapes_of(piece), piece.bounds, way, piece.extremes)
    shapes = np.empty((count, len(first.shape)), np.int64)
    ragged = [(positions, piece.as_ragged()) for positions, piece in parts]
    for positions, piece in ragged:
        assert piece.side is not None
        shapes[positions] = piece.side
    sizes = shapes.prod(axis=1) * first.itemsize
    bounds = running_sum(sizes)
    out = recycling.empty(int(bounds[-1]))
    # torch repacks rows that are irregular in other dims, so their copy must be finished by then.
    by = way.copy if (shapes[:, 1:] == shapes[0, 1:]).all() else AT_ONCE
    for positions, piece in ragged:
        copy_spans(out, bounds[:-1][positions], piece.data, piece.starts, sizes[positions], by)
    return _shaped(out, dtype_of(first.dtype), shapes, bounds, way)


def _whole(parts: Parts, count: int, way: _Way) -> ByteArray | None:
    """Copy a batch that one wire column holds in its order; None if rows must be selected or reordered."""
    positions, piece = parts[0]
    in_order = isinstance(positions, slice) and positions == slice(0, count)
    if piece.layout.kind != "ragged" or piece.picks is not None or not in_order:
        return None
    out = recycling.empty(piece.data.nbytes)
    # torch repacks rows that are irregular in other dims, so their copy must be finished by then.
    shapes = _shapes_of(piece)
    (way.copy if shapes.shape[1] < 2 or (shapes[:, 1:] == shapes[0, 1:]).all() else AT_ONCE)(out, piece.data)
    return out


def _shapes_of(piece: Piece) -> IntArray:
    assert piece.side is not None
    return piece.side


def _shaped(
    out: Any,
    dtype: torch.dtype,
    shapes: IntArray,
    bounds: IntArray,
    way: _Way,
    extremes: tuple[int, int] | None = None,
) -> Any:
    """Make the most regular tensor that these contiguous rows allow. ``extremes``: of ``shapes``, if known."""
    if way.layout == "jagged" and shapes.shape[1] == 1:
        flat = from_bytes(out, dtype, (int(bounds[-1]) // dtype.itemsize,))
        return way.jagged(flat, bounds // dtype.itemsize, extremes)
    same = (shapes == shapes[0]).all(axis=0)
    if way.layout == "dense" and same.all():
        return from_bytes(out, dtype, shapes.shape[:1] + tuple(shapes[0].tolist()))
    if same[1:].all():
        lengths = shapes[:, 0]
        values = from_bytes(out, dtype, (int(lengths.sum()), *shapes[0, 1:].tolist()))
        return way.jagged(values, running_sum(lengths))
    edges = bounds.tolist()
    rows = [
        from_bytes(out[start:stop], dtype, shape)
        for (start, stop), shape in zip(pairwise(edges), shapes.tolist(), strict=True)
    ]
    return _strided(rows)


def _strided(rows: Sequence[torch.Tensor]) -> Any:
    _warn_of_nested_tensors_once()
    try:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
    except RuntimeError:
        # Not implemented for this dtype (float8, uint16, …).
        return NonTensorStack(*rows)


@functools.cache
def _warn_of_nested_tensors_once() -> None:
    # torch warns once per process that nested tensors are a prototype; users can't act on it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.nested.as_nested_tensor([torch.zeros(1)], layout=torch.strided)


def parsed(data: TensorDict, parser: DataParser) -> TensorDict:
    """Apply ``parser`` to ``data``. Dense columns are passed as one tensor, nested and object columns as lists.

    Raises:
        RuntimeError: the parser isn't callable, raised, or returned other fields or another number of rows.
    """
    if not callable(parser):
        raise InvalidRequestError(f"data_parser is not callable: it is a {type(parser).__name__}")
    count = num_rows(data)
    given = {name: _plain(column, count) for name, column in named_columns(data)}
    names = sorted(given)
    try:
        made = parser(given)
    except Exception as error:  # user code may raise anything, and the error must name it
        raise InvalidRequestError(f"data_parser raised {type(error).__name__}: {error}. Nothing was stored.") from error
    if not isinstance(made, dict):
        raise InvalidRequestError(f"data_parser returned a {type(made).__name__}, not a dict. Nothing was stored.")
    if sorted(made, key=str) != names:
        raise InvalidRequestError(
            f"data_parser changed the fields from {names} to {sorted(made, key=str)}: it must return the same keys. "
            f"Nothing was stored."
        )
    for name, column in made.items():
        _check_count(name, column, count)
    return TensorDict({name: _returned(column) for name, column in made.items()}, batch_size=[count])


def _plain(column: Any, count: int) -> Any:
    if isinstance(column, torch.Tensor):
        return list(column.unbind()) if column.is_nested else column
    return values_of(column, count)


def _check_count(name: str, column: Any, count: int) -> None:
    sized = isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim > 0
    rows = len(column) if sized or isinstance(column, (list, tuple)) else None
    if isinstance(column, torch.Tensor) and column.is_nested:
        rows = column.size(0)
    if rows != count:
        raise InvalidRequestError(
            f"data_parser changed the count of field {name!r}: {count} rows went in, "
            f"{'a ' + type(column).__name__ if rows is None else rows} came out. Nothing was stored."
        )


def _returned(column: Any) -> Any:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
        return torch.from_numpy(column)
    return column if isinstance(column, torch.Tensor) else column_of(values_of(column, len(column)))
