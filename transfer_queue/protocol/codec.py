# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes and back: what a client sends is checked here, and an error names the wrong field."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.errors import InvalidRequestError, ProtocolError, UnsupportedValueError
from transfer_queue.protocol.arrays import pack_arrays, unpack_arrays
from transfer_queue.protocol.replies import AnyReply, Reply
from transfer_queue.protocol.request_parts import MOST_ROWS, Call, Tags, UnitRuns
from transfer_queue.protocol.requests import (
    AnyRequest,
    Fetch,
    Hello,
    Publish,
    Put,
    RegisterTask,
    SetTags,
)

PROTOCOL_VERSION = 9
"""Client and server must have the same one."""
MAX_DEPTH = 64
"""Levels of lists and dicts in a tag or an argument."""

Indexes = npt.NDArray[np.int64]
NO_INDEXES: Indexes = np.empty(0, dtype=np.int64)
_INT64 = np.dtype("<i8")
_NO_TAGS = msgspec.msgpack.encode({})
_tags_decoder = msgspec.msgpack.Decoder(list[Tags])

R = TypeVar("R")


class ClientMessage(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """What a client sends. ``received``: earlier calls of its session whose answers it has, or no longer needs.

    ``read``: fetches without ledger entry whose batches it has read, or can't read any more.
    """

    received: Annotated[list[Call], msgspec.Meta(max_length=MOST_ROWS)]
    request: R
    read: Annotated[list[Call], msgspec.Meta(max_length=MOST_ROWS)] = []


# ---- encoding ----


def as_indexes(indexes: Any) -> Indexes:
    """Indexes as little-endian int64. Raises InvalidRequestError for what can't be one."""
    try:
        return np.asarray(indexes, dtype="<i8")
    except OverflowError:
        too_big = max(indexes, key=abs)
        raise InvalidRequestError(
            f"{too_big} is no index of a sample: it needs more than 64 bits. Use those that put and get_meta return."
        ) from None


def pack_indexes(indexes: Any) -> bytes:
    """Indexes as they travel: int64, little-endian."""
    return (indexes if type(indexes) is np.ndarray and indexes.dtype == _INT64 else as_indexes(indexes)).tobytes()


def unpack_indexes(data: bytes) -> Indexes:
    """Read-only int64 view of packed indexes. Raises ProtocolError where the bytes can't be any."""
    if len(data) % 8:
        raise ProtocolError(f"indexes are 8 bytes each, got {len(data)} bytes.")
    return np.frombuffer(data, _INT64).astype(np.int64, copy=False)


def pack_tags(packed: Sequence[bytes | None]) -> bytes:
    """Tags by row as they travel: a list, made of each row's as the queue keeps them. b"": no row has any."""
    if not any(packed):
        return b""
    return b"\xdd" + len(packed).to_bytes(4, "big") + b"".join([own or _NO_TAGS for own in packed])


def unpack_tags(data: bytes) -> list[Tags]:
    """Tags by row; [] where no row has any. Raises msgspec.DecodeError."""
    return _tags_decoder.decode(data) if data else []


def by_row(units: UnitRuns) -> npt.NDArray[np.int32]:
    """The storage unit of each row."""
    numbers, counts = zip(*units, strict=True) if units else ((), ())
    return np.repeat(np.array(numbers, dtype=np.int32), counts)


def runs_of(units: npt.NDArray[np.int32]) -> UnitRuns | None:
    """The inverse of ``by_row``; None: all rows are in unit 0."""
    if not units.any():
        return None
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    counts = np.diff(starts, append=len(units))
    return list(zip(units[starts].tolist(), counts.tolist(), strict=True))


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:  # NumPy scalars and 0-dim tensors
        return value.item()
    raise UnsupportedValueError(
        f"a tag or argument holds a {type(value).__name__}: tags are small plain data (str, int, float, bool, None, "
        f"lists and dicts of them). Store it as a field instead."
    )


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_FREE_FORM: dict[type[Any], str] = {
    Publish: "tags",
    SetTags: "tags",
    Put: "tags",
    Fetch: "sampler_args",
    RegisterTask: "sampler",
}
"""Requests with a part that may be nested as the caller likes."""


def encode(message: Any) -> bytes:
    """The message as it travels. Raises UnsupportedValueError for tags that aren't plain data."""
    try:
        return _encoder.encode(message)
    except RecursionError:
        raise UnsupportedValueError(too_deep("a value")) from None
    except OverflowError as error:
        number = next(_too_big(msgspec.to_builtins(message, enc_hook=str)), "a number")
        raise UnsupportedValueError(
            f"{number} in a request needs more than 64 bits. Use a float, or store it as a field."
        ) from error
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"the name or text {error.object!r:.80} in a request is no valid Unicode: {error}. "
            f"Leave that character out."
        ) from error


def _too_big(value: Any) -> Iterator[int]:
    """Ints inside that don't fit into 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield value
    elif isinstance(value, _CONTAINERS):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _too_big(inner)


def encode_request(request: Any, received: Sequence[int] = (), read: Sequence[int] = ()) -> bytes:
    """A request as it travels. Raises UnsupportedValueError for tags that aren't plain data or are nested too deep."""
    _check_depth(request, UnsupportedValueError)
    if isinstance(request, Fetch) and request.sampler_args:
        request = msgspec.structs.replace(request, sampler_args=pack_arrays(request.sampler_args))
    return encode(ClientMessage(list(received), request, list(read)))


def _check_depth(request: Any, error: type[Exception]) -> None:
    name = _FREE_FORM.get(type(request))
    value = None if name is None else getattr(request, name)
    if value and _is_too_deep(value):
        raise error(too_deep(f"{name} of {type(request).__name__}"))


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, _CONTAINERS)]
    return bool(level)


def too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels. Flatten it, or store it as a field."


# ---- decoding ----

Decode = Callable[[bytes | memoryview], ClientMessage[Any]]
_LOCATION = re.compile(r" - at (?:`key` in )?`\$\[1\]((?:\[[^`]*\])+)`$")
_STEP = re.compile(r"\[([^\]]*)\]")


def message_decoder(*more: type[msgspec.Struct]) -> Decode:
    """A decoder for messages whose request is one of ours, or of these types of another server's.

    It raises InvalidRequestError, which names the field, for a value of the wrong type or out of range; ProtocolError
    for what is no message at all.
    """
    types = (*get_args(AnyRequest), *more)
    kinds = {str(kind.__struct_config__.tag): kind for kind in types}
    union = functools.reduce(operator.or_, types)
    decoder: msgspec.msgpack.Decoder[ClientMessage[Any]] = msgspec.msgpack.Decoder(ClientMessage[union])  # type: ignore[valid-type]

    def decode(data: bytes | memoryview) -> ClientMessage[Any]:
        try:
            message = decoder.decode(data)
        except RecursionError:
            raise ProtocolError(too_deep("a request")) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            named = _with_name(str(error), data, kinds) if isinstance(error, msgspec.ValidationError) else None
            if named is not None:
                raise InvalidRequestError(named) from error
            raise ProtocolError(
                f"this is no request of protocol version {PROTOCOL_VERSION}: {error}. Use the same version of "
                f"lightning-tq on both sides."
            ) from error
        _check_depth(message.request, ProtocolError)
        return _with_arrays(message) if type(message.request) is Fetch and message.request.sampler_args else message

    return decode


def _with_arrays(message: ClientMessage[Any]) -> ClientMessage[Any]:
    fetch = message.request
    arguments = unpack_arrays(fetch.sampler_args)
    return msgspec.structs.replace(message, request=msgspec.structs.replace(fetch, sampler_args=arguments))


def _with_name(text: str, data: bytes | memoryview, kinds: dict[str, type[msgspec.Struct]]) -> str | None:
    """Fields travel by position, which says nothing to the caller that gave the value."""
    location = _LOCATION.search(text)
    if location is None:
        return None
    try:
        value = msgspec.msgpack.decode(data)[1]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # behind that location there may be anything
        return None
    name, of, rest = "", "", ""
    for step in _STEP.findall(location[1]):
        kind = kinds.get(str(value[0])) if isinstance(value, list) and value and not rest else None
        if kind is not None and step.isdecimal() and int(step):
            name, of, value = kind.__struct_fields__[int(step) - 1], kind.__name__, value[int(step)]
        else:
            rest += f"[{step}]"
    return f"{name}{rest} of {of}: {text[: location.start()]}" if name else None


def check_version(hello: Hello) -> None:
    """Raises ProtocolError, which names both versions, where the client speaks another protocol than this server."""
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the client speaks version {hello.version} of the protocol, this server version {PROTOCOL_VERSION}. Use "
            f"the same version of lightning-tq on both sides."
        )


decode_reply: Callable[[bytes | memoryview], Reply] = msgspec.msgpack.Decoder(AnyReply).decode
"""Raises msgspec.DecodeError for anything that isn't one of our replies."""
