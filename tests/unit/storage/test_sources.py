# SPDX-License-Identifier: Apache-2.0
"""Sources: whatever a column is made of, its rows are written as the same bytes that its piece has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from transfer_queue.storage.columns import BytesSource, RowsSource, Source, TensorSource, sources
from transfer_queue.storage.wire_columns import Piece, Positions, as_run, gather

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
    "contiguous": (numbers(ROWS, 3), TensorSource),
    "numbers": (numbers(ROWS), TensorSource),
    "bool": (numbers(ROWS, 5) % 3 == 0, TensorSource),
    "bfloat16": (numbers(ROWS, 3).to(torch.bfloat16), TensorSource),
    "float8": (numbers(ROWS, 3).to(torch.float8_e4m3fn), TensorSource),
    "no bytes": (numbers(ROWS, 0, 2), TensorSource),
    "one number": (torch.full((ROWS, 1, 1), 4.0), TensorSource),
    "every other row": (numbers(2 * ROWS, 3)[::2], TensorSource),
    "every other entry": (numbers(ROWS, 6)[:, 1::2], TensorSource),
    "transposed": (numbers(5, ROWS).t(), TensorSource),
    "expanded": (numbers(4).expand(ROWS, 4), TensorSource),
    "part of a larger one": (numbers(ROWS + 5, 3)[2 : ROWS + 2], TensorSource),
    "reversed": (numbers(ROWS, 3).flip(0), TensorSource),
    "conjugated": (torch.complex(numbers(ROWS, 2).float(), numbers(ROWS, 2).float()).conj(), TensorSource),
    "negated imaginary": (torch.complex(numbers(ROWS).float(), numbers(ROWS).float()).conj().imag, TensorSource),
    "conjugated transposed": (torch.complex(numbers(3, ROWS).float(), numbers(3, ROWS).float()).mH, TensorSource),
    "requires grad": (numbers(ROWS, 3).float().requires_grad_(), TensorSource),
    "result of a computation": (numbers(ROWS, 3).float().requires_grad_() * 2, TensorSource),
    "parameter": (torch.nn.Parameter(numbers(ROWS, 3).float()), TensorSource),
    "jagged": (jagged(LENGTHS), TensorSource),
    "jagged with inner dims": (jagged(LENGTHS, 2, 3), TensorSource),
    "jagged with an offset": (jagged(LENGTHS, 2, lead=4), TensorSource),
    "jagged without any values": (jagged([0] * ROWS), TensorSource),
    "jagged that requires grad": (
        torch.nested.nested_tensor_from_jagged(
            numbers(sum(LENGTHS)).float().requires_grad_(), torch.tensor([0, *LENGTHS]).cumsum(0)
        ),
        TensorSource,
    ),
    "strided nested": (torch.nested.as_nested_tensor(RAGGED, layout=torch.strided), RowsSource),
    "list of rows": (RAGGED, RowsSource),
    "list of rows of one shape": ([row[:2] for row in numbers(ROWS, 3, 2)], RowsSource),
    "list of strided rows": ([numbers(4, 3).t() + n for n in range(ROWS)], RowsSource),
    "list of numbers": (list(numbers(ROWS).unbind()), RowsSource),
    "list of rows without bytes": ([numbers(0, 1 + n % 2) for n in range(ROWS)], RowsSource),
    "array": (np.arange(ROWS * 3, dtype=np.int16).reshape(ROWS, 3)[:, ::-1].copy(), TensorSource),
    "texts": (["x" * (n % 4) for n in range(ROWS)], BytesSource),
    "objects": ([{"n": [n] * n} if n % 3 else None for n in range(ROWS)], BytesSource),
}


def source_of(name: str) -> Source:
    column = COLUMNS[name][0]
    return sources(TensorDict({"x": column}, batch_size=[ROWS]) if torch.is_tensor(column) else {"x": column})["x"]


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


def described(piece: Piece) -> tuple:
    side = None if piece.side is None else (piece.side.tolist() if piece.side.ndim == 2 else piece.bounds.tolist())
    return piece.layout, piece.rows, piece.data.tobytes(), side


def written(source: Source, at: Positions, rows: int) -> Piece:
    """Into memory with guards on both sides, copied by somebody who does it later."""
    nbytes, jobs = source.nbytes_of(at), []
    memory = np.full(nbytes + 16, 0xAB, np.uint8)
    piece = source.stored_in(memory[8 : 8 + nbytes], at, rows, lambda dst, src: jobs.append((dst, src)))
    for dst, src in jobs:
        np.copyto(dst, src)
    assert (memory[:8] == 0xAB).all()
    assert (memory[-8:] == 0xAB).all()
    return piece


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_has_the_source_meant_for_it(name):
    source = source_of(name)
    assert (type(source), source.rows) == (COLUMNS[name][1], ROWS)


@pytest.mark.parametrize("name", COLUMNS)
@settings(max_examples=15, deadline=None, print_blob=True)
@given(at=positions())
def test_any_rows_are_written_as_the_bytes_that_the_piece_has_there(name, at):
    source = source_of(name)
    expected = gather([(source.piece(), at)])
    for chosen in {id(at): at, 0: as_run(at)}.values():
        assert described(written(source, chosen, len(at))) == described(expected)
        assert source.nbytes_of(chosen) == expected.data.nbytes


def test_a_piece_shares_the_memory_of_a_tensor_that_lies_as_it_should():
    tensor = numbers(ROWS, 3)
    assert source_of_tensor(tensor).piece().data.ctypes.data == tensor.data_ptr()


def source_of_tensor(tensor: torch.Tensor) -> Source:
    return sources({"x": tensor})["x"]


def test_what_requires_grad_is_written_without_taking_part_in_a_graph():
    tensor = numbers(ROWS, 3).float().requires_grad_()
    written(source_of_tensor(tensor), slice(0, ROWS), ROWS)
    written(source_of_tensor(tensor.t().contiguous().t()), slice(2, 7), 5)
    assert tensor.grad is None
    assert tensor.requires_grad
