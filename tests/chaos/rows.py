# SPDX-License-Identifier: Apache-2.0
"""Rows whose every value follows from their number, so that nobody needs to be asked whether one is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PUT = ("number", "tokens", "vector", "text")
SCORED = (*PUT, "score")
_LONGEST = 300


class WrongValueError(AssertionError):
    """A value isn't the one that was put for this sample and field."""


def rows_of(numbers: Sequence[int], width: int, fields: Sequence[str] = PUT) -> dict[str, Any]:
    """Columns for ``client.put``. ``width``: numbers in one vector, of 8 bytes each."""
    columns = {name: [_value(name, number, width) for number in numbers] for name in fields}
    return {name: _column(name, values) for name, values in columns.items()}


def check_rows(data: Any, width: int, fields: Sequence[str] = PUT) -> list[int]:
    """The numbers of these rows. Raises WrongValueError unless every value is that of its row."""
    numbers: list[int] = data["number"].tolist()
    for name in fields:
        for number, found in zip(numbers, _rows(data[name]), strict=True):
            wanted = _value(name, number, width)
            same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
            if not same:
                raise WrongValueError(f"field {name!r} of row {number} is {found!r}, and {wanted!r} was put")
    return numbers


def _value(name: str, number: int, width: int) -> Any:
    if name == "text":
        return f"row {number} " * (1 + number % 5)
    if name == "tokens":
        return torch.arange(1 + number * 7919 % _LONGEST) + number
    if name == "vector":
        return torch.arange(width, dtype=torch.float64) - number
    return torch.tensor(number * 0.5 - 1.0) if name == "score" else torch.tensor(number)


def _column(name: str, values: list[Any]) -> Any:
    if name == "text":
        return values
    if name == "tokens":
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return torch.stack(values)


def _rows(column: Any) -> list[Any]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)
