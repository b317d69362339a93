# SPDX-License-Identifier: Apache-2.0
"""Bytes to batches, in the client: from the wire columns of a read, or from what a put's data_parser returns."""

from __future__ import annotations

import asyncio
import functools
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from transfer_queue.errors import ConfigError, InvalidRequestError, ProtocolError, UnsupportedValueError
from transfer_queue.storage import recycling
from transfer_queue.storage.copying import Copies, Copy, copy_now
from transfer_queue.storage.images import image_of
from transfer_queue.storage.pack import (
    GivenRows,
    RowsColumn,
    are_alike,
    check_array,
    dtype_of,
    from_bytes,
    named_columns,
    num_rows,
    prepare_column,
    values_of,
)
from transfer_queue.storage.unpack_fast import Jagged, batch, object_column
from transfer_queue.storage.wire import (
    OBJECTS,
    PICKLE_SWITCH,
    ByteArray,
    Code,
    PlacedColumns,
    WireColumn,
    join,
    running_sum,
)
from transfer_queue.transport.blocking import is_blocking
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)

DataParser: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

_TOGETHER_NBYTES = 1024 * 1024
"""Up to this size, all rows are copied and decoded in one call."""

LAYOUTS = ("jagged", "dense")


def unpack(
    placed: Mapping[str, PlacedColumns], count: int, layout: str = "jagged", allow_pickle: bool = False
) -> TensorDict:
    """Make one batch of ``count`` rows in fresh memory, columns sorted by name.

    Args:
        placed: Per field, wire columns with the rows of the batch that they fill; each row exactly once.
        layout: "jagged": every tensor column is nested, unless its rows are 0-dim. "dense": only where shapes differ.
    """
    check_layout(layout)
    options = _Options(layout, Jagged(), Copies())
    columns = {name: _column(name, placed[name], count, allow_pickle, options) for name in sorted(placed)}
    options.finish()
    return batch(columns, count)


def relaid(data: TensorDict, layout: str, dtypes: Mapping[str, torch.dtype]) -> TensorDict:
    """Return the same batch with its tensor columns in this layout and its columns sorted by name.

    ``dtypes``: what columns are cast to whose rows have several.
    """
    check_layout(layout)
    count, columns, options = num_rows(data), {}, _Options(layout, Jagged())
    for name, column in sorted(named_columns(data)):
        if name in dtypes:
            column = _of_values([row.to(dtypes[name]) for row in values_of(column, count)], options)
        elif (
            isinstance(column, torch.Tensor)
            and count
            and (column.is_nested or (layout == "jagged" and column.ndim > 1))
        ):
            column = _of_wire(prepare_column(name, column, count, False).wire_column(), options)
        columns[name] = column
    return batch(columns, count)


def from_rows(rows: Mapping[str, Sequence[Any]], count: int, layout: str) -> TensorDict:
    """Make one batch from one value per row and field, in fresh memory, columns sorted by name."""
    options = _Options(layout, Jagged())
    return batch({name: _of_values(values, options) for name, values in sorted(rows.items())}, count)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}")


class _Options(NamedTuple):
    """How the columns of one batch are made."""

    layout: str
    jagged: Jagged
    copy: Copy = copy_now

    def shaped(self, made: WireColumn) -> Any:
        """Make the most regular tensor that these contiguous rows allow."""
        out, dtype, shapes = made.data, dtype_of(made.layout.dtype), made.row_meta
        assert shapes is not None
        if self.layout == "jagged" and shapes.shape[1] == 1:
            flat = from_bytes(out, dtype, (out.nbytes // dtype.itemsize,))
            return self.jagged(flat, made.bounds // dtype.itemsize, made.extremes)
        same = (shapes == shapes[0]).all(axis=0)
        if self.layout == "dense" and same.all():
            return from_bytes(out, dtype, shapes.shape[:1] + tuple(shapes[0].tolist()))
        if same[1:].all():
            lengths = shapes[:, 0]
            values = from_bytes(out, dtype, (int(lengths.sum()), *shapes[0, 1:].tolist()))
            return self.jagged(values, running_sum(lengths))
        self.finish()  # torch repacks the rows
        rows = [
            from_bytes(out[start:stop], dtype, shape)
            for (start, stop), shape in zip(pairwise(made.bounds.tolist()), shapes.tolist(), strict=True)
        ]
        return _strided(rows)

    def finish(self) -> None:
        """Make all copies."""
        if isinstance(self.copy, Copies):
            self.copy.finish()


def _of_wire(wire: WireColumn, options: _Options) -> Any:
    return _column("", [(slice(0, wire.rows), wire)], wire.rows, False, options)


def _column(name: str, placed: PlacedColumns, count: int, allow_pickle: bool, options: _Options) -> Any:
    rows = sum(wire.rows for _, wire in placed)
    if rows != count:
        raise ProtocolError(f"storage answered {rows} rows of field {name!r}, {count} were asked for")
    first = placed[0][1].layout
    if first.kind == "dense" and (len(placed) == 1 or all(wire.layout == first for _, wire in placed)):
        made, dtype = join(placed, count, first, recycling.empty, options.copy), dtype_of(first.dtype)
        if options.layout == "dense" or not first.shape:
            return from_bytes(made.data, dtype, (count, *first.shape))
        flat = from_bytes(made.data, dtype, (count * first.shape[0], *first.shape[1:]))
        return options.jagged.even(flat, count, first.shape[0])
    if first.kind != "objects" and len({wire.layout.family for _, wire in placed}) == 1:
        return options.shaped(join(placed, count, first.family, recycling.empty, options.copy))
    values = values_in(placed, count, name, allow_pickle)
    if first.kind != "objects":
        dims = {value.dim() for value in values if isinstance(value, torch.Tensor)}
        if len(dims) > 1:
            _warn_of_dims_once(name, *sorted(dims))
    return _of_values(values, options)


@functools.cache
def _warn_of_dims_once(name: str, *dims: int) -> None:
    _log.warning(
        "samples of field %r have tensors of %s dimensions, so a batch of both has them as objects, not as one tensor. "
        "Put all with the same number of dimensions: shape [rows, 1], say, not [rows].",
        name, " and ".join(map(str, dims)),
    )  # fmt: skip


def values_in(placed: PlacedColumns, count: int, field: str, allow_pickle: bool = False) -> list[Any]:
    """One value per row, of columns of any layouts. Raises what ``decode_rows`` raises."""
    values: list[Any] = [None] * count
    for positions, wire in placed:
        where = range(count)[positions] if isinstance(positions, slice) else positions.tolist()
        decoded = decode_rows(wire, field, allow_pickle) if wire.layout == OBJECTS else rows_of(wire)
        for position, value in zip(where, decoded, strict=True):
            values[position] = value
    return values


def _of_values(values: Sequence[Any], options: _Options) -> Any:
    """Make a column from one value per row: tensors of one dtype and rank are joined, anything else stays objects."""
    if are_alike(values):
        return _of_wire(RowsColumn(values).wire_column(), options._replace(copy=copy_now))
    if any(map(is_tensor_collection, set(map(type, values)))):
        # NonTensorStack would take a TensorDict for one of its own members.
        return NonTensorStack(*(NonTensorData(data=value) for value in values))
    return object_column(values)


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


def rows_of(column: WireColumn) -> list[torch.Tensor]:
    """Return one tensor per row of a dense or ragged wire column, each in memory of its own."""
    starts, shapes, dtype = column.starts, column.as_ragged().row_meta, dtype_of(column.layout.dtype)
    assert shapes is not None
    return [
        from_bytes(column.data[start:stop].copy(), dtype, shape)
        for start, stop, shape in zip(starts.tolist(), (starts + column.sizes).tolist(), shapes.tolist(), strict=True)
    ]


# ---- what a data_parser returns ----


async def parsed_rows(rows: TensorDict | GivenRows, parser: DataParser) -> TensorDict:
    """Apply a put's data_parser. It may take long, so an event loop lets a thread run it."""
    return parsed(rows, parser) if is_blocking() else await asyncio.to_thread(parsed, rows, parser)


def parsed(data: TensorDict | GivenRows, parser: DataParser) -> TensorDict:
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
    if isinstance(column, np.ndarray):
        check_array(name, column)
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
    if isinstance(column, torch.Tensor):
        return column
    return _of_values(values_of(column, len(column)), _Options("jagged", Jagged()))


# ---- objects ----


def decode_rows(column: WireColumn, field: str, allow_pickle: bool = False) -> list[Any]:
    """Decode the values; the caller owns each of them.

    Raises:
        UnsupportedValueError: a value was pickled and ``allow_pickle`` is off; none of its code has run.
    """
    decode = _decoder(field, allow_pickle)
    payload = column.data.data
    try:
        if payload.nbytes <= _TOGETHER_NBYTES:
            values: list[Any] = decode(b"\xdd" + column.rows.to_bytes(4, "big") + payload)  # as one msgpack array
            return values
        edges = column.bounds.tolist()
        return [decode(payload[start:stop]) for start, stop in pairwise(edges)]
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a value of field {field!r} can't be decoded: {error}") from error


def decode_value(data: ByteArray, field: str, allow_pickle: bool = False) -> Any:
    """Decode one row. Raises what ``decode_rows`` raises."""
    return decode_rows(WireColumn(OBJECTS, 1, data, np.array([[len(data)]])), field, allow_pickle)[0]


@functools.lru_cache(1024)
def _decoder(field: str, allow_pickle: bool) -> Callable[[Any], Any]:
    # Cached, because it and its decoder form a cycle, which would leave garbage on every get.
    def ext(code: int, data: memoryview) -> Any:
        if code == Code.PICKLE:
            return _unpickled(data, field, allow_pickle)
        if (raised := _RAW.get(code)) is not None:
            return raised(data)
        if (built := _BUILD.get(code)) is not None:
            return built(decode(data))
        raise ProtocolError(f"field {field!r}: unknown kind of value {code}: the writer is newer than this reader")

    decode = msgspec.msgpack.Decoder(ext_hook=ext).decode
    return decode


def _unpickled(data: memoryview, field: str, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise UnsupportedValueError(
            f"field {field!r} holds a pickled value, and this process' configuration forbids to unpickle it. "
            f"If every writer can be trusted, set {PICKLE_SWITCH}."
        )
    return pickle.loads(data)


def _array_of(described: Any, shape: Sequence[int], data: bytes) -> np.ndarray[Any, Any]:
    dtype = np.lib.format.descr_to_dtype(described)
    return np.ndarray(tuple(shape), dtype, buffer=bytearray(data)) if data else np.empty(tuple(shape), dtype)


def _object_array_of(shape: Sequence[int], items: Sequence[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(tuple(shape))


def _tensor_of(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    return from_bytes(np.frombuffer(bytearray(data), np.uint8), dtype_of(dtype), shape)


_RAW: dict[int, Callable[[memoryview], Any]] = {
    Code.BIG_INT: lambda data: int.from_bytes(data, "little", signed=True),
    Code.TEXT: lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    Code.BYTEARRAY: bytearray,
}
_BUILD: dict[int, Callable[[Any], Any]] = {
    Code.TUPLE: tuple,
    Code.SET: set,
    Code.FROZENSET: frozenset,
    Code.MAP: lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    Code.COMPLEX: lambda parts: complex(*parts),
    Code.ARRAY: lambda content: _array_of(*content),
    Code.NUMPY_SCALAR: lambda content: _array_of(*content)[()],
    Code.OBJECT_ARRAY: lambda content: _object_array_of(*content),
    Code.TENSOR: lambda content: _tensor_of(*content),
    Code.IMAGE: lambda content: image_of(*content),
}
