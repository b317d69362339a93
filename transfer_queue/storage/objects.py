# SPDX-License-Identifier: Apache-2.0
"""Encodes plain Python objects as msgpack, with extension types so that every value keeps its type."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch

from transfer_queue.errors import ProtocolError, UnsupportedValueError
from transfer_queue.storage.images import image_of, image_parts, is_image
from transfer_queue.storage.tensors import as_bytes, dtype_name, dtype_of, from_bytes, is_plain
from transfer_queue.storage.wire_columns import OBJECTS, WireColumn, running_sum

Ext = msgspec.msgpack.Ext

# Extension codes. Stores and checkpoints contain them: add new ones, never renumber.
_TUPLE, _SET, _FROZENSET, _MAP, _COMPLEX, _BIG_INT, _TEXT, _BYTEARRAY = range(1, 9)
_ARRAY, _NUMPY_SCALAR, _OBJECT_ARRAY, _TENSOR, _IMAGE = range(9, 14)
_PICKLE = 100

_TOGETHER_NBYTES = 1024 * 1024
"""Up to this size, all rows are copied and decoded in one call."""

_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
_SWITCH = "backend.SimpleStorage.allow_pickle: true"


def encode_rows(values: Sequence[Any], field: str, allow_pickle: bool = False) -> WireColumn:
    """Encode one row per value.

    Raises:
        UnsupportedValueError: a value, or something inside it, needs pickle, which ``allow_pickle`` forbids.
    """
    encoder = _Encoder(field, allow_pickle)
    rows = encoder.plain_rows(values)
    if rows is None:
        rows = [encoder.row(value) for value in values]
    offsets = running_sum(np.array(list(map(len, rows)), np.int64))
    return WireColumn(OBJECTS, len(rows), np.frombuffer(b"".join(rows), np.uint8), offsets)


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


class _Encoder:
    def __init__(self, field: str, allow_pickle: bool) -> None:
        self._field = field
        self._allow_pickle = allow_pickle
        self._pack = msgspec.msgpack.Encoder().encode
        # True while encoding a value that msgpack refused, so that each number and text is checked.
        self._careful = False

    def plain_rows(self, values: Sequence[Any]) -> list[bytes] | None:
        """Encode all rows if none needs extension types; otherwise return None."""
        if not self._all_plain(values):
            return None
        try:
            return list(map(self._pack, values))
        except (OverflowError, UnicodeEncodeError):
            return None

    def row(self, value: Any) -> bytes:
        try:
            return self._pack(self._lowered(value))
        except (OverflowError, UnicodeEncodeError):
            return self._row_carefully(value)
        except RecursionError:
            raise UnsupportedValueError(
                f"field {self._field!r}: a {type(value).__name__} is nested too deep to be stored, or contains itself"
            ) from None

    def _row_carefully(self, value: Any) -> bytes:
        self._careful = True
        try:
            return self._pack(self._lowered(value))
        finally:
            self._careful = False

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
            return self._tensor(value)
        if isinstance(value, np.generic):
            return self._array(np.asarray(value), _NUMPY_SCALAR)
        if is_image(value):
            return self._ext(_IMAGE, image_parts(value))
        return self._pickled(value)

    def _all_plain(self, values: Iterable[Any]) -> bool:
        return not self._careful and _PLAIN.issuperset(map(type, values))

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            return Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if type(value) is str:
            raw = value.encode("utf-8", "surrogatepass")
            # Only lone surrogates change in a round trip.
            return value if raw.decode("utf-8", "replace") == value else Ext(_TEXT, raw)
        return value

    def _dict(self, value: dict[Any, Any]) -> Any:
        if any(type(key) is not str for key in value) or self._careful:
            return self._ext(_MAP, [item for pair in value.items() for item in pair])
        return value if self._all_plain(value.values()) else {key: self._lowered(item) for key, item in value.items()}

    def _array(self, array: np.ndarray[Any, Any], code: int = _ARRAY) -> Ext:
        if array.dtype == object:
            return self._ext(_OBJECT_ARRAY, [list(array.shape), list(array.flat)])
        described = None if array.dtype.hasobject else np.lib.format.dtype_to_descr(array.dtype)
        # Types of other packages (bfloat16 of ml_dtypes) describe themselves as raw bytes.
        if described is None or np.lib.format.descr_to_dtype(described) != array.dtype:
            return self._pickled(array)
        return self._ext(code, [described, list(array.shape), array.tobytes()])

    def _tensor(self, tensor: torch.Tensor) -> Ext:
        return self._ext(_TENSOR, [dtype_name(tensor.dtype), list(tensor.shape), as_bytes(tensor).tobytes()])

    def _pickled(self, value: Any) -> Ext:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if not self._allow_pickle:
            raise UnsupportedValueError(
                f"field {self._field!r}: a value of type {kind} can't be stored without pickle. Convert it to numbers, "
                f"text, bytes, lists, tuples, sets, dicts, NumPy arrays or tensors; or, if every writer can be "
                f"trusted, set {_SWITCH}."
            )
        try:
            return Ext(_PICKLE, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UnsupportedValueError(
                f"field {self._field!r}: a value of type {kind} can't be pickled: {error}"
            ) from error


_LOWER: dict[type, Callable[[_Encoder, Any], Any]] = {
    tuple: lambda encoder, value: encoder._ext(_TUPLE, list(value)),
    set: lambda encoder, value: encoder._ext(_SET, list(value)),
    frozenset: lambda encoder, value: encoder._ext(_FROZENSET, list(value)),
    complex: lambda encoder, value: encoder._ext(_COMPLEX, [value.real, value.imag]),
    bytearray: lambda encoder, value: Ext(_BYTEARRAY, bytes(value)),
    np.ndarray: lambda encoder, value: encoder._array(value),
    np.memmap: lambda encoder, value: encoder._array(value),
}


class _Decoder:
    def __init__(self, field: str, allow_pickle: bool) -> None:
        self._field = field
        self._allow_pickle = allow_pickle
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._ext).decode

    def _ext(self, code: int, data: memoryview) -> Any:
        if code == _PICKLE:
            return self._unpickled(data)
        raised = _RAW.get(code)
        if raised is not None:
            return raised(data)
        built = _BUILD.get(code)
        if built is None:
            raise ProtocolError(
                f"field {self._field!r}: unknown kind of value {code}: the writer is newer than this reader"
            )
        return built(self.decode(data))

    def _unpickled(self, data: memoryview) -> Any:
        if not self._allow_pickle:
            raise UnsupportedValueError(
                f"field {self._field!r} holds a pickled value, and this process' configuration forbids to unpickle it. "
                f"If every writer can be trusted, set {_SWITCH}."
            )
        return pickle.loads(data)


@functools.lru_cache(1024)
def _decoder(field: str, allow_pickle: bool) -> Callable[[Any], Any]:
    # Cached, because it and its decoder form a cycle, which would leave garbage on every get.
    return _Decoder(field, allow_pickle).decode


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
    _BIG_INT: lambda data: int.from_bytes(data, "little", signed=True),
    _TEXT: lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    _BYTEARRAY: bytearray,
}
_BUILD: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _MAP: lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    _COMPLEX: lambda parts: complex(*parts),
    _ARRAY: lambda content: _array_of(*content),
    _NUMPY_SCALAR: lambda content: _array_of(*content)[()],
    _OBJECT_ARRAY: lambda content: _object_array_of(*content),
    _TENSOR: lambda content: _tensor_of(*content),
    _IMAGE: lambda content: image_of(*content),
}
