# SPDX-License-Identifier: Apache-2.0
"""Column pieces: cutting, joining, and what the wire may say about them."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.wire_columns import (
    OBJECTS,
    Piece,
    as_run,
    dense_layout,
    gather,
    groups,
    pick,
    ragged_layout,
)

INT = dense_layout("int64", 8, (2,))
TEXT = OBJECTS


def dense(rows: list[list[int]]) -> Piece:
    return Piece(INT, len(rows), np.array(rows, np.int64).reshape(-1).view(np.uint8))


def ragged(rows: list[list[int]]) -> Piece:
    data = np.array([x for row in rows for x in row], np.int64).view(np.uint8)
    return Piece(ragged_layout("int64", 8, 1), len(rows), data, np.array([[len(row)] for row in rows]))


def objects(rows: list[bytes]) -> Piece:
    offsets = np.cumsum([0, *map(len, rows)])
    return Piece(OBJECTS, len(rows), np.frombuffer(b"".join(rows), np.uint8), offsets)


def rows(piece: Piece) -> list:
    if piece.layout.kind == "dense":
        return piece.data.view(np.int64).reshape(piece.rows, -1).tolist()
    raw = [piece.data[a:b] for a, b in zip(piece.bounds, piece.bounds[1:], strict=False)]
    return (
        [part.tobytes() for part in raw] if piece.layout == OBJECTS else [part.view(np.int64).tolist() for part in raw]
    )


PIECES = [
    dense([[0, 1], [2, 3], [4, 5], [6, 7]]),
    ragged([[1], [], [2, 3, 4], [5]]),
    objects([b"a", b"", b"bcd", b"e"]),
]


@pytest.mark.parametrize("piece", PIECES, ids=["dense", "ragged", "objects"])
def test_a_slice_holds_its_rows_and_shares_memory(piece):
    part = piece.slice(1, 3)
    assert rows(part) == rows(piece)[1:3]
    assert np.shares_memory(part.data, piece.data)
    assert rows(part.slice(1, 2)) == rows(piece)[2:3]


@pytest.mark.parametrize("piece", PIECES, ids=["dense", "ragged", "objects"])
def test_frames_of_a_slice_make_the_same_piece_again(piece):
    part = piece.slice(1, 4)
    side = None if part.side is None else memoryview(part.side_frame).cast("B")
    assert rows(Piece.received(part.layout, 3, part.data, side)) == rows(part)


@pytest.mark.parametrize("piece", PIECES, ids=["dense", "ragged", "objects"])
def test_bytes_of_single_rows_add_up_to_the_piece(piece):
    assert sum(piece.rows_nbytes(np.array([row])) for row in range(4)) == piece.nbytes


@pytest.mark.parametrize("piece", PIECES, ids=["dense", "ragged", "objects"])
def test_gather_copies_rows_in_the_order_asked_for(piece):
    joined = gather([(piece, np.array([3, 0])), (piece.slice(1, 3), np.array([1]))])
    assert rows(joined) == [rows(piece)[3], rows(piece)[0], rows(piece)[2]]
    assert not np.shares_memory(joined.data, piece.data)


def test_gather_makes_dense_rows_of_different_shape_ragged():
    wide = Piece(dense_layout("int64", 8, (3,)), 1, np.array([7, 8, 9], np.int64).view(np.uint8))
    joined = gather([(dense([[1, 2]]), np.array([0])), (wide, np.array([0]))])
    assert (joined.layout, rows(joined)) == (ragged_layout("int64", 8, 1), [[1, 2], [7, 8, 9]])


def test_pick_slices_long_runs_and_copies_the_scattered_rest():
    row = dense_layout("uint8", 1, (40_000,))
    big = Piece(row, 4, np.repeat(np.arange(4, dtype=np.uint8), 40_000))
    parts = pick([big], np.zeros(4, np.int64), np.array([3, 1, 2, 0]))
    assert [(positions, piece.data[::40_000].tolist()) for positions, piece in parts[:1]] == [(slice(1, 3), [1, 2])]
    assert np.shares_memory(parts[0][1].data, big.data)
    (positions, rest) = parts[1]
    assert (positions.tolist(), rest.data[::40_000].tolist()) == ([0, 3], [3, 0])


def test_pick_of_one_run_copies_nothing_however_small():
    piece = PIECES[0]
    ((positions, part),) = pick([piece], np.zeros(2, np.int64), np.array([2, 3]))
    assert (positions, rows(part), np.shares_memory(part.data, piece.data)) == (slice(0, 2), [[4, 5], [6, 7]], True)


def test_pick_gives_one_part_per_dtype_and_rank_and_one_for_objects():
    parts = pick(PIECES, np.array([0, 2, 1, 0, 2]), np.array([3, 0, 2, 0, 2]))
    assert [(where.tolist() if not isinstance(where, slice) else where, rows(piece)) for where, piece in parts] == [
        ([0, 3, 2], [[6, 7], [0, 1], [2, 3, 4]]),
        ([1, 4], [b"a", b"bcd"]),
    ]


def test_consecutive_positions_are_a_slice_and_others_stay_an_array():
    assert as_run(np.array([4, 5, 6])) == slice(4, 7)
    assert as_run(np.array([], np.int64)) == slice(0, 0)
    assert as_run(np.array([4, 6, 5, 7])).tolist() == [4, 6, 5, 7]
    assert as_run(np.array([5, 4])).tolist() == [5, 4]


def test_groups_keep_order_within_a_label():
    assert [(label, at.tolist()) for label, at in groups(np.array([2, 0, 2, 0]))] == [(0, [1, 3]), (2, [0, 2])]
    assert groups(np.zeros(0, np.int64)) == []


def i64(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


@pytest.mark.parametrize(
    ("layout", "count", "frames", "fragment"),
    [
        (INT, 2, [b"x" * 31], "31 bytes"),
        (dense_layout("int64", 8, (-1, -2)), 1, [b"x" * 16], "16 bytes"),
        (ragged_layout("int64", 8, 1), 2, [b"x" * 16, i64(1)], "1 offsets"),
        (ragged_layout("int64", 8, 1), 2, [b"x" * 16, i64(1, -1)], "row shapes"),
        (ragged_layout("int64", 8, 2), 1, [b"", i64(1 << 40, 1 << 24)], "row shapes"),
        (ragged_layout("int64", 8, 1), 2, [b"", i64(1 << 61, 0)], "row shapes"),
        (ragged_layout("int64", 8, 1), 2, [b"x" * 24, i64(1, 1)], "rows end at 16"),
        (OBJECTS, 2, [b"abc", i64(0, 2)], "2 offsets"),
        (OBJECTS, 2, [b"abc", i64(0, 4, 3)], "rows end at"),
        (OBJECTS, 2, [b"abc", i64(0, 1, 2)], "rows end at 2"),
    ],
)
def test_frames_that_contradict_their_header_are_refused(layout, count, frames, fragment):
    with pytest.raises(ProtocolError, match=fragment):
        Piece.received(layout, count, np.frombuffer(frames[0], np.uint8), *frames[1:])
