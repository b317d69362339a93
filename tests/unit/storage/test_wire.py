# SPDX-License-Identifier: Apache-2.0
"""Column wires: cutting, joining, and what the wire may say about them."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.wire import OBJECTS, WireColumn, as_run, dense_layout, gather, groups, ragged_layout, select

INT = dense_layout("int64", 8, (2,))


def dense(rows: list[list[int]]) -> WireColumn:
    return WireColumn(INT, len(rows), np.array(rows, np.int64).reshape(-1).view(np.uint8))


def ragged(rows: list[list[int]]) -> WireColumn:
    data = np.array([x for row in rows for x in row], np.int64).view(np.uint8)
    return WireColumn(ragged_layout("int64", 8, 1), len(rows), data, np.array([[len(row)] for row in rows]))


def objects(rows: list[bytes]) -> WireColumn:
    sizes = np.array(list(map(len, rows))).reshape(-1, 1)
    return WireColumn(OBJECTS, len(rows), np.frombuffer(b"".join(rows), np.uint8), sizes)


def rows(wire: WireColumn) -> list:
    if wire.layout.kind == "dense":
        return wire.data.view(np.int64).reshape(wire.rows, -1).tolist()
    raw = [wire.data[a:b] for a, b in zip(wire.bounds, wire.bounds[1:], strict=False)]
    return (
        [part.tobytes() for part in raw] if wire.layout == OBJECTS else [part.view(np.int64).tolist() for part in raw]
    )


PIECES = [
    dense([[0, 1], [2, 3], [4, 5], [6, 7]]),
    ragged([[1], [], [2, 3, 4], [5]]),
    objects([b"a", b"", b"bcd", b"e"]),
]


@pytest.mark.parametrize("wire", PIECES, ids=["dense", "ragged", "objects"])
def test_a_slice_holds_its_rows_and_shares_memory(wire):
    part = wire.slice(1, 3)
    assert rows(part) == rows(wire)[1:3]
    assert np.shares_memory(part.data, wire.data)
    assert rows(part.slice(1, 2)) == rows(wire)[2:3]


@pytest.mark.parametrize("wire", PIECES, ids=["dense", "ragged", "objects"])
def test_frames_of_a_slice_make_the_same_piece_again(wire):
    part = wire.slice(1, 4)
    row_meta = None if part.row_meta is None else memoryview(np.ascontiguousarray(part.row_meta)).cast("B")
    assert rows(WireColumn.received(part.layout, 3, part.data, row_meta)) == rows(part)


@pytest.mark.parametrize("wire", PIECES, ids=["dense", "ragged", "objects"])
def test_bytes_of_single_rows_add_up_to_the_piece(wire):
    assert sum(wire.rows_nbytes(np.array([row])) for row in range(4)) == wire.nbytes


@pytest.mark.parametrize("wire", PIECES, ids=["dense", "ragged", "objects"])
def test_gather_copies_rows_in_the_order_asked_for(wire):
    joined = gather([(wire, np.array([3, 0])), (wire.slice(1, 3), np.array([1]))])
    assert rows(joined) == [rows(wire)[3], rows(wire)[0], rows(wire)[2]]
    assert not np.shares_memory(joined.data, wire.data)


def test_gather_makes_dense_rows_of_different_shape_ragged():
    wide = WireColumn(dense_layout("int64", 8, (3,)), 1, np.array([7, 8, 9], np.int64).view(np.uint8))
    joined = gather([(dense([[1, 2]]), np.array([0])), (wide, np.array([0]))])
    assert (joined.layout, rows(joined)) == (ragged_layout("int64", 8, 1), [[1, 2], [7, 8, 9]])


def test_pick_slices_long_runs_and_copies_the_scattered_rest():
    row = dense_layout("uint8", 1, (40_000,))
    big = WireColumn(row, 4, np.repeat(np.arange(4, dtype=np.uint8), 40_000))
    parts = select([big], np.zeros(4, np.int64), np.array([3, 1, 2, 0]))
    assert [(positions, wire.data[::40_000].tolist()) for positions, wire in parts[:1]] == [(slice(1, 3), [1, 2])]
    assert np.shares_memory(parts[0][1].data, big.data)
    (positions, rest) = parts[1]
    assert (positions.tolist(), rest.data[::40_000].tolist()) == ([0, 3], [3, 0])


def test_pick_of_one_run_copies_nothing_however_small():
    wire = PIECES[0]
    ((positions, part),) = select([wire], np.zeros(2, np.int64), np.array([2, 3]))
    assert (positions, rows(part), np.shares_memory(part.data, wire.data)) == (slice(0, 2), [[4, 5], [6, 7]], True)


def test_pick_gives_one_part_per_dtype_and_rank_and_one_for_objects():
    parts = select(PIECES, np.array([0, 2, 1, 0, 2]), np.array([3, 0, 2, 0, 2]))
    assert [(where.tolist() if not isinstance(where, slice) else where, rows(wire)) for where, wire in parts] == [
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
        (ragged_layout("int64", 8, 1), 2, [b"x" * 16, i64(1)], "1 sizes"),
        (ragged_layout("int64", 8, 1), 2, [b"x" * 16, i64(1, -1)], "don't fit its 16 bytes"),
        (ragged_layout("int64", 8, 2), 1, [b"", i64(1 << 40, 1 << 24)], "don't fit its 0 bytes"),
        (ragged_layout("int64", 8, 1), 2, [b"", i64(1 << 61, 0)], "don't fit its 0 bytes"),
        (ragged_layout("int64", 8, 1), 2, [b"x" * 24, i64(1, 1)], "rows end at 16"),
        (OBJECTS, 2, [b"abc", i64(3)], "1 sizes"),
        (OBJECTS, 2, [b"abc", i64(4, -1)], "don't fit its 3 bytes"),
        (OBJECTS, 2, [b"abc", i64(1, 1)], "rows end at 2"),
    ],
)
def test_frames_that_contradict_their_header_are_refused(layout, count, frames, fragment):
    with pytest.raises(ProtocolError, match=fragment):
        WireColumn.received(layout, count, np.frombuffer(frames[0], np.uint8), *frames[1:])
