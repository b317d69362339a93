# SPDX-License-Identifier: Apache-2.0
"""What a storage client and a storage unit say to each other. Spoken by this package only.

Values travel beside the header: every part owns the next one (dense) or two (ragged, objects) frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.pieces import IntArray, Layout, Piece, Positions

FieldParts: TypeAlias = list[tuple[str, Positions, Piece]]
"""(field, which of the message's indexes its rows belong to, the rows)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece on the wire. Its rows are ``start`` and following, or those at ``positions`` (int64 bytes, not empty)."""

    field: str
    layout: Layout
    rows: int
    start: int = 0
    positions: bytes = b""


class Write(Message, frozen=True):
    """Keep these rows. A field that an index already has is replaced. All or nothing.

    Does it not fit, it waits up to ``wait_s`` for room.
    """

    indexes: bytes
    parts: list[Part]
    wait_s: float = 0.0


class Written(Message, frozen=True):
    """The write is whole; readers see it from now on."""


class Read(Message, frozen=True):
    """Give these fields of all these indexes, which may repeat."""

    indexes: bytes
    fields: list[str]


class Rows(Message, frozen=True):
    """Every field asked for, in as many parts as it takes."""

    parts: list[Part]


class Drop(Message, frozen=True):
    """Forget these fields (None: all) of these indexes; unknown ones are no error."""

    indexes: bytes
    fields: list[str] | None = None


class Dropped(Message, frozen=True):
    """``values``: how many (index, field) were there."""

    values: int


class Stats(Message, frozen=True):
    """How full are you?"""


class UnitStats(Message, frozen=True):
    """``held_nbytes`` is what buffers take, ``live_nbytes`` what readers can still ask for."""

    unit: str
    samples: int
    values: int
    live_nbytes: int
    held_nbytes: int
    blocks: int
    capacity_bytes: int | None = None
    parked: int = 0
    parked_nbytes: int = 0


class Failed(Message, frozen=True):
    """``errors.to_wire`` of what went wrong."""

    code: str
    text: str


Request: TypeAlias = Write | Read | Drop | Stats
Answer: TypeAlias = Written | Rows | Dropped | UnitStats | Failed

encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def decode_request(header: bytes) -> Request:
    request: Request = _decode(_requests, header)
    return request


def decode_answer(header: bytes) -> Answer:
    answer: Answer = _decode(_answers, header)
    return answer


def _decode(decoder: Any, header: bytes) -> Any:
    try:
        return decoder.decode(header)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a storage message of {len(header)} bytes can't be decoded: {error}") from error


def pack_indexes(indexes: IntArray) -> bytes:
    return np.ascontiguousarray(indexes, np.int64).tobytes()


def unpack_indexes(packed: bytes) -> IntArray:
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes of indexes are no whole number of int64")
    return np.frombuffer(packed, np.int64)


def pack_parts(parts: Iterable[tuple[str, Positions, Piece]]) -> tuple[list[Part], list[Any]]:
    """Headers and frames, in the same order."""
    headers: list[Part] = []
    frames: list[Any] = []
    for field, positions, piece in parts:
        if isinstance(positions, slice):
            headers.append(Part(field, piece.layout, piece.rows, positions.start))
        else:
            headers.append(Part(field, piece.layout, piece.rows, 0, pack_indexes(positions)))
        frames += piece.frames()
    return headers, frames


def unpack_parts(headers: Sequence[Part], frames: Sequence[Any], count: int) -> FieldParts:
    """The inverse; ``count`` is how many indexes the positions may name.

    Raises:
        ProtocolError: frames are missing or too many, or a position lies outside.
    """
    expected = sum(1 if part.layout.kind == "dense" else 2 for part in headers)
    if expected != len(frames):
        raise ProtocolError(f"{len(headers)} parts need {expected} frames, {len(frames)} came")
    parts: FieldParts = []
    at = 0
    for part in headers:
        end = at + (1 if part.layout.kind == "dense" else 2)
        positions = _positions(part, count)
        parts.append((part.field, positions, Piece.from_frames(part.layout, part.rows, frames[at:end])))
        at = end
    return parts


def _positions(part: Part, count: int) -> Positions:
    if part.rows < 1:
        raise ProtocolError(f"a part of field {part.field!r} has {part.rows} rows")
    if not part.positions:
        if part.start < 0 or part.start + part.rows > count:
            raise ProtocolError(
                f"rows {part.start} … {part.start + part.rows} of field {part.field!r}, but {count} indexes"
            )
        return slice(part.start, part.start + part.rows)
    positions = unpack_indexes(part.positions)
    if len(positions) != part.rows or positions.min() < 0 or positions.max() >= count:
        raise ProtocolError(f"positions of field {part.field!r} don't fit {part.rows} rows and {count} indexes")
    return positions
