# SPDX-License-Identifier: Apache-2.0
"""Messages between a client and a storage unit. Columns are frames after the header, or in the arena."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from transfer_queue.errors import ProtocolError, from_wire
from transfer_queue.protocol import Done, Failed, Reply, Request
from transfer_queue.storage.pieces import IntArray, Layout, Piece, Positions

FieldParts: TypeAlias = list[tuple[str, Positions, Piece]]
"""(field, which of the message's indexes its rows belong to, the rows)."""

Nbytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Call = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A column, or some rows of one. Its rows are those from ``start`` on, or those in table ``positions``.

    Its values are the next frame, or ``nbytes`` of the arena from ``offset`` on. Table ``picks`` selects rows of the
    latter if they are not contiguous. Row shapes or offsets are one more frame.
    """

    field: str
    layout: Layout
    rows: int
    start: int = 0
    positions: int = -1
    offset: int = -1
    nbytes: int = 0
    picks: int = -1


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """What a write stores. Parts with an offset lie in the memory that call ``lease`` leased (0: none)."""

    parts: list[Part]
    tables: list[bytes] = []
    lease: Call = 0


class Lease(Request, frozen=True):
    """Lease arena memory for a write that follows, waiting up to ``wait_s`` for room.

    ``indexes`` and ``fields`` name the values that the write replaces; their memory counts as free.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    indexes: bytes = b""
    fields: list[str] = []  # noqa: RUF012 (msgspec copies it)
    wait_s: Seconds = 0.0


class Leased(Reply, frozen=True):
    """Where to write; -1: the arena has no such range, so the values must travel as frames."""

    offset: int


class Write(Request, frozen=True):
    """Store these rows. Readers see them once the write is committed: by ``Commit``, or at once with ``commit``.

    A write without a lease waits up to ``wait_s`` for room.
    """

    indexes: bytes
    columns: Columns
    wait_s: Seconds = 0.0
    commit: bool = False


class Written(Reply, frozen=True):
    """The whole write is stored."""


class Commit(Request, frozen=True):
    """These writes of this client were published: they replace the old values."""

    writes: list[int]


class Read(Request, frozen=True):
    """These fields of all these indexes, which may repeat. ``mapped``: the client has mapped the arena."""

    indexes: bytes
    fields: list[str]
    mapped: bool = False


class Rows(Reply, frozen=True):
    """Every requested field. ``pinned``: some values lie in the arena, and stay there until the call is released."""

    parts: list[Part]
    tables: list[bytes] = []  # noqa: RUF012 (msgspec copies it)
    pinned: bool = False


class Delete(Request, frozen=True):
    """Delete these fields (None: all) of these indexes. Unknown ones are ignored."""

    indexes: bytes
    fields: list[str] | None = None


class Deleted(Reply, frozen=True):
    """``values``: how many (index, field) pairs were deleted."""

    values: int


class Release(Request, frozen=True):
    """Release the leases and pins of these calls. It gets no answer."""

    calls: list[int]


class EndWrite(Request, frozen=True):
    """From the controller: this client cancelled this write. Commit it if it was published, else delete it."""

    client: str
    call: Call
    published: bool


class EndSession(Request, frozen=True):
    """From the controller: this client has ended. Of its uncommitted writes these were published; delete the others."""

    client: str
    published: list[int] = []  # noqa: RUF012 (msgspec copies it)


class AskUnitStats(Request, frozen=True):
    """Ask for a unit's statistics."""


class UnitStats(Reply, frozen=True):
    """``held_nbytes`` is the size of all buffers, ``live_nbytes`` that of readable values.

    Of the arena: ``arena_nbytes`` in use, ``recyclable_nbytes`` of free pages kept for later writes, ``leased_nbytes``
    leased to writers, ``pins`` of readers. ``uncommitted_nbytes`` belongs to writes that are not published yet.
    """

    unit: str
    samples: int
    values: int
    live_nbytes: int
    held_nbytes: int
    blocks: int
    capacity_bytes: int | None = None
    parked: int = 0
    parked_nbytes: int = 0
    arena_nbytes: int = 0
    recyclable_nbytes: int = 0
    leased_nbytes: int = 0
    pins: int = 0
    uncommitted_nbytes: int = 0


UnitRequest: TypeAlias = Lease | Write | Commit | Read | Delete | Release | EndWrite | EndSession | AskUnitStats
UnitAnswer: TypeAlias = Leased | Written | Rows | Deleted | UnitStats | Done | Failed
Expected = TypeVar("Expected", bound=Reply)

_answers = msgspec.msgpack.Decoder(UnitAnswer)
_columns = msgspec.msgpack.Decoder(Columns)
_encoder = msgspec.msgpack.Encoder()


def encode_columns(columns: Columns) -> bytes:
    return _encoder.encode(columns)


def decode_columns(data: bytes) -> Columns:
    columns: Columns = _decode(_columns, data)
    return columns


def decode_answer(header: bytes | memoryview, kind: type[Expected]) -> Expected:
    """Decode a unit's answer, which must be of this kind; raises the error that the unit answered with."""
    answer = _decode(_answers, header)
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text)
    if not isinstance(answer, kind):
        raise ProtocolError(f"a storage unit answered {type(answer).__name__}, expected {kind.__name__}.")
    return answer


def _decode(decoder: Any, header: bytes | memoryview) -> Any:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a storage message of {len(header)} bytes can't be decoded: {error}") from error


def pack_indexes(indexes: IntArray) -> bytes:
    return np.ascontiguousarray(indexes, np.int64).tobytes()


def unpack_indexes(packed: bytes) -> IntArray:
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes of indexes are no whole number of int64")
    return np.frombuffer(packed, np.int64)
