# SPDX-License-Identifier: Apache-2.0
"""Columns in memory: whatever one is made of, its rows are written as the bytes of its wire column."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from transfer_queue.storage.pack import BytesColumn, Column, RowsColumn, TensorColumn, prepare
from transfer_queue.storage.wire import WireColumn

ROWS = 12


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=dtype).view(shape)


def jagged(lengths: list[int], *inner: int, lead: int = 0) -> torch.Tensor:
    """``lead``: values before the first row, as a view of a larger batch has."""
    offsets = torch.tensor([lead, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(numbers(int(offsets[-1]) + 3, *inner)[: offsets[-1]], offsets)


LENGTHS = [n % 5 for n in range(ROWS)]
RAGGED = [numbers(n % 4, 1 + n % 3) + n for n in range(ROWS)]
COLUMNS = {
    "contiguous": (numbers(ROWS, 3), BytesColumn),
    "numbers": (numbers(ROWS), BytesColumn),
    "bool": (numbers(ROWS, 5) % 3 == 0, BytesColumn),
    "bfloat16": (numbers(ROWS, 3).to(torch.bfloat16), BytesColumn),
    "float8": (numbers(ROWS, 3).to(torch.float8_e4m3fn), BytesColumn),
    "no bytes": (numbers(ROWS, 0, 2), BytesColumn),
    "one number": (torch.full((ROWS, 1, 1), 4.0), BytesColumn),
    "every other row": (numbers(2 * ROWS, 3)[::2], TensorColumn),
    "every other entry": (numbers(ROWS, 6)[:, 1::2], TensorColumn),
    "transposed": (numbers(5, ROWS).t(), TensorColumn),
    "expanded": (numbers(4).expand(ROWS, 4), TensorColumn),
    "part of a larger one": (numbers(ROWS + 5, 3)[2 : ROWS + 2], BytesColumn),
    "reversed": (numbers(ROWS, 3).flip(0), BytesColumn),
    "conjugated": (torch.complex(numbers(ROWS, 2).float(), numbers(ROWS, 2).float()).conj(), BytesColumn),
    "negated imaginary": (torch.complex(numbers(ROWS).float(), numbers(ROWS).float()).conj().imag, BytesColumn),
    "conjugated transposed": (torch.complex(numbers(3, ROWS).float(), numbers(3, ROWS).float()).mH, TensorColumn),
    "requires grad": (numbers(ROWS, 3).float().requires_grad_(), BytesColumn),
    "result of a computation": (numbers(ROWS, 3).float().requires_grad_() * 2, BytesColumn),
    "parameter": (torch.nn.Parameter(numbers(ROWS, 3).float()), BytesColumn),
    "jagged": (jagged(LENGTHS), BytesColumn),
    "jagged with inner dims": (jagged(LENGTHS, 2, 3), BytesColumn),
    "jagged with an offset": (jagged(LENGTHS, 2, lead=4), BytesColumn),
    "jagged without any values": (jagged([0] * ROWS), BytesColumn),
    "jagged that requires grad": (
        torch.nested.nested_tensor_from_jagged(
            numbers(sum(LENGTHS)).float().requires_grad_(), torch.tensor([0, *LENGTHS]).cumsum(0)
        ),
        BytesColumn,
    ),
    "strided nested": (torch.nested.as_nested_tensor(RAGGED, layout=torch.strided), RowsColumn),
    "list of rows": (RAGGED, RowsColumn),
    "list of rows of one shape": ([row[:2] for row in numbers(ROWS, 3, 2)], RowsColumn),
    "list of strided rows": ([numbers(4, 3).t() + n for n in range(ROWS)], RowsColumn),
    "list of numbers": (list(numbers(ROWS).unbind()), RowsColumn),
    "list of rows without bytes": ([numbers(0, 1 + n % 2) for n in range(ROWS)], RowsColumn),
    "array": (np.arange(ROWS * 3, dtype=np.int16).reshape(ROWS, 3)[:, ::-1].copy(), BytesColumn),
    "texts": (["x" * (n % 4) for n in range(ROWS)], BytesColumn),
    "objects": ([{"n": [n] * n} if n % 3 else None for n in range(ROWS)], BytesColumn),
}


def column_of(name: str) -> Column:
    column = COLUMNS[name][0]
    given = NonTensorStack(*column) if isinstance(column, list) else column
    return prepare(TensorDict({"x": given}, batch_size=[ROWS]))["x"]


def described(wire: WireColumn) -> tuple:
    return wire.layout, wire.rows, wire.data.tobytes(), None if wire.row_meta is None else wire.row_meta.tolist()


def written(column: Column, rows: slice) -> WireColumn:
    """Into memory with guards on both sides, copied by somebody who does it later."""
    nbytes, jobs = column.nbytes_of(rows), []
    memory = np.full(nbytes + 16, 0xAB, np.uint8)
    wire = column.stored_in(memory[8 : 8 + nbytes], rows, lambda dst, src: jobs.append((dst, src)))
    for dst, src in jobs:
        np.copyto(dst, src)
    assert (memory[:8] == 0xAB).all()
    assert (memory[-8:] == 0xAB).all()
    return wire


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_has_the_source_meant_for_it(name):
    column = column_of(name)
    assert (type(column), column.rows) == (COLUMNS[name][1], ROWS)


@pytest.mark.parametrize("name", COLUMNS)
@settings(max_examples=15, deadline=None, print_blob=True)
@given(start=st.integers(0, ROWS - 1), count=st.integers(1, ROWS))
def test_any_rows_are_written_as_the_bytes_that_the_piece_has_there(name, start, count):
    rows = slice(start, min(ROWS, start + count))
    column = column_of(name)
    expected = column.wire_column().slice(rows.start, rows.stop)
    assert described(written(column, rows)) == described(expected)
    assert column.nbytes_of(rows) == expected.data.nbytes


def test_a_piece_shares_the_memory_of_a_tensor_that_lies_as_it_should():
    tensor = numbers(ROWS, 3)
    assert source_of_tensor(tensor).wire_column().data.ctypes.data == tensor.data_ptr()


def source_of_tensor(tensor: torch.Tensor) -> Column:
    return prepare(TensorDict({"x": tensor}, batch_size=[ROWS]))["x"]


def test_what_requires_grad_is_written_without_taking_part_in_a_graph():
    tensor = numbers(ROWS, 3).float().requires_grad_()
    written(source_of_tensor(tensor), slice(0, ROWS))
    written(source_of_tensor(tensor.t().contiguous().t()), slice(2, 7))
    assert tensor.grad is None
    assert tensor.requires_grad
