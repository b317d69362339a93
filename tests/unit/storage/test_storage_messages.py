# SPDX-License-Identifier: Apache-2.0
"""What travels between a storage client and a unit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import ProtocolError, StorageFullError
from transfer_queue.protocol import Done, Failed, encode, encode_request, message_decoder, pack_indexes
from transfer_queue.storage.messages import (
    AskUnitStats,
    ColumnHeader,
    Columns,
    Commit,
    Delete,
    EndSession,
    LeasedMemory,
    LeaseMemory,
    Packer,
    Read,
    Release,
    Write,
    decode_answer,
    decode_columns,
    encode_columns,
    unpack_columns,
)
from transfer_queue.storage.wire import WireColumn, dense_layout, ragged_layout

INT = dense_layout("int64", 8, ())


def wire(*numbers: int) -> WireColumn:
    return WireColumn(INT, len(numbers), np.array(numbers, np.int64).view(np.uint8))


REQUESTS = [
    LeaseMemory(1, 4096, b"12345678", ["a"], 2.5),
    Write(2, b"12345678", Columns([ColumnHeader("a", INT, 1)], [b"table"], 1), 2.5),
    Commit(3, [("me", 2), ("other", 1)]),
    Read(4, b"", ["a"], True),
    Delete(5, b"12345678"),
    Release(7, [1, 4]),
    EndSession(8, "me", [("other", 1), ("me", 2)]),
    AskUnitStats(9),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_is_the_same_after_the_wire(request_):
    decode = message_decoder(*map(type, REQUESTS))
    assert decode(encode_request(request_, [7])) == msgspec.structs.replace(
        decode(encode_request(AskUnitStats(0))), received=[7], request=request_
    )


def test_columns_are_the_same_after_the_wire():
    columns = Columns([ColumnHeader("a", INT, 1, 2, 0, 4096, 8, 1)], [b"table"], 3)
    assert decode_columns(encode_columns(columns)) == columns


@pytest.mark.parametrize("decode", [decode_columns, lambda header: decode_answer(header, LeasedMemory)])
@pytest.mark.parametrize(
    "header", [b"", b"\xc1", b"nonsense", encode(["NoSuchMessage", 1]), encode(["LeasedMemory", "x"])]
)
def test_what_is_no_message_is_a_protocol_error(decode, header):
    with pytest.raises(ProtocolError, match="can't be decoded"):
        decode(header)


def test_an_answer_of_another_kind_is_a_protocol_error_and_a_refusal_is_raised():
    assert decode_answer(encode(LeasedMemory(1, 4096)), LeasedMemory) == LeasedMemory(1, 4096)
    with pytest.raises(ProtocolError, match="answered Done, expected LeasedMemory"):
        decode_answer(encode(Done(1)), LeasedMemory)
    with pytest.raises(StorageFullError, match="no room"):
        decode_answer(encode(Failed(1, "StorageFullError", "no room")), LeasedMemory)


def test_parts_keep_their_positions_and_bytes():
    given = [("a", slice(1, 3), wire(5, 6)), ("b", np.array([2, 0]), wire(7, 8))]
    packer = Packer()
    for part in given:
        packer.add(*part)
    frames = [memoryview(frame).cast("B") for frame in packer.frames]
    (a, b) = unpack_columns(packer.headers, packer.tables, frames, 3)
    assert (a[:2], a[2].data.tobytes()) == (("a", slice(1, 3)), given[0][2].data.tobytes())
    assert (b[0], b[1].tolist(), b[2].data.tobytes()) == ("b", [2, 0], given[1][2].data.tobytes())


@pytest.mark.parametrize(
    ("part", "frames", "fragment"),
    [
        (ColumnHeader("a", INT, 1), [], "need 1 frames"),
        (ColumnHeader("a", INT, 1), [b"12345678"] * 2, "2 came"),
        (ColumnHeader("a", INT, 0), [b""], "has 0 rows"),
        (ColumnHeader("a", INT, -1), [b""], "has -1 rows"),
        (ColumnHeader("a", INT, 2, 1), [b"x" * 16], "but 2 indexes"),
        (ColumnHeader("a", INT, 1, -1), [b"12345678"], "but 2 indexes"),
        (ColumnHeader("a", INT, 1, 0, 0), [b"12345678"], "don't fit"),
        (ColumnHeader("a", INT, 2, 0, 0), [b"x" * 16], "don't fit"),
        (ColumnHeader("a", INT, 2, 0, 1), [b"x" * 16], "table 1 of 1"),
        (ColumnHeader("a", INT, 1, 0, -1, 4096, 8), [], "not mapped here"),
    ],
)
def test_parts_that_name_what_is_not_there_are_refused(part, frames, fragment):
    with pytest.raises(ProtocolError, match=fragment):
        unpack_columns([part], [pack_indexes(np.array([2]))], frames, 2)


@pytest.mark.parametrize(
    ("layout", "selection", "row_meta"),
    [
        (INT, [4], None),
        (INT, [-1], None),
        (INT, [0, 1], None),
        (dense_layout("int64", 8, (-2,)), [0], None),
        (ragged_layout("int64", 8, 1), [24], [2]),
        (ragged_layout("int64", 8, 1), [0], [-1]),
    ],
)
def test_rows_that_reach_out_of_their_block_are_refused(layout, selection, row_meta):
    part = ColumnHeader("a", layout, 1, 0, -1, 0, 32, 0)
    frames = [] if row_meta is None else [np.array(row_meta, np.int64)]
    with pytest.raises(ProtocolError):
        unpack_columns(
            [part], [pack_indexes(np.array(selection))], frames, 1, lambda at, nbytes: np.zeros(nbytes, np.uint8)
        )


def test_fields_whose_rows_lie_alike_share_a_table():
    packer = Packer()
    for name in "ab":
        rows = WireColumn(INT, 2, np.zeros(80, np.uint8), selection=np.array([9, 3]))
        packer.add(name, np.array([1, 0]), rows, 4096)
    assert [pack_indexes(np.array(numbers)) for numbers in ([1, 0], [9, 3])] == packer.tables
