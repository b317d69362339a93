# SPDX-License-Identifier: Apache-2.0
"""Converts wire columns to message parts and back: headers, frames, and shared tables of row indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.pieces import ByteArray, IntArray, Piece, Positions
from transfer_queue.storage.shm.messages import FieldParts, Part, pack_indexes, unpack_indexes

View = Callable[[int, int], ByteArray]
"""Returns memory of the arena: (offset, nbytes)."""


class Packer:
    """Collects the contents of a message. Fields with the same row indices share one table."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tables: list[bytes] = []
        self.frames: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, field: str, positions: Positions, piece: Piece) -> None:
        """Add a wire column with its bytes in the message."""
        self._add(field, positions, piece, -1, 0)
        self.frames.append(piece.data)
        self._add_side(piece)

    def add_at(self, field: str, positions: Positions, piece: Piece, offset: int) -> None:
        """Add a wire column with its bytes in the arena."""
        self._add(field, positions, piece, offset, piece.data.nbytes)
        self._add_side(piece)

    def _add(self, field: str, positions: Positions, piece: Piece, offset: int, nbytes: int) -> None:
        start, table = (positions.start, -1) if isinstance(positions, slice) else (0, self._table(positions))
        picks = -1 if piece.picks is None else self._table(piece.picks)
        self.parts.append(Part(field, piece.layout, piece.rows, start, table, offset, nbytes, picks))

    def _add_side(self, piece: Piece) -> None:
        if piece.side is not None:
            self.frames.append(piece.side_frame)

    def _table(self, numbers: IntArray) -> int:
        packed = pack_indexes(numbers)
        number = self._numbers.setdefault(packed, len(self.tables))
        if number == len(self.tables):
            self.tables.append(packed)
        return number


def unpack_parts(
    headers: Sequence[Part], tables: Sequence[bytes], frames: Sequence[Any], count: int, view: View | None = None
) -> FieldParts:
    """The inverse; positions must be below ``count``.

    Raises:
        ProtocolError: frames are missing or too many, a position is out of range, or the arena is not mapped.
    """
    expected = sum((part.offset < 0) + (part.layout.kind != "dense") for part in headers)
    if expected != len(frames):
        raise ProtocolError(f"{len(headers)} parts need {expected} frames, {len(frames)} came")
    remaining = iter(frames)
    return [(part.field, _positions(part, tables, count), _piece(part, tables, remaining, view)) for part in headers]


def _piece(part: Part, tables: Sequence[bytes], frames: Any, view: View | None) -> Piece:
    if part.offset < 0:
        data = np.frombuffer(next(frames), np.uint8)
    elif view is None:
        raise ProtocolError(f"field {part.field!r} lies in an arena that is not mapped here")
    else:
        data = view(part.offset, part.nbytes)
    side = None if part.layout.kind == "dense" else next(frames)
    picks = None if part.picks < 0 else _table(part, tables, part.picks)
    return Piece.received(part.layout, part.rows, data, side, picks)


def _table(part: Part, tables: Sequence[bytes], number: int) -> IntArray:
    if number >= len(tables):
        raise ProtocolError(f"a part of field {part.field!r} names table {number} of {len(tables)}")
    return unpack_indexes(tables[number])


def _positions(part: Part, tables: Sequence[bytes], count: int) -> Positions:
    if part.rows < 1:
        raise ProtocolError(f"a part of field {part.field!r} has {part.rows} rows")
    if part.positions < 0:
        if part.start < 0 or part.start + part.rows > count:
            raise ProtocolError(
                f"rows {part.start} … {part.start + part.rows} of field {part.field!r}, but {count} indexes"
            )
        return slice(part.start, part.start + part.rows)
    positions = _table(part, tables, part.positions)
    if len(positions) != part.rows or positions.min() < 0 or positions.max() >= count:
        raise ProtocolError(f"positions of field {part.field!r} don't fit {part.rows} rows and {count} indexes")
    return positions
