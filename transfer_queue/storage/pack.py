# SPDX-License-Identifier: Apache-2.0
"""Columns to bytes, in the client: a column is made from a batch, and written once, straight to where it belongs."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, is_tensor_collection

from transfer_queue.errors import InvalidRequestError, ProtocolError, UnsupportedValueError
from transfer_queue.storage.copying import Copy
from transfer_queue.storage.images import image_parts, is_image
from transfer_queue.storage.wire import (
    OBJECTS,
    PICKLE_SWITCH,
    ByteArray,
    Code,
    IntArray,
    Layout,
    WireColumn,
    dense_layout,
    ragged_layout,
)

Ext = msgspec.msgpack.Ext

_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))

# ---- batches ----


class GivenRows(dict[str, Any]):
    """What a put stores: columns of equally many rows. A list is a column of objects."""

    def __init__(self, columns: Iterable[tuple[str, Any]], batch_size: Sequence[int], data: TensorDict | None) -> None:
        """``data``: the batch that these columns were found in, each looked up once; None: there is no such batch.

        A TensorDict takes several microseconds per look, and more than one per object to be made.
        """
        super().__init__(columns)
        self.batch_size = tuple(batch_size)
        self._data = data

    @classmethod
    def of(cls, data: TensorDict) -> GivenRows:
        return cls(named_columns(data), data.batch_size, data)

    def as_tensordict(self, device: torch.device | None = None) -> TensorDict:
        """``device``: of a batch that is made."""
        if self._data is not None:
            return self._data
        columns = {name: NonTensorStack(*column) if type(column) is list else column for name, column in self.items()}
        return TensorDict(columns, batch_size=self.batch_size, device=device)


def num_rows(data: TensorDict | GivenRows) -> int:
    """Return the number of rows."""
    if not data.batch_size:
        raise InvalidRequestError("data has no batch dimension: build it with batch_size=[number of samples]")
    return int(data.batch_size[0])


def check_rows(data: TensorDict, indexes: Sized) -> None:
    """Raise InvalidRequestError unless there is one row per index."""
    if num_rows(data) != len(indexes):
        raise InvalidRequestError(
            f"put of {num_rows(data)} rows for {len(indexes)} samples: data and metadata must have the same number of "
            f"rows. Nothing was stored."
        )


def prepare(data: TensorDict | GivenRows, allow_pickle: bool = False) -> dict[str, Column]:
    """Return every column, ready to be written; nothing is copied yet.

    Raises:
        UnsupportedValueError: a column or value that can't be stored as configured.
        InvalidRequestError: the data has no batch dimension.
    """
    count = num_rows(data)
    prepared = {}
    for name, column in named_columns(data):
        prepared[str(name)] = prepare_column(name, column, count, allow_pickle)  # a numpy.str_ is no plain text
    return prepared


def pack(data: TensorDict, allow_pickle: bool = False) -> dict[str, WireColumn]:
    """Every column as one wire column; contiguous CPU tensors are not copied. Raises what ``prepare`` raises."""
    return {name: column.wire_column() for name, column in prepare(data, allow_pickle).items()}


def check_array(name: str, array: np.ndarray[Any, Any]) -> None:
    """Raise UnsupportedValueError for an array that is no column: it is masked, or no tensor has its dtype."""
    if np.ma.is_masked(array):
        raise UnsupportedValueError(
            f"field {name!r} is a masked array ({type(array).__name__} of {array.dtype}), and its mask would be lost. "
            f"Put array.filled(...), and the mask as a field of its own."
        )
    if array.dtype.kind == "V" or array.dtype.char in "gG":
        raise UnsupportedValueError(
            f"field {name!r} is an array of dtype {array.dtype}, which no tensor has. Cast it, make each of its parts "
            f"a field of its own, or put a list of objects."
        )


def values_of(column: Any, count: int) -> list[Any]:
    """Return the rows of a column that is not a tensor."""
    if isinstance(column, np.ndarray):
        # tolist() would strip the unit from dates and durations, and turn nanoseconds into plain numbers.
        return list(column) if column.dtype.kind in "OMm" else column.tolist()
    if not is_non_tensor(column):
        return list(column)
    if isinstance(column, NonTensorStack):
        return _of_plain_members(column) or column.tolist()
    shared = column.data
    return values_of(shared, count) if _has_rows(shared, count) else [shared] * count


_inner, _values, _size = map(operator.attrgetter, ("_tensordict", "_non_tensordict", "_batch_size"))
_value = operator.itemgetter("data")


def _of_plain_members(stack: NonTensorStack) -> list[Any] | None:
    """``stack.tolist()`` of single values, which takes four times as long; None if there are others."""
    members = stack.tensordicts
    if stack.stack_dim != 0 or set(map(type, members)) != {NonTensorData}:
        return None
    try:
        return list(map(_value, map(_values, members))) if not any(map(_size, map(_inner, members))) else None
    except (AttributeError, KeyError):  # these names are private to tensordict
        return None


def objects_of(name: str, column: Any, count: int) -> list[Any]:
    """``values_of`` for what a user gave. Raises UnsupportedValueError for a nested TensorDict."""
    if is_tensor_collection(column) and not is_non_tensor(column):
        raise UnsupportedValueError(
            f"field {name!r} is a nested TensorDict, and a field is one column. "
            f"Flatten it first: data.flatten_keys('.') makes each leaf a field of its own."
        )
    return values_of(column, count)


def _has_rows(shared: Any, count: int) -> bool:
    """Whether what TensorDict keeps as one value has one entry per row: a list, or an array of text, dates, objects."""
    if isinstance(shared, np.ndarray):
        return shared.dtype.kind in "OUSMm" and shared.ndim > 0 and len(shared) == count
    return isinstance(shared, list) and len(shared) == count


def named_columns(data: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        yield from data.items()
        return
    for name in data.keys():  # noqa: SIM118 (iterating a TensorDict gives rows)
        try:
            yield name, data.get(name)
        except RuntimeError:
            # A lazy stack with members of different shapes.
            yield name, [member.get(name) for member in data.unbind(0)]


def prepare_column(name: str, column: Any, count: int, allow_pickle: bool) -> Column:
    if isinstance(column, torch.Tensor):
        return _tensor_column(name, column)
    return _column_of_rows(name, objects_of(name, column, count), allow_pickle)


def _column_of_rows(name: str, rows: Sequence[Any], allow_pickle: bool) -> Column:
    return RowsColumn(rows) if are_alike(rows) else BytesColumn(encode_rows(rows, name, allow_pickle))


def _tensor_column(name: str, tensor: torch.Tensor) -> Column:
    if tensor.is_nested:
        return jagged_column(tensor) or _column_of_rows(name, tensor.unbind(), allow_pickle=False)
    if not is_plain(tensor):
        raise UnsupportedValueError(
            f"field {name!r} is a {'quantized' if tensor.is_quantized else tensor.layout} tensor; "
            f"make it dense first (.to_dense(), .dequantize())."
        )
    if tensor.is_meta:
        raise UnsupportedValueError(f"field {name!r} is on the meta device: it has a shape and no values to store.")
    return tensor_column(tensor)


class Column(ABC):
    """One column. ``row_meta``: see ``WireColumn``."""

    layout: Layout
    rows: int
    row_meta: IntArray | None

    @abstractmethod
    def wire_column(self) -> WireColumn:
        """Return the whole column as a wire column, sharing memory with the data if its layout allows."""

    @abstractmethod
    def nbytes_of(self, rows: slice) -> int:
        """Bytes of the values of these rows."""

    @abstractmethod
    def copy_into(self, out: ByteArray, rows: slice, copy: Copy) -> None:
        """Write these rows back to back with ``copy``; ``out`` has exactly their size."""

    def stored_in(self, out: ByteArray, rows: slice, copy: Copy) -> WireColumn:
        """Write these rows into ``out``, and return the wire column that describes them there."""
        self.copy_into(out, rows, copy)
        row_meta = None if self.row_meta is None else self.row_meta[rows]
        return WireColumn(self.layout, rows.stop - rows.start, out, row_meta)


class BytesColumn(Column):
    """A column that is already bytes: a tensor in one piece, encoded objects, or values that were stored before."""

    def __init__(self, wire: WireColumn) -> None:
        self._wire = wire
        self.layout, self.rows, self.row_meta = wire.layout, wire.rows, wire.row_meta

    def wire_column(self) -> WireColumn:
        return self._wire

    def nbytes_of(self, rows: slice) -> int:
        whole = rows.start == 0 and rows.stop == self.rows
        return self._wire.data.nbytes if whole else self._wire.slice(rows.start, rows.stop).data.nbytes

    def copy_into(self, out: ByteArray, rows: slice, copy: Copy) -> None:
        copy(out, self._wire.slice(rows.start, rows.stop).data)


class TensorColumn(Column):
    """A tensor that is strided, or on a device. Row i is ``values[i]``, or ``values[bounds[i] : bounds[i + 1]]``."""

    def __init__(
        self, values: torch.Tensor, bounds: IntArray | None, layout: Layout, rows: int, row_meta: IntArray | None
    ) -> None:
        self._values, self._bounds = values, bounds
        self.layout, self.rows, self.row_meta = layout, rows, row_meta

    def wire_column(self) -> WireColumn:
        return WireColumn(self.layout, self.rows, as_bytes(self._values), self.row_meta)

    def _of(self, rows: slice) -> torch.Tensor:
        if self._bounds is None:
            return self._values[rows]
        return self._values[int(self._bounds[rows.start]) : int(self._bounds[rows.stop])]

    def nbytes_of(self, rows: slice) -> int:
        return self._of(rows).nbytes

    def copy_into(self, out: ByteArray, rows: slice, copy: Copy) -> None:
        values = self._of(rows)
        from_bytes(out, values.dtype, values.shape).copy_(values)


class RowsColumn(Column):
    """One tensor per row, all of one dtype and rank: dense if all shapes agree, else ragged."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._tensors = [resolved(row) for row in rows]
        self.rows, first = len(rows), rows[0]
        name, size, self.row_meta = dtype_name(first.dtype), first.element_size(), None
        if len({row.shape for row in rows}) == 1:
            self.layout = dense_layout(name, size, first.shape)
        else:
            self.layout = ragged_layout(name, size, first.ndim)
            self.row_meta = np.array([row.shape for row in rows], np.int64)

    def wire_column(self) -> WireColumn:
        return WireColumn(self.layout, self.rows, np.concatenate(list(map(as_bytes, self._tensors))), self.row_meta)

    def nbytes_of(self, rows: slice) -> int:
        return sum(row.nbytes for row in self._tensors[rows])

    def copy_into(self, out: ByteArray, rows: slice, copy: Copy) -> None:
        begin = 0
        for row in self._tensors[rows]:
            if row.nbytes:
                from_bytes(out[begin : begin + row.nbytes], row.dtype, row.shape).copy_(row)
            begin += row.nbytes


def tensor_column(values: torch.Tensor, bounds: IntArray | None = None) -> Column:
    """Row i is ``values[i]``, or ``values[bounds[i] : bounds[i + 1]]`` if there are bounds."""
    values = resolved(values)
    name, size, shape = dtype_name(values.dtype), values.element_size(), tuple(values.shape)
    row_meta = edges = None
    if bounds is None:
        layout, rows = dense_layout(name, size, shape[1:]), shape[0]
    else:
        layout, rows = ragged_layout(name, size, values.ndim), len(bounds) - 1
        row_meta = np.empty((rows, values.ndim), np.int64)
        row_meta[:, 0] = np.diff(bounds)
        row_meta[:, 1:] = shape[1:]
        edges = bounds * (math.prod(shape[1:]) * size)
    if values.device.type == "cpu" and values.is_contiguous():
        return BytesColumn(WireColumn(layout, rows, as_bytes(values), row_meta, edges))
    return TensorColumn(values, bounds, layout, rows, row_meta)


def jagged_column(tensor: Any) -> Column | None:
    """A column over a jagged tensor's values. None if they have holes or are ragged in a later dim."""
    if not is_simple_jagged(tensor):
        return None
    offsets, values = tensor.offsets().cpu().numpy(), jagged_values(tensor)
    if offsets[0] != 0 or offsets[-1] != len(values):
        values = values[offsets[0] : offsets[-1]]
    return tensor_column(values, (offsets - offsets[0]).astype(np.int64, copy=False))


# ---- tensors ----


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {name!r}: the writer's is newer")
    return dtype


def is_plain(tensor: torch.Tensor) -> bool:
    """Return False for tensors that are not one block of elements: nested, sparse, quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """Return the elements in row-major order, sharing memory with a contiguous CPU tensor."""
    tensor = resolved(tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    try:
        return tensor.numpy().reshape(-1).view(np.uint8)  # three times as fast
    except TypeError:  # NumPy has no such dtype
        # A dim of size 1 may have any stride, with which there would be no view.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Detach the tensor, and apply lazy conjugation and negation."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor over this memory, which must be writable."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(tuple(shape))


def are_alike(values: Sequence[Any]) -> bool:
    """Return whether these are tensors of one dtype and rank (at least one), so that they can form a column."""
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return len({(row.dtype, row.ndim) for row in values}) == 1 and all(map(is_plain, values))


def is_simple_jagged(tensor: Any) -> bool:
    """Whether the tensor is ragged in its first dim and has no holes, so values and offsets describe it."""
    if not tensor.is_nested or tensor.layout != torch.jagged:
        return False
    # ``_ragged_idx`` has no public twin. Taking the wrong dim for the ragged one would mix up rows.
    return tensor.lengths() is None and bool(tensor._ragged_idx == 1)


def jagged_values(tensor: Any) -> torch.Tensor:
    """Return the detached values that the rows of a jagged tensor are cut from."""
    values = getattr(tensor, "_values", None)
    plain = type(values) is torch.Tensor
    return values.detach() if plain else tensor.values().detach()  # type: ignore[union-attr, no-any-return]


# ---- objects ----


def encode_rows(values: Sequence[Any], field: str, allow_pickle: bool = False) -> WireColumn:
    """Encode one row per value.

    Raises:
        UnsupportedValueError: a value, or something inside it, needs pickle, which ``allow_pickle`` forbids.
    """
    rows = _Encoder(field, allow_pickle).rows(values)
    sizes = np.array(list(map(len, rows)), np.int64).reshape(-1, 1)
    return WireColumn(OBJECTS, len(rows), np.frombuffer(b"".join(rows), np.uint8), sizes)


class _Encoder:
    def __init__(self, field: str, allow_pickle: bool, careful: bool = False) -> None:
        """``careful``: check each number and text, for a value that msgpack has refused."""
        self._field = field
        self._allow_pickle = allow_pickle
        self._pack = msgspec.msgpack.Encoder().encode
        self._careful = careful

    def rows(self, values: Sequence[Any]) -> list[bytes]:
        with contextlib.suppress(OverflowError, UnicodeEncodeError):
            if self._all_plain(values):
                return list(map(self._pack, values))
        return [self.row(value) for value in values]

    def row(self, value: Any) -> bytes:
        try:
            return self._pack(self._lowered(value))
        except (OverflowError, UnicodeEncodeError):
            if self._careful:
                raise
            return _Encoder(self._field, self._allow_pickle, careful=True).row(value)
        except RecursionError:
            raise UnsupportedValueError(
                f"field {self._field!r}: a {type(value).__name__} is nested too deep to be stored, or contains itself"
            ) from None

    def _ext(self, code: int, content: Any) -> Ext:
        return Ext(code, self._pack(self._lowered(content)))

    def _lowered(self, value: Any) -> Any:
        """Replace whatever msgpack does not know by extension types."""
        kind = type(value)
        if kind in _PLAIN:
            return self._checked(value) if self._careful else value
        if kind is list:
            return value if self._all_plain(value) else [self._lowered(item) for item in value]
        if kind is dict:
            return self._dict(value)
        lower = _LOWER.get(kind)
        if lower is not None:
            return lower(self, value)
        if isinstance(value, torch.Tensor) and is_plain(value):
            return self._ext(Code.TENSOR, [dtype_name(value.dtype), list(value.shape), as_bytes(value).tobytes()])
        if isinstance(value, np.generic):
            return self._array(np.asarray(value), Code.NUMPY_SCALAR)
        if is_image(value):
            return self._ext(Code.IMAGE, image_parts(value))
        return self._pickled(value)

    def _all_plain(self, values: Iterable[Any]) -> bool:
        return not self._careful and _PLAIN.issuperset(map(type, values))

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            return Ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if type(value) is str:
            raw = value.encode("utf-8", "surrogatepass")
            # Only lone surrogates change in a round trip.
            return value if raw.decode("utf-8", "replace") == value else Ext(Code.TEXT, raw)
        return value

    def _dict(self, value: dict[Any, Any]) -> Any:
        if any(type(key) is not str for key in value) or self._careful:
            return self._ext(Code.MAP, [item for pair in value.items() for item in pair])
        return value if self._all_plain(value.values()) else {key: self._lowered(item) for key, item in value.items()}

    def _array(self, array: np.ndarray[Any, Any], code: int = Code.ARRAY) -> Ext:
        if array.dtype == object:
            return self._ext(Code.OBJECT_ARRAY, [list(array.shape), list(array.flat)])
        described = None if array.dtype.hasobject else np.lib.format.dtype_to_descr(array.dtype)
        # Types of other packages (bfloat16 of ml_dtypes) describe themselves as raw bytes.
        if described is None or np.lib.format.descr_to_dtype(described) != array.dtype:
            return self._pickled(array)
        return self._ext(code, [described, list(array.shape), array.tobytes()])

    def _pickled(self, value: Any) -> Ext:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if not self._allow_pickle:
            raise UnsupportedValueError(
                f"field {self._field!r}: a value of type {kind} can't be stored without pickle. Convert it to numbers, "
                f"text, bytes, lists, tuples, sets, dicts, NumPy arrays or tensors; or, if every writer can be "
                f"trusted, set {PICKLE_SWITCH}."
            )
        try:
            return Ext(Code.PICKLE, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UnsupportedValueError(
                f"field {self._field!r}: a value of type {kind} can't be pickled: {error}"
            ) from error


_LOWER: dict[type, Callable[[_Encoder, Any], Any]] = {
    tuple: lambda encoder, value: encoder._ext(Code.TUPLE, list(value)),
    set: lambda encoder, value: encoder._ext(Code.SET, list(value)),
    frozenset: lambda encoder, value: encoder._ext(Code.FROZENSET, list(value)),
    complex: lambda encoder, value: encoder._ext(Code.COMPLEX, [value.real, value.imag]),
    bytearray: lambda encoder, value: Ext(Code.BYTEARRAY, bytes(value)),
    np.ndarray: lambda encoder, value: encoder._array(value),
    np.memmap: lambda encoder, value: encoder._array(value),
}
