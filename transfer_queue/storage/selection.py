# SPDX-License-Identifier: Apache-2.0
"""Selects rows of wire columns: contiguous rows as slices, others copied into one new column. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.pieces import Allocate, ByteArray, IntArray, Layout, Piece, Positions, running_sum
from transfer_queue.storage.spans import copy_rows, copy_spans

SLICE_NBYTES = 64 * 1024
"""Runs of rows at least this long are sent in place. Shorter runs are copied together, because a frame costs more."""


def as_run(positions: Positions | NDArray[Any]) -> Positions:
    """Return the same positions, as a slice if they are consecutive."""
    if isinstance(positions, slice):
        return positions
    count = len(positions)
    if count == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first == count - 1 and (count < 3 or _is_ascending_by_one(positions)):
        return slice(first, first + count)
    return positions


def _is_ascending_by_one(numbers: NDArray[Any]) -> bool:
    # np.diff(...) and .all() take twice as long for a few hundred numbers.
    return int(np.count_nonzero(numbers[1:] - numbers[:-1] == 1)) == len(numbers) - 1


def distinct(numbers: IntArray) -> IntArray:
    """Return each number once, ascending."""
    ascending = len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all())
    return numbers if ascending else np.unique(numbers)


def heap(nbytes: int) -> ByteArray:
    """Allocate memory of this process."""
    return np.empty(nbytes, np.uint8)


def gather(parts: Sequence[tuple[Piece, Positions]], allocate: Allocate = heap) -> Piece:
    """Copy these rows of these wire columns, all of one family, into one new wire column, in this order."""
    layout = parts[0][0].layout
    if any(piece.layout != layout for piece, _ in parts):
        parts, layout = [(piece.as_ragged(), rows) for piece, rows in parts], layout.family
    counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in parts]
    total = sum(counts)
    if layout.kind == "dense":
        return Piece(layout, total, _gather_dense(parts, counts, allocate(total * layout.row_nbytes)))
    starts, sizes = zip(*(_extent(piece, rows) for piece, rows in parts), strict=True)
    bounds = running_sum(np.concatenate(sizes))
    data = allocate(int(bounds[-1]))
    at = 0
    for (piece, _), count, start, size in zip(parts, counts, starts, sizes, strict=True):
        copy_spans(data, bounds[at : at + count], piece.data, start, size)
        at += count
    if layout.kind == "objects":
        return Piece(layout, total, data, bounds, bounds)
    shapes = np.concatenate([piece.side[rows] for piece, rows in parts if piece.side is not None])
    return Piece(layout, total, data, shapes, bounds)


def _extent(piece: Piece, rows: Positions) -> tuple[IntArray, IntArray]:
    """Return where these rows begin in the column, and their sizes."""
    starts = piece.bounds[:-1][rows]
    return starts, piece.bounds[1:][rows] - starts


def _gather_dense(parts: Sequence[tuple[Piece, Positions]], counts: Sequence[int], out: ByteArray) -> ByteArray:
    if out.nbytes == 0:
        return out
    at, row_nbytes = 0, parts[0][0].layout.row_nbytes
    for (piece, rows), count in zip(parts, counts, strict=True):
        if isinstance(rows, slice):
            copy_rows(out, slice(at, at + count), piece.slice(rows.start, rows.stop).data, None, row_nbytes)
        else:
            copy_rows(out, slice(at, at + count), piece.data, rows, row_nbytes)
        at += count
    return out


def pick(pieces: Sequence[Piece], which: IntArray, rows: IntArray) -> list[tuple[Positions, Piece]]:
    """Select row ``rows[i]`` of ``pieces[which[i]]`` for every i, in few parts, each with the positions i that it
    fills.

    Long runs of one column are slices that share its memory. All other rows are copied together, one part per family.
    """
    if len(rows) == 0:
        return []
    cuts = np.flatnonzero((np.diff(which) != 0) | (np.diff(rows) != 1)) + 1
    starts, stops = np.append(0, cuts), np.append(cuts, len(rows))
    if len(starts) == 1:
        return [(slice(0, len(rows)), pieces[which[0]].slice(int(rows[0]), int(rows[-1]) + 1))]
    row_nbytes = np.array([piece.nbytes / max(piece.rows, 1) for piece in pieces])
    lengths = stops - starts
    is_long = lengths * row_nbytes[which[starts]] >= SLICE_NBYTES
    parts: list[tuple[Positions, Piece]] = []
    for start, stop in zip(starts[is_long].tolist(), stops[is_long].tolist(), strict=True):
        first = int(rows[start])
        parts.append((slice(start, stop), pieces[which[start]].slice(first, first + stop - start)))
    if not is_long.all():
        short = np.flatnonzero(np.repeat(~is_long, lengths))
        parts += _copied(pieces, which[short], rows[short], short)
    return parts


def cut(piece: Piece, at: Positions) -> list[tuple[Positions, Piece]]:
    """``pick`` from one wire column."""
    if isinstance(at, slice):
        return [(slice(0, at.stop - at.start), piece.slice(at.start, at.stop))]
    return pick([piece], np.zeros(len(at), np.int64), at)


def groups(labels: NDArray[Any]) -> list[tuple[int, IntArray]]:
    """Return (label, positions with this label), labels and positions ascending."""
    if len(labels) == 0:
        return []
    if len(labels) == 1 or (labels == labels[0]).all():
        return [(int(labels[0]), np.arange(len(labels)))]
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return [(int(labels[part[0]]), part) for part in np.split(order, cuts)]


def _copied(pieces: Sequence[Piece], which: IntArray, rows: IntArray, at: IntArray) -> list[tuple[Positions, Piece]]:
    families: dict[Layout, list[tuple[Piece, IntArray, IntArray]]] = {}
    for number, mine in groups(which):
        families.setdefault(pieces[number].layout.family, []).append((pieces[number], rows[mine], at[mine]))
    return [
        (as_run(np.concatenate([where for *_, where in part])), gather([(piece, chosen) for piece, chosen, _ in part]))
        for part in families.values()
    ]
