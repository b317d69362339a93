# SPDX-License-Identifier: Apache-2.0
"""A unit's answer to a read: extents for blocks in the arena, frames for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.storage.pieces import ByteArray, IntArray, Piece, Positions
from transfer_queue.storage.selection import as_run, pick
from transfer_queue.storage.shm.blocks import Located
from transfer_queue.storage.shm.messages import FieldParts, Rows
from transfer_queue.storage.shm.parts import Packer

Place = Callable[[ByteArray], int]
"""Returns the arena offset of this memory, or -1 if it lies elsewhere."""


class RowsAnswer(NamedTuple):
    """``pinned`` must not be reused before the reader releases the call."""

    answer: Rows
    frames: list[Any]
    pinned: list[ByteArray]


def answer_in_frames(call: int, parts: FieldParts) -> RowsAnswer:
    """Send everything in the message."""
    packer = Packer()
    for part in parts:
        packer.add(*part)
    return RowsAnswer(Rows(call, packer.parts, packer.tables), packer.frames, [])


def answer_in_place(call: int, located: Located, place: Place) -> RowsAnswer:
    """Answer with extents. Rows of blocks in the arena are not copied here: the reader copies them once."""
    packer, pinned = Packer(), []
    rest: dict[str, list[tuple[Piece, IntArray, IntArray]]] = {}
    for field, piece, at, rows in located:
        offset = place(piece.data) if piece.data.nbytes else -1
        run = as_run(rows)
        chosen = _chosen(piece, run) if offset >= 0 or isinstance(rows, slice) else None
        if chosen is None:
            assert not isinstance(at, slice)
            assert not isinstance(rows, slice)
            rest.setdefault(field, []).append((piece, at, rows))
        elif offset < 0:
            packer.add(field, at, chosen)
        else:
            packer.add_at(field, as_run(at), chosen, offset + (piece.begin(run.start) if isinstance(run, slice) else 0))
            pinned.append(piece.data)
    for field, blocks in rest.items():
        which = np.repeat(np.arange(len(blocks)), [len(at) for _, at, _ in blocks])
        at, rows = (np.concatenate([block[n] for block in blocks]) for n in (1, 2))
        order = np.argsort(at, kind="stable")
        for where, part in pick([piece for piece, _, _ in blocks], which[order], rows[order]):
            packer.add(field, as_run(at[order][where]), part)
    return RowsAnswer(Rows(call, packer.parts, packer.tables, bool(pinned)), packer.frames, pinned)


def _chosen(piece: Piece, rows: Positions) -> Piece | None:
    """Select these rows of a block in place; None if they must be copied together here."""
    if isinstance(rows, slice):
        return piece.slice(rows.start, rows.stop)
    if piece.layout.kind == "objects":
        return None  # readers decode objects from one contiguous buffer
    if piece.layout.kind == "dense":
        return Piece(piece.layout, len(rows), piece.data, picks=rows)
    assert piece.side is not None
    return Piece(piece.layout, len(rows), piece.data, piece.side[rows], picks=piece.bounds[rows])
