# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays and scalars among the arguments of a sampler: numbers, flags and texts, as a msgpack extension."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import ProtocolError, UnsupportedValueError
from transfer_queue.protocol.request_parts import Size

_ARRAY, _SCALAR = 1, 2
MOST_NBYTES = 64 * 1024 * 1024
"""Of one array: scores of eight million samples."""
_DTYPE = re.compile(r"[<|][biufcSU][1-9]\d{0,5}")


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[Size, ...]
    data: bytes


_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_arrays(arguments: Any) -> Any:
    """The same arguments as they travel.

    Raises:
        UnsupportedValueError: an array of objects, dates or records, or one that is too large.
    """
    return _mapped(arguments, _packed)


def unpack_arrays(arguments: Any) -> Any:
    """The arguments that ``pack_arrays`` was given. Raises ProtocolError for what is no array of ours."""
    return _mapped(arguments, _unpacked)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return change(value)


def _packed(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if not _DTYPE.fullmatch(array.dtype.str) or array.nbytes > MOST_NBYTES:
        raise UnsupportedValueError(
            f"sampling_config holds an array of dtype {array.dtype} with {array.nbytes} bytes. A sampler may be given "
            f"numbers, flags and texts of up to {MOST_NBYTES} bytes; pass another dtype, or plain lists."
        )
    packed = _Packed(array.dtype.str, array.shape, array.tobytes())
    return msgspec.msgpack.Ext(_SCALAR if isinstance(value, np.generic) else _ARRAY, msgspec.msgpack.encode(packed))


def _unpacked(value: Any) -> Any:
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    if value.code not in (_ARRAY, _SCALAR):
        raise ProtocolError(f"an argument of a sampler has the unknown extension {value.code}: the client is newer.")
    try:
        packed = _decoder.decode(value.data)
        if not _DTYPE.fullmatch(packed.dtype):
            raise ValueError(f"its dtype is {packed.dtype!r}")
        array: Any = np.ndarray(packed.shape, packed.dtype, bytearray(packed.data))
        if array.nbytes != len(packed.data):
            raise ValueError(f"{len(packed.data)} bytes don't fit its shape {packed.shape}")
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an argument of a sampler is no array: {error}") from error
    return array if value.code == _ARRAY else array[()]
