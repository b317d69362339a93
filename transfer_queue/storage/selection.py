# SPDX-License-Identifier: Apache-2.0
"""Choosing rows of column pieces: as slices where they lie together, else copied into one new piece. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.pieces import Allocate, ByteArray, IntArray, Layout, Piece, Positions
from transfer_queue.storage.spans import as_words, copy_spans

SLICE_NBYTES = 64 * 1024
"""Runs of rows at least this long travel as they lie; shorter ones are copied together: a frame costs more."""


def as_run(positions: IntArray) -> Positions:
    """The same positions, as a slice when they are consecutive."""
    count = len(positions)
    if count == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first == count - 1 and (count < 3 or bool((np.diff(positions) == 1).all())):
        return slice(first, first + count)
    return positions


def heap(nbytes: int) -> ByteArray:
    """Memory of this process."""
    return np.empty(nbytes, np.uint8)


def gather(parts: Sequence[tuple[Piece, IntArray]], allocate: Allocate = heap) -> Piece:
    """Copy these rows of these pieces, all of one family, into one new piece, in this order."""
    layout = parts[0][0].layout
    if any(piece.layout != layout for piece, _ in parts):
        parts, layout = [(piece.as_ragged(), rows) for piece, rows in parts], layout.family
    total = sum(len(rows) for _, rows in parts)
    if layout.kind == "dense":
        return Piece(layout, total, _gather_dense(parts, allocate(total * layout.row_nbytes), layout.row_nbytes))
    sizes = np.concatenate([piece.bounds[rows + 1] - piece.bounds[rows] for piece, rows in parts])
    bounds = np.zeros(total + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    data = allocate(int(bounds[-1]))
    at = 0
    for piece, rows in parts:
        end = at + len(rows)
        copy_spans(data, bounds[at:end], piece.data, piece.bounds[rows], sizes[at:end])
        at = end
    if layout.kind == "objects":
        return Piece(layout, total, data, bounds, bounds)
    shapes = np.concatenate([piece.side[rows] for piece, rows in parts if piece.side is not None])
    return Piece(layout, total, data, shapes, bounds)


def _gather_dense(parts: Sequence[tuple[Piece, IntArray]], out: ByteArray, row_nbytes: int) -> ByteArray:
    if out.nbytes == 0:
        return out
    at = 0
    for piece, rows in parts:
        target, source = as_words(out[at : at + len(rows) * row_nbytes], piece.data, row_nbytes)
        # mode="clip" writes straight into ``out``; the default would go through a buffer.
        np.take(source, rows, axis=0, out=target, mode="clip")
        at += len(rows) * row_nbytes
    return out


def pick(pieces: Sequence[Piece], which: IntArray, rows: IntArray) -> list[tuple[Positions, Piece]]:
    """Row ``rows[i]`` of ``pieces[which[i]]`` for every i, in few parts, each with the positions i that it fills.

    Long runs of one piece are slices that share its memory; all other rows are copied together, one part per family.
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


def groups(labels: NDArray[Any]) -> list[tuple[int, IntArray]]:
    """(label, positions that carry it), labels and positions ascending."""
    if len(labels) == 0:
        return []
    if (labels == labels[0]).all():
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
