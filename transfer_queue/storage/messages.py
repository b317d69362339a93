# SPDX-License-Identifier: Apache-2.0
"""What client and server of a storage unit say to each other, and how wire columns are packed into it."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from transfer_queue.errors import ProtocolError, from_wire
from transfer_queue.protocol import Call, Done, Failed, Reply, Request, WriteName, pack_indexes, unpack_indexes
from transfer_queue.storage.wire import ByteArray, IntArray, Layout, Positions, WireColumn, as_run, select

SMALL_NBYTES = 16 * 1024
"""Values up to this size travel with the metadata of their batch, where a client may be about to read them."""
INLINE_NBYTES = 64 * 1024
"""Values up to this size travel in the message, which is cheaper than leasing or pinning memory."""
PAGE_NBYTES = mmap.PAGESIZE
_SCHEME = "ipc://"

FieldColumns: TypeAlias = list[tuple[str, Positions, WireColumn]]
"""(field, which of the message's indexes its rows belong to, the rows)."""
Located: TypeAlias = list[tuple[str, WireColumn, Positions, Positions]]
"""(field, block, positions in the batch, their row indices in the block)."""

Path: TypeAlias = Literal["arena", "frames", "undecided"]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    """A wire column, or some rows of one. Its rows are those from ``start`` on, or those in table ``positions``.

    Its values are the next frame, or ``nbytes`` of the arena from ``offset`` on. Table ``selection`` selects rows of
    the latter if they are not contiguous. Row shapes or sizes are one more frame.
    """

    field: str
    layout: Layout
    rows: int
    start: int = 0
    positions: int = -1
    offset: int = -1
    nbytes: int = 0
    selection: int = -1


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """What a write stores. Columns with an offset lie in the memory that call ``lease`` leased (0: none)."""

    headers: list[ColumnHeader]
    tables: list[bytes] = []
    lease: Call = 0


class LeaseMemory(Request, frozen=True):
    """Lease arena memory for a write that follows, waiting up to ``wait_s`` for room.

    ``indexes`` and ``fields`` name the values that the write replaces; their memory counts as free.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    indexes: bytes = b""
    fields: list[str] = []  # noqa: RUF012 (msgspec copies it)
    wait_s: Seconds = 0.0


class LeasedMemory(Reply, frozen=True):
    """Where to write; -1: the arena has no such range, so the values must travel as frames."""

    offset: int


class Write(Request, frozen=True):
    """Store these rows. A write without a lease waits up to ``wait_s`` for room.

    ``fresh``: of new samples, whose indexes nobody else knows yet. They are stored at once. Others are stored aside,
    and readers see them once the write is committed.
    """

    indexes: bytes
    columns: Columns
    wait_s: Seconds = 0.0
    fresh: bool = False


class Written(Reply, frozen=True):
    """The whole write is stored."""


class Commit(Request, frozen=True):
    """These writes were published, in this order: each replaces older values. Unknown ones are ignored."""

    writes: list[WriteName]


class Abort(Request, frozen=True):
    """These writes of this client were not published, and are dropped. It gets no answer."""

    writes: list[int]


class Read(Request, frozen=True):
    """These fields of all these indexes, which may repeat. ``mapped``: the client has mapped the arena.

    ``alone``: it knows of no other unit. If one has joined, this one may have values that were replaced there.
    ``published``: see ``Commit``. They are committed before the values are read.
    """

    indexes: bytes
    fields: list[str]
    mapped: bool = False
    alone: bool = False
    published: list[WriteName] = []  # noqa: RUF012 (msgspec copies it)


class Rows(Reply, frozen=True):
    """Every requested field. ``pinned``: some values lie in the arena, and stay there until the call is released.

    ``stamp``: see ``Changes``.
    """

    headers: list[ColumnHeader]
    tables: list[bytes] = []  # noqa: RUF012 (msgspec copies it)
    pinned: bool = False
    stamp: int = 0


class Delete(Request, frozen=True):
    """Delete all fields of these indexes. Unknown ones are ignored."""

    indexes: bytes


class Release(Request, frozen=True):
    """Release the leases and pins of these calls. It gets no answer."""

    calls: list[int]


class EndWrite(Request, frozen=True):
    """From the controller: its client has cancelled this write. ``published``: see ``Commit``; if it is none of them,
    delete it.
    """

    write: WriteName
    published: list[WriteName]


class EndSession(Request, frozen=True):
    """From the controller: this client has ended. ``published``: see ``Commit``; delete any other writes of it."""

    client: str
    published: list[WriteName] = []  # noqa: RUF012 (msgspec copies it)


class AskHeld(Request, frozen=True):
    """Ask which of these indexes have a value, field by field."""

    indexes: bytes


class Held(Reply, frozen=True):
    """Packed indexes by field. Fields that none of them has are left out."""

    fields: dict[str, bytes]


class AskUnitStats(Request, frozen=True):
    """Ask for a unit's statistics."""


class UnitStats(Reply, frozen=True):
    """``held_nbytes`` is the size of all buffers, ``live_nbytes`` that of readable values.

    Of the arena: ``arena_nbytes`` in use, ``recyclable_nbytes`` of free pages kept for later writes, ``leased_nbytes``
    leased to writers, ``pins`` of readers. ``uncommitted_nbytes`` belongs to writes that are not published yet.
    Of ``held_nbytes``, ``spilled_nbytes`` are on disk, where ``spill_bytes`` are allowed (0: no spilling).
    ``metrics``: what its server has counted, see ``server/meter.py``.
    ``path``: how the asking client's values reach the unit, which that client adds. "arena": through memory that both
    map (except small values); "frames": in messages; "undecided": this client has put or got nothing there yet.
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
    spilled_nbytes: int = 0
    spill_bytes: int = 0
    metrics: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)
    path: Path = "undecided"


UnitRequest: TypeAlias = (
    LeaseMemory | Write | Commit | Abort | Read | Delete | Release | EndWrite | EndSession | AskHeld | AskUnitStats
)
UnitAnswer: TypeAlias = LeasedMemory | Written | Rows | Held | UnitStats | Done | Failed
Expected = TypeVar("Expected", bound=Reply)

_answers = msgspec.msgpack.Decoder(UnitAnswer)
_columns = msgspec.msgpack.Decoder(Columns)
_encoder = msgspec.msgpack.Encoder()


def encode_columns(columns: Columns) -> bytes:
    return _encoder.encode(columns)


def decode_columns(data: bytes) -> Columns:
    """Most small writes look like an earlier one."""
    columns: Columns = _known_columns(data) if len(data) <= _SHORT else _decode(_columns, data)
    return columns


def decode_answer(header: bytes | memoryview, kind: type[Expected]) -> Expected:
    """Decode a unit's answer, which must be of this kind; raises the error that the unit answered with."""
    answer = _decode(_answers, header)
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text)
    if not isinstance(answer, kind):
        raise ProtocolError(f"a storage unit answered {type(answer).__name__}, expected {kind.__name__}.")
    return answer


_known_columns = functools.lru_cache(256)(lambda data: _decode(_columns, data))
_SHORT = 1024


def _decode(decoder: Any, header: bytes | memoryview) -> Any:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a storage message of {len(header)} bytes can't be decoded: {error}") from error


View = Callable[[int, int], ByteArray]
"""Returns memory of the arena: (offset, nbytes)."""


def arena_path(address: str) -> str | None:
    """The socket that lends the arena, and the spill file, of the server at this address; None: not on this host."""
    return address.removeprefix(_SCHEME) + ".arena" if address.startswith(_SCHEME) else None


def least_in_arena(inline_nbytes: int) -> int:
    """Smaller blocks stay outside the arena, which allocates whole pages only."""
    return max(1, inline_nbytes // 4)


def whole_pages(nbytes: int) -> int:
    """The size of an allocation of this many bytes."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Packer:
    """Collects the contents of a message. Fields with the same row indices share one table."""

    def __init__(self) -> None:
        self.headers: list[ColumnHeader] = []
        self.tables: list[bytes] = []
        self.frames: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, field: str, positions: Positions, column: WireColumn, offset: int = -1) -> None:
        """Add a wire column. ``offset``: where its bytes lie in the arena; -1: in the message."""
        start, table = (positions.start, -1) if isinstance(positions, slice) else (0, self._table(positions))
        selection = -1 if column.selection is None else self._table(column.selection)
        nbytes = 0 if offset < 0 else column.data.nbytes
        self.headers.append(ColumnHeader(field, column.layout, column.rows, start, table, offset, nbytes, selection))
        if offset < 0:
            self.frames.append(column.data)
        if column.row_meta is not None:
            self.frames.append(np.ascontiguousarray(column.row_meta).reshape(-1))

    def _table(self, numbers: IntArray) -> int:
        packed = pack_indexes(numbers)
        number = self._numbers.setdefault(packed, len(self.tables))
        if number == len(self.tables):
            self.tables.append(packed)
        return number


def unpack_columns(
    headers: Sequence[ColumnHeader],
    tables: Sequence[bytes],
    frames: Sequence[Any],
    count: int,
    view: View | None = None,
) -> FieldColumns:
    """The inverse; positions must be below ``count``.

    Raises:
        ProtocolError: frames are missing or too many, a position is out of range, or the arena is not mapped.
    """
    expected, columns, remaining = 0, [], iter(frames)
    for header in headers:
        expected += (header.offset < 0) + (header.layout.kind != "dense")
    if expected != len(frames):
        raise ProtocolError(f"{len(headers)} parts need {expected} frames, {len(frames)} came")
    for header in headers:
        positions = _positions(header, tables, count)
        columns.append((header.field, positions, _column(header, tables, remaining, view)))
    return columns


def _column(header: ColumnHeader, tables: Sequence[bytes], frames: Any, view: View | None) -> WireColumn:
    if header.offset < 0:
        data = np.frombuffer(next(frames), np.uint8)
    elif view is None:
        raise ProtocolError(f"field {header.field!r} lies in an arena that is not mapped here")
    else:
        data = view(header.offset, header.nbytes)
    row_meta = None if header.layout.kind == "dense" else next(frames)
    selection = None if header.selection < 0 else _table(header, tables, header.selection)
    return WireColumn.received(header.layout, header.rows, data, row_meta, selection)


def _table(header: ColumnHeader, tables: Sequence[bytes], number: int) -> IntArray:
    if number >= len(tables):
        raise ProtocolError(f"a part of field {header.field!r} names table {number} of {len(tables)}")
    return unpack_indexes(tables[number])


def _positions(header: ColumnHeader, tables: Sequence[bytes], count: int) -> Positions:
    if header.rows < 1:
        raise ProtocolError(f"a part of field {header.field!r} has {header.rows} rows")
    if header.positions < 0:
        if header.start < 0 or header.start + header.rows > count:
            raise ProtocolError(
                f"rows {header.start} … {header.start + header.rows} of field {header.field!r}, but {count} indexes"
            )
        return slice(header.start, header.start + header.rows)
    positions = _table(header, tables, header.positions)
    if len(positions) != header.rows or positions.min() < 0 or positions.max() >= count:
        raise ProtocolError(f"positions of field {header.field!r} don't fit {header.rows} rows and {count} indexes")
    return positions


OffsetOf = Callable[[ByteArray], int]
"""Returns the arena offset of this memory, or -1 if it lies elsewhere."""


def rows_answer(
    call: int, located: Located, offset_of: OffsetOf | None
) -> tuple[Rows, list[Any], list[ByteArray], int]:
    """Answer with extents of the arena, whose rows the reader copies once, and with frames of all that lies elsewhere.

    Args:
        offset_of: None: everything travels in frames.
    Returns:
        The answer, its frames, the memory that must not be reused before the reader releases the call, and the bytes
        that it reads there.
    """
    packer, pinned, nbytes = Packer(), list[ByteArray](), 0
    rest: dict[str, list[tuple[WireColumn, IntArray, IntArray]]] = {}
    for field, column, at, rows in located:
        offset = offset_of(column.data) if offset_of is not None and column.data.nbytes else -1
        run = as_run(rows) if offset >= 0 else rows
        if not isinstance(rows, slice) and (offset < 0 or is_copied_here(column, run)):
            assert not isinstance(at, slice)
            rest.setdefault(field, []).append((column, at, rows))
        elif offset < 0:
            packer.add(field, at, column.pick(run))
        else:
            start = column.start_of(run.start) if isinstance(run, slice) else 0
            picked = column.pick(run)
            packer.add(field, as_run(at), picked, offset + start)
            pinned.append(column.data)
            nbytes += picked.data.nbytes if isinstance(run, slice) else column.rows_nbytes(run)
    for field, blocks in rest.items():
        which = np.repeat(np.arange(len(blocks)), [len(at) for _, at, _ in blocks])
        at, rows = (np.concatenate([block[n] for block in blocks]) for n in (1, 2))
        order = np.argsort(at, kind="stable")
        for where, rows_together in select([column for column, _, _ in blocks], which[order], rows[order]):
            packer.add(field, as_run(at[order][where]), rows_together)
    return Rows(call, packer.headers, packer.tables, bool(pinned)), packer.frames, pinned, nbytes


def is_copied_here(column: WireColumn, rows: Positions) -> bool:
    """Whether these rows of a block in the arena are copied for an answer: readers decode objects from one buffer."""
    return column.layout.kind == "objects" and not isinstance(rows, slice)
