# SPDX-License-Identifier: Apache-2.0
"""Columns in memory: whatever one is made of, its rows are written as the bytes of its wire column."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from transfer_queue.storage.pack import BytesColumn, Column, RowsColumn, TensorColumn, prepare
from transfer_queue.storage.wire import Positions, WireColumn, as_run, gather

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
    "contiguous": (numbers(ROWS, 3), TensorColumn),
    "numbers": (numbers(ROWS), TensorColumn),
    "bool": (numbers(ROWS, 5) % 3 == 0, TensorColumn),
    "bfloat16": (numbers(ROWS, 3).to(torch.bfloat16), TensorColumn),
    "float8": (numbers(ROWS, 3).to(torch.float8_e4m3fn), TensorColumn),
    "no bytes": (numbers(ROWS, 0, 2), TensorColumn),
    "one number": (torch.full((ROWS, 1, 1), 4.0), TensorColumn),
    "every other row": (numbers(2 * ROWS, 3)[::2], TensorColumn),
    "every other entry": (numbers(ROWS, 6)[:, 1::2], TensorColumn),
    "transposed": (numbers(5, ROWS).t(), TensorColumn),
    "expanded": (numbers(4).expand(ROWS, 4), TensorColumn),
    "part of a larger one": (numbers(ROWS + 5, 3)[2 : ROWS + 2], TensorColumn),
    "reversed": (numbers(ROWS, 3).flip(0), TensorColumn),
    "conjugated": (torch.complex(numbers(ROWS, 2).float(), numbers(ROWS, 2).float()).conj(), TensorColumn),
    "negated imaginary": (torch.complex(numbers(ROWS).float(), numbers(ROWS).float()).conj().imag, TensorColumn),
    "conjugated transposed": (torch.complex(numbers(3, ROWS).float(), numbers(3, ROWS).float()).mH, TensorColumn),
    "requires grad": (numbers(ROWS, 3).float().requires_grad_(), TensorColumn),
    "result of a computation": (numbers(ROWS, 3).float().requires_grad_() * 2, TensorColumn),
    "parameter": (torch.nn.Parameter(numbers(ROWS, 3).float()), TensorColumn),
    "jagged": (jagged(LENGTHS), TensorColumn),
    "jagged with inner dims": (jagged(LENGTHS, 2, 3), TensorColumn),
    "jagged with an offset": (jagged(LENGTHS, 2, lead=4), TensorColumn),
    "jagged without any values": (jagged([0] * ROWS), TensorColumn),
    "jagged that requires grad": (
        torch.nested.nested_tensor_from_jagged(
            numbers(sum(LENGTHS)).float().requires_grad_(), torch.tensor([0, *LENGTHS]).cumsum(0)
        ),
        TensorColumn,
    ),
    "strided nested": (torch.nested.as_nested_tensor(RAGGED, layout=torch.strided), RowsColumn),
    "list of rows": (RAGGED, RowsColumn),
    "list of rows of one shape": ([row[:2] for row in numbers(ROWS, 3, 2)], RowsColumn),
    "list of strided rows": ([numbers(4, 3).t() + n for n in range(ROWS)], RowsColumn),
    "list of numbers": (list(numbers(ROWS).unbind()), RowsColumn),
    "list of rows without bytes": ([numbers(0, 1 + n % 2) for n in range(ROWS)], RowsColumn),
    "array": (np.arange(ROWS * 3, dtype=np.int16).reshape(ROWS, 3)[:, ::-1].copy(), TensorColumn),
    "texts": (["x" * (n % 4) for n in range(ROWS)], BytesColumn),
    "objects": ([{"n": [n] * n} if n % 3 else None for n in range(ROWS)], BytesColumn),
}


def column_of(name: str) -> Column:
    column = COLUMNS[name][0]
    return prepare(TensorDict({"x": column}, batch_size=[ROWS]) if torch.is_tensor(column) else {"x": column})["x"]


@st.composite
def positions(draw: st.DrawFn) -> np.ndarray:
    kind = draw(st.sampled_from(["run", "some", "any", "all"]))
    if kind == "run":
        start = draw(st.integers(0, ROWS - 1))
        return np.arange(start, draw(st.integers(start + 1, ROWS)))
    if kind == "some":
        return np.array(sorted(draw(st.sets(st.integers(0, ROWS - 1), min_size=1))), np.int64)
    if kind == "any":
        return np.array(draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20)), np.int64)
    return np.arange(ROWS)


def described(wire: WireColumn) -> tuple:
    row_meta = (
        None if wire.row_meta is None else (wire.row_meta.tolist() if wire.row_meta.ndim == 2 else wire.bounds.tolist())
    )
    return wire.layout, wire.rows, wire.data.tobytes(), row_meta


def written(column: Column, at: Positions, rows: int) -> WireColumn:
    """Into memory with guards on both sides, copied by somebody who does it later."""
    nbytes, jobs = column.nbytes_of(at), []
    memory = np.full(nbytes + 16, 0xAB, np.uint8)
    wire = column.stored_in(memory[8 : 8 + nbytes], at, rows, lambda dst, src: jobs.append((dst, src)))
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
@given(at=positions())
def test_any_rows_are_written_as_the_bytes_that_the_piece_has_there(name, at):
    column = column_of(name)
    expected = gather([(column.wire_column(), at)])
    for chosen in {id(at): at, 0: as_run(at)}.values():
        assert described(written(column, chosen, len(at))) == described(expected)
        assert column.nbytes_of(chosen) == expected.data.nbytes


def test_a_piece_shares_the_memory_of_a_tensor_that_lies_as_it_should():
    tensor = numbers(ROWS, 3)
    assert source_of_tensor(tensor).wire_column().data.ctypes.data == tensor.data_ptr()


def source_of_tensor(tensor: torch.Tensor) -> Column:
    return prepare({"x": tensor})["x"]


def test_what_requires_grad_is_written_without_taking_part_in_a_graph():
    tensor = numbers(ROWS, 3).float().requires_grad_()
    written(source_of_tensor(tensor), slice(0, ROWS), ROWS)
    written(source_of_tensor(tensor.t().contiguous().t()), slice(2, 7), 5)
    assert tensor.grad is None
    assert tensor.requires_grad
