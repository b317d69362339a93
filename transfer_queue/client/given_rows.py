# SPDX-License-Identifier: Apache-2.0
"""The rows of a put: from a TensorDict or a mapping to columns, and parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, is_tensor_collection

from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata.meta_rows import pick
from transfer_queue.storage.number_lists import dense_column, number_column
from transfer_queue.storage.pack import GivenRows, check_array, is_simple_jagged, values_of
from transfer_queue.storage.unpack import DataParser, parsed_rows

_MOST_NAMED = 6


async def parsed_by(rows: GivenRows, parser: DataParser | None) -> GivenRows:
    """Rows after a put's data_parser, if there is one."""
    return rows if parser is None else GivenRows.of(await parsed_rows(rows, parser))


def as_rows(data: Any) -> GivenRows:
    """Rows to put: a TensorDict with a batch dimension, or a mapping of columns with equally many rows."""
    if isinstance(data, GivenRows):
        return data
    if isinstance(data, Mapping) and not hasattr(data, "batch_size"):
        check_names(data)
        sizes = {name: _num_rows(name, column) for name, column in data.items()}
        size = [*set(sizes.values())]
        if len(size) != 1:
            some = {name: sizes[name] for name in [*sizes][:_MOST_NAMED]}
            more = ", ..." * (len(sizes) > len(some))
            raise InvalidRequestError(
                f"columns of a put must have equally many rows, got {some or 'no columns'}{more}."
            )
        return GivenRows(((name, _column(name, column, size)) for name, column in data.items()), size, None)
    if data is None or not hasattr(data, "batch_size"):
        raise InvalidRequestError(f"put takes a TensorDict or a dict of columns, got {type(data).__name__}.")
    if not len(data.batch_size):
        raise InvalidRequestError("put got a TensorDict without a batch dimension; make it with batch_size=[rows].")
    check_names(data.keys())
    return GivenRows.of(data)


def check_names(names: Iterable[Any]) -> None:
    """Raise InvalidRequestError for a name that no field can have."""
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequestError(f"a field's name is a string, got {name!r}; use {str(name)!r}.")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the field name {name!r} is no valid Unicode: {error}. Rename it.") from None


def _num_rows(name: str, column: Any) -> int:
    if not isinstance(column, (torch.Tensor, np.ndarray, list, tuple)) and not is_tensor_collection(column):
        raise InvalidRequestError(
            f"field {name!r} of a put is a single {type(column).__name__}: a column is a tensor, an array, a list or a "
            f"tuple, with one entry per row. For one sample, put a list or a tensor of one."
        )
    if isinstance(column, np.ndarray):
        check_array(name, column)
    if isinstance(column, torch.Tensor) and column.is_nested:  # len() fails for some layouts
        return int(column.size(0))
    try:
        return len(column)
    except TypeError as error:
        raise InvalidRequestError(
            f"field {name!r} of a put is a single {type(column).__name__} without dimensions: a column needs one entry "
            f"per row. For one sample, put a list or a tensor of one."
        ) from error


def _column(name: str, column: Any, size: list[int]) -> Any:
    """A tensor, or a list of objects. TensorDict decides about other columns, such as arrays."""
    if isinstance(column, torch.Tensor):
        return column
    if not isinstance(column, (list, tuple)):
        return TensorDict({name: column}, batch_size=size).get(name)
    found = number_column(column, name)
    if found is None:
        found = dense_column(column, name)
    if found is not None:
        return found
    rows = list(column)
    if rows and all(isinstance(row, torch.Tensor) for row in rows):
        with contextlib.suppress(RuntimeError):  # of several shapes, devices or layouts, which torch can't stack
            return torch.stack(rows)
    return rows


def rows_at(rows: TensorDict, parts: Sequence[slice | list[int]]) -> list[TensorDict]:
    """These parts of a batch's rows, either slices or lists of positions.

    A TensorDict can't pick from every nested tensor, and copies all its objects.
    """
    return [part.as_tensordict(rows.device) for part in given_at(GivenRows.of(rows), parts)]


def given_at(rows: GivenRows, parts: Sequence[slice | list[int]]) -> list[GivenRows]:
    """These parts of the rows of a put."""
    count = rows.batch_size[0]
    picked = _Picked(parts, count)
    columns = {name: picked(column) for name, column in rows.items()}
    sizes = [len(range(count)[part]) if isinstance(part, slice) else len(part) for part in parts]
    return [
        GivenRows(((name, pieces[at]) for name, pieces in columns.items()), [size], None)
        for at, size in enumerate(sizes)
    ]


class _Picked:
    """Picks the same rows of each column. Slices of jagged columns are views, and share offsets if the columns do."""

    def __init__(self, parts: Sequence[slice | list[int]], count: int) -> None:
        self._parts = parts
        self._count = count
        self._slices = [part for part in parts if isinstance(part, slice)]
        self._cut: dict[int, list[tuple[slice, torch.Tensor, int, int]]] = {}
        """By the id of offsets, what each part has: a slice of the values, offsets, its shortest and longest row."""

    def __call__(self, column: Any) -> list[Any]:
        if isinstance(column, torch.Tensor) and column.is_nested:
            if self._slices and is_simple_jagged(column):
                return self._views(column)
            members = column.unbind()
            return [torch.nested.as_nested_tensor(pick(members, part), layout=column.layout) for part in self._parts]
        is_of_rows = isinstance(column, torch.Tensor) or (is_tensor_collection(column) and not is_non_tensor(column))
        is_of_all = isinstance(column, NonTensorData) and not isinstance(column.data, (list, np.ndarray))
        if is_of_rows or is_of_all or (self._slices and isinstance(column, NonTensorStack)):
            return [column[part] for part in self._parts]
        values = values_of(column, self._count)
        return [pick(values, part) for part in self._parts]

    def _views(self, column: Any) -> list[torch.Tensor]:
        values, offsets = column.values(), column.offsets()
        if id(offsets) not in self._cut:  # the batch keeps the offsets alive, so their id stays unique
            edges, lengths = offsets.tolist(), offsets.diff().tolist()
            self._cut[id(offsets)] = [
                (
                    slice(edges[part.start], edges[part.stop]),
                    offsets[part.start : part.stop + 1] - edges[part.start],
                    min(lengths[part]),
                    max(lengths[part]),
                )
                for part in self._slices
            ]
        # Without the longest length, to_padded_tensor() would pad to the sum of all lengths.
        return [
            torch.nested.nested_tensor_from_jagged(values[own], of_part, min_seqlen=shortest, max_seqlen=longest)
            for own, of_part, shortest, longest in self._cut[id(offsets)]
        ]
