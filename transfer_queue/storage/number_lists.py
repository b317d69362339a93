# SPDX-License-Identifier: Apache-2.0
"""Lists of numbers to one tensor, in the client: rollouts come as Python lists, one per sample."""

from __future__ import annotations

import array
import itertools
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.errors import InvalidRequestError
from transfer_queue.storage.wire import running_sum

Flat: TypeAlias = NDArray[Any]
Rows: TypeAlias = Sequence[Sequence[Any]]

_FORMATS = {
    torch.int64: "q", torch.int32: "i", torch.int16: "h", torch.int8: "b",
    torch.uint64: "Q", torch.uint32: "I", torch.uint16: "H", torch.uint8: "B",
    torch.float64: "d", torch.float32: "f", torch.float16: "e",
}  # fmt: skip
_VIA = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}
"""Dtypes that ``struct`` does not write as they are."""
_NUMBERS = frozenset((bool, int, float))
_MOST_DIMS = 64
"""Of a tensor. Lists that are deeper may contain themselves."""
_EXACT = 1 << 24
"""Up to here, float32 has every whole number."""


def ragged(lists: Rows, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A jagged tensor with one row per list of numbers, also for empty lists; several times faster than row by row.

    Args:
        lists: Lists, tuples, arrays of the standard library, or one-dimensional NumPy arrays.
        dtype: None: bools become bool, ints int64, and floats float32 even if ints are among them; arrays of one dtype
            keep it. Without any number it is int64.
    Raises:
        InvalidRequestError: a value is no number, or the dtype can't hold it; names the row. It is a ValueError.
    Examples:
        >>> [row.tolist() for row in tq.ragged([[1, 2, 3], [], [4]], torch.int32).unbind()]
        [[1, 2, 3], [], [4]]
    """
    flat = _of_default(lists, "ragged()") if dtype is None else _of_dtype(lists, dtype)
    if flat is None:
        raise InvalidRequestError(
            "ragged() takes lists of numbers, got other values, or ints beyond 64 bits. Store them as objects: "
            "put a NonTensorStack(*lists) of tensordict."
        )
    return _cut(flat, lists)


def number_column(lists: Rows, field: str) -> torch.Tensor | None:
    """What ``put`` makes of a column of lists: dense if all are of one length, else jagged; None: not of numbers.

    Raises:
        InvalidRequestError: a number among floats is not a float32, or too large for one.
    """
    if not lists or not all(type(row) in (list, array.array) for row in lists):
        return None
    flat = _of_default(lists, f"field {field!r}")
    if flat is None:
        return None
    return flat.view(len(lists), -1 if len(flat) else 0) if len(set(map(len, lists))) == 1 else _cut(flat, lists)


def dense_column(column: Sequence[Any], field: str) -> torch.Tensor | None:
    """What ``put`` makes of plain numbers, and of lists of lists of one shape; None: other values, or other shapes.

    Raises:
        InvalidRequestError: a number among floats is not a float32, or too large for one.
    """
    shape: list[int] = []
    first: Any = list(column)
    while type(first) is list and len(shape) < _MOST_DIMS:
        shape.append(len(first))
        first = first[0] if first else 0
    if not isinstance(first, (bool, int, float, torch.Tensor)):
        return None
    values = list(column)
    for size in shape[1:]:
        if any(type(each) is not list or len(each) != size for each in values):
            return None
        values = list(itertools.chain.from_iterable(values))
    kinds = set(map(type, values))
    if len(shape) > 1 and all(isinstance(value, torch.Tensor) for value in values) and values:
        first = values[0].shape
        return torch.stack(values).view(*shape, *first) if all(value.shape == first for value in values) else None
    if np.float64 in kinds and kinds <= {*_NUMBERS, np.float64}:
        return torch.tensor(values, dtype=torch.float64).view(shape)
    if not kinds <= _NUMBERS:
        return None
    try:
        flat = _of_default([values], f"field {field!r}")
    except InvalidRequestError:  # once more, to name the row
        per_row = len(values) // len(column)
        flat = _of_default([values[at : at + per_row] for at in range(0, len(values), per_row)], f"field {field!r}")
    return None if flat is None else flat.view(shape)


def _cut(flat: torch.Tensor, lists: Rows) -> torch.Tensor:
    offsets = running_sum(np.fromiter(map(len, lists), np.int64, len(lists)))
    return torch.nested.nested_tensor_from_jagged(flat, torch.from_numpy(offsets))


def _of_default(lists: Rows, what: str) -> torch.Tensor | None:
    """All numbers back to back, in the dtype that follows from them. None: some are none, or too large."""
    typed = _typed(lists)
    if typed is not None:
        return torch.from_numpy(typed)
    firsts = [type(row[0]) for row in lists if len(row)]
    if not _NUMBERS.issuperset(firsts):
        return None
    if firsts[:1] == [bool] and all(type(number) is bool for row in lists for number in row):
        return torch.from_numpy(_packed(lists, "?", np.dtype(bool)))
    try:
        # It takes whatever is an index, so bools among ints too, and no float: nothing is cut off.
        return torch.from_numpy(_packed(lists, "q", np.dtype(np.int64)))
    except _PackError as error:
        return _of_floats(lists, what) if float in map(type, lists[error.row]) else None


def _of_floats(lists: Rows, what: str) -> torch.Tensor | None:
    try:
        flat = _packed(lists, "f", np.dtype(np.float32))
    except _PackError as error:
        if error.is_too_large and all(_NUMBERS.issuperset(map(type, row)) for row in lists):
            raise _lost(what, error.row, error.text) from None
        return None
    _check_whole_numbers(flat, lists, what)
    return torch.from_numpy(flat)


def _of_dtype(lists: Rows, dtype: torch.dtype) -> torch.Tensor:
    written = _VIA.get(dtype, dtype)
    if written not in _FORMATS:
        raise InvalidRequestError(f"ragged() can't make {dtype}; make {torch.float32}, and cast it.")
    try:
        flat = torch.from_numpy(_packed(lists, _FORMATS[written], torch.empty(0, dtype=written).numpy().dtype))
    except _PackError as error:
        raise InvalidRequestError(f"ragged(): row {error.row} can't become {dtype}: {error.text}.") from None
    if dtype == torch.bool and len(flat) and flat.max() > 1:
        raise InvalidRequestError(
            f"ragged(): {int(flat.max())} can't become {dtype}, which takes True, False, 1 and 0."
        )
    return flat.to(dtype)


class _PackError(Exception):
    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(row, error)
        self.row, self.text, self.is_too_large = row, str(error), isinstance(error, OverflowError)


def _packed(lists: Rows, code: str, dtype: np.dtype[Any]) -> Flat:
    """All numbers back to back. ``struct`` writes a whole list per call, and checks each number."""
    flat = np.empty(sum(map(len, lists)), dtype)
    if not len(flat):
        return flat
    # "=" refuses floats that are too large, which a native "f" makes infinite.
    order, size, begin, out = "=" if code in "ef" else "@", dtype.itemsize, 0, flat.view(np.uint8).data
    for row, numbers in enumerate(lists):
        try:
            struct.pack_into(f"{order}{len(numbers)}{code}", out, begin, *numbers)
        except (struct.error, OverflowError, TypeError, ValueError, RuntimeError) as error:
            raise _PackError(row, error) from None
        begin += len(numbers) * size
    return flat


def _typed(lists: Rows) -> Flat | None:
    """Rows that are arrays of one dtype, joined."""
    if not lists or not all(isinstance(row, (array.array, np.ndarray)) for row in lists):
        return None
    rows = [np.asarray(row) for row in lists]
    dtype = rows[0].dtype
    if len({(row.dtype, row.ndim) for row in rows}) > 1 or rows[0].ndim != 1 or dtype.kind not in "biuf":
        return None
    if dtype.char == "g":  # no tensor holds a longdouble
        return None
    return np.concatenate(rows).view(f"{dtype.kind}{dtype.itemsize}")  # torch knows no "unsigned long long"


def _check_whole_numbers(flat: Flat, lists: Rows, what: str) -> None:
    """Among floats, an int that float32 does not have would become its neighbour."""
    if np.fmax.reduce(flat) < _EXACT and np.fmin.reduce(flat) > -_EXACT:
        return
    ends = np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)))
    for position in np.flatnonzero((np.abs(flat) >= _EXACT) & np.isfinite(flat)):
        row = int(np.searchsorted(ends, position, side="right"))
        number = lists[row][int(position - ends[row])]
        if isinstance(number, int) and int(flat[position]) != number:
            raise _lost(what, row, f"{number} would become {int(flat[position])}")


def _lost(what: str, row: int, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}: numbers with floats become float32, and row {row} does not fit: {why}. "
        f"Put tq.ragged(lists, torch.float64), or torch.tensor(column, dtype=torch.float64)."
    )
