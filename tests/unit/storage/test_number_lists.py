# SPDX-License-Identifier: Apache-2.0
"""Lists of numbers become one tensor, and no number changes in silence on the way."""

from __future__ import annotations

import array
import math
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import transfer_queue as tq
from transfer_queue.storage.number_lists import number_column

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
INTS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.one_of(st.booleans(), st.integers(), st.floats(), st.floats(width=32))
ANY = st.one_of(NUMBERS, st.none(), st.text(max_size=2), st.lists(st.integers(0, 3), max_size=2), st.complex_numbers())


def rows_of(column: torch.Tensor) -> list[list[Any]]:
    return [row.tolist() for row in column.unbind()]


def as_float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]  # type: ignore[no-any-return]


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1], [2]], [[], []]], ids=str)
def test_arrays_of_every_type_code_keep_their_dtype(code, rows):
    arrays = [array.array(code, row) for row in rows]
    size = arrays[0].itemsize * 8
    kind = "float" if code in "fd" else "uint" if code.isupper() else "int"
    for column in (number_column(arrays, "x"), tq.ragged(arrays)):
        assert column is not None
        assert (str(column.dtype), rows_of(column)) == (f"torch.{kind}{size}", rows)


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.lists(st.lists(INTS), min_size=1))
def test_ints_of_64_bits_come_back_as_they_are_and_an_empty_list_keeps_its_row(lists):
    column = tq.ragged(lists)
    assert (column.dtype, rows_of(column)) == (torch.int64, lists)


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.lists(st.lists(NUMBERS), min_size=1))
def test_numbers_of_all_kinds_are_kept_or_refused(lists):
    numbers = [number for row in lists for number in row]
    try:
        column = number_column(lists, "x")
    except tq.TransferQueueError:  # floats that are no float32, or ints among floats that it doesn't have
        assert any(type(number) is float for number in numbers)
        return
    if column is None:  # stays as it is
        assert any(isinstance(number, int) and not -(2**63) <= number < 2**63 for number in numbers)
        return
    assert len(column) == len(lists)
    found = [number for row in rows_of(column) for number in row]
    if column.dtype == torch.float32:
        assert any(type(number) is float for number in numbers)
        expected = [as_float32(number) if type(number) is float else number for number in numbers]
        assert all(map(same, found, expected))
    else:
        assert column.dtype == (torch.bool if numbers and all(type(n) is bool for n in numbers) else torch.int64)
        assert found == numbers


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.lists(st.lists(ANY), min_size=1))
@example([[3.5e38, None]])
def test_a_column_with_anything_else_is_left_alone(lists):
    others = [value for row in lists for value in row if not isinstance(value, (bool, int, float))]
    if others:
        assert number_column(lists, "x") is None


@pytest.mark.parametrize(
    ("lists", "dtype", "rows"),
    [
        ([[1, 2], [3, 4]], torch.int64, [[1, 2], [3, 4]]),
        ([[True, False], [True]], torch.bool, [[True, False], [True]]),
        ([[True], [2, 3]], torch.int64, [[1], [2, 3]]),
        ([[1, 2], [0.5]], torch.float32, [[1.0, 2.0], [0.5]]),
        ([[], []], torch.int64, [[], []]),
        ([[], [0.5, -math.inf, 2**24]], torch.float32, [[], [0.5, -math.inf, 2.0**24]]),
        ([array.array("f", [0.5]), array.array("f")], torch.float32, [[0.5], []]),
        ([array.array("d", [0.1]), array.array("d", [1.0, 2.0])], torch.float64, [[0.1], [1.0, 2.0]]),
        ([array.array("H", [1]), [2, 3]], torch.int64, [[1], [2, 3]]),
    ],
)
def test_the_dtype_follows_from_the_numbers(lists, dtype, rows):
    column = number_column(lists, "x")
    assert column is not None
    assert (column.dtype, rows_of(column)) == (dtype, rows)
    assert column.is_nested == (len(set(map(len, rows))) > 1)
    jagged = tq.ragged(lists)
    assert (jagged.is_nested, jagged.dtype, rows_of(jagged)) == (True, dtype, rows)


@pytest.mark.parametrize(
    "column",
    [
        [[1, None], [2]], [[2**63], [1]], [["a"], ["b", "c"]], [[[1], [2]], [[3]]], [{"a": 1}, {}], [[1], None],
        [(1, 2), (3,)], [[1j], [1]], [[Decimal(1), 0.5], [1]], [[np.float32(1)], [2.0]], ["ab", "c"], [[2**63], [0.5]],
        [[0.5, 2**200]], [[0.5, None]], [[torch.ones(1)], [2.0]], [np.arange(2), np.arange(3)], [],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_list_of_numbers_is_left_alone(column):
    assert number_column(column, "x") is None


@pytest.mark.parametrize(
    ("lists", "row"),
    [
        ([[0.5], [1, 2**24 + 1]], 1),
        ([[0.5, -(2**60) - 1]], 0),
        ([[1.0], [], [1e300]], 2),
    ],
)
def test_a_number_that_float32_does_not_have_is_refused_with_its_row_and_the_way_out(lists, row):
    with pytest.raises(ValueError, match=rf"field 'x'.*float32.* row {row} .*tq\.ragged\(lists, torch\.float64\)"):
        number_column(lists, "x")


@pytest.mark.parametrize(
    ("lists", "dtype", "rows"),
    [
        ([[1, 2], [], [3]], torch.int32, [[1, 2], [], [3]]),
        ([[1, 0], [True]], torch.bool, [[True, False], [True]]),
        ([[1, 0.1]], torch.float64, [[1.0, 0.1]]),
        ([[1, 0.5], [3]], torch.bfloat16, [[1.0, 0.5], [3.0]]),
        ([(1, 0.5), (3,)], torch.float16, [[1.0, 0.5], [3.0]]),
        ([np.array([1, 2]), np.array([3])], torch.uint8, [[1, 2], [3]]),
        ([np.array([1.5]), np.array([], np.float64)], None, [[1.5], []]),
        ([np.array([1], np.int16), np.array([2, 3], np.int16)], None, [[1], [2, 3]]),
        ([], None, []),
        ([], torch.float32, []),
    ],
)
def test_a_dtype_may_be_given_and_arrays_bring_theirs(lists, dtype, rows):
    column = tq.ragged(lists, dtype)
    assert rows_of(column) == rows
    assert column.dtype == (dtype or (torch.from_numpy(lists[0]).dtype if lists else torch.int64))


@pytest.mark.parametrize(
    ("lists", "dtype", "text"),
    [
        ([[1], [300]], torch.uint8, "row 1"), ([[1], [-1]], torch.uint64, "row 1"), ([[0.5]], torch.int64, "row 0"),
        ([[2]], torch.bool, "2 can't become"), ([[1e300]], torch.float32, "row 0"), ([["1"]], torch.float32, "row 0"),
        ([[None]], torch.float64, "row 0"), ([[1]], torch.complex64, "complex64"), ([["a"]], None, "NonTensorStack"),
        ([np.ones(2, np.longdouble)], None, "NonTensorStack"),
    ],
)  # fmt: skip
def test_what_the_dtype_can_not_hold_is_refused(lists, dtype, text):
    with pytest.raises(ValueError, match=text):
        tq.ragged(lists, dtype)
