# SPDX-License-Identifier: Apache-2.0
"""Runs a put's data_parser: a user function over the columns, called by the putting process first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.errors import InvalidRequestError
from transfer_queue.storage.base import DataParser
from transfer_queue.storage.columns import column_of, named_columns, num_rows, values_of


def parsed(data: TensorDict, parser: DataParser) -> TensorDict:
    """Apply ``parser`` to ``data``. Dense columns are passed as one tensor, nested and object columns as lists.

    Raises:
        RuntimeError: the parser isn't callable, raised, or returned other fields or another number of rows.
    """
    if not callable(parser):
        raise InvalidRequestError(f"data_parser is not callable: it is a {type(parser).__name__}")
    count = num_rows(data)
    given = {name: _plain(column, count) for name, column in named_columns(data)}
    names = sorted(given)
    try:
        made = parser(given)
    except Exception as error:  # user code may raise anything, and the error must name it
        raise InvalidRequestError(f"data_parser raised {type(error).__name__}: {error}. Nothing was stored.") from error
    if not isinstance(made, dict):
        raise InvalidRequestError(f"data_parser returned a {type(made).__name__}, not a dict. Nothing was stored.")
    if sorted(made, key=str) != names:
        raise InvalidRequestError(
            f"data_parser changed the fields from {names} to {sorted(made, key=str)}: it must return the same keys. "
            f"Nothing was stored."
        )
    for name, column in made.items():
        _check_count(name, column, count)
    return TensorDict({name: _column(column) for name, column in made.items()}, batch_size=[count])


def _plain(column: Any, count: int) -> Any:
    if isinstance(column, torch.Tensor):
        return list(column.unbind()) if column.is_nested else column
    return values_of(column, count)


def _check_count(name: str, column: Any, count: int) -> None:
    sized = isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim > 0
    rows = len(column) if sized or isinstance(column, (list, tuple)) else None
    if isinstance(column, torch.Tensor) and column.is_nested:
        rows = column.size(0)
    if rows != count:
        raise InvalidRequestError(
            f"data_parser changed the count of field {name!r}: {count} rows went in, "
            f"{'a ' + type(column).__name__ if rows is None else rows} came out. Nothing was stored."
        )


def _column(column: Any) -> Any:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
        return torch.from_numpy(column)
    return column if isinstance(column, torch.Tensor) else column_of(values_of(column, len(column)))
