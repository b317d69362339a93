# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch's metadata: the positions that name them, and read-only views of single rows."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from transfer_queue.metadata.batch_meta import BatchMeta


T = TypeVar("T")


def as_ints(values: Iterable[Any]) -> list[int]:
    """Plain ints of any iterable of integers; arrays and tensors without a Python object per element."""
    tolist = getattr(values, "tolist", None)
    return list(map(operator.index, values if tolist is None else tolist()))


def pick(rows: Sequence[T], positions: slice | list[int]) -> list[T]:
    """The rows at these positions, as a new list."""
    if isinstance(positions, slice):
        return list(rows[positions])
    return [rows[position] for position in positions]


def check_length(name: str, rows: Sized | None, size: int) -> None:
    """Raise ValueError unless there is one entry per row; None passes."""
    if rows is not None and len(rows) != size:
        raise InvalidRequestError(f"{name} has {len(rows)} entries, the batch has {size} samples. Give one per sample.")


def check_in_range(positions: Sequence[int], size: int) -> None:
    """Raise ValueError unless every position is in [0, size)."""
    if positions and (min(positions) < 0 or max(positions) >= size):
        outside = [position for position in positions if not 0 <= position < size][:5]
        raise InvalidRequestError(f"positions {outside} are out of range: the batch has {size} rows, 0 to {size - 1}.")


def check_permutation(positions: Sequence[int], size: int) -> None:
    """Raise ValueError unless ``positions`` names each of ``size`` rows exactly once."""
    if len(positions) != size:
        raise InvalidRequestError(
            f"the number of indexes, {len(positions)}, does not match the {size} rows of the batch. "
            "Give every row's position exactly once."
        )
    if len(set(positions)) != size:
        raise InvalidRequestError(f"Contain duplicate indexes: {positions}. Give every row's position exactly once.")
    check_in_range(positions, size)


def even_sizes(size: int, chunks: int) -> list[int]:
    """Sizes of ``chunks`` parts of ``size`` rows, the first ``size % chunks`` of them one larger."""
    chunks = operator.index(chunks)
    if chunks < 1:
        raise InvalidRequestError(f"can't cut a batch into {chunks} chunks: ask for 1 or more.")
    if chunks > size:
        message = f"a batch of {size} rows was cut into {chunks} chunks: {chunks - size} of them are empty."
        warnings.warn(message, UserWarning, stacklevel=3)
    small, larger = divmod(size, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def consecutive(sizes: Iterable[int], size: int) -> list[slice]:
    """One slice per given size, one after the other; together they cover exactly ``size`` rows."""
    sizes = as_ints(sizes)
    if any(part < 0 for part in sizes) or sum(sizes) != size:
        raise InvalidRequestError(
            f"chunk sizes {sizes} add up to {sum(sizes)}, the batch has {size} rows. "
            "Give sizes >= 0 that add up to the number of rows."
        )
    return [slice(end - part, end) for part, end in zip(sizes, accumulate(sizes), strict=True)]


def _row_of(schema: Mapping[str, Mapping[str, Any]], position: int) -> dict[str, dict[str, Any]]:
    """The schema of one row: its own shape and dtype, without ``per_sample_shapes`` and ``per_sample_dtypes``."""
    row = {name: dict(entry) for name, entry in schema.items()}
    for entry in row.values():
        shapes, dtypes = entry.pop("per_sample_shapes", None), entry.pop("per_sample_dtypes", None)
        if shapes is not None:
            entry["shape"] = shapes[position]
        if dtypes is not None:
            entry["dtype"], entry["is_non_tensor"] = dtypes[position], dtypes[position] is None
    return row


class SampleView:
    """One row, as the batch was when the view was created. Assigning to it raises TypeError."""

    __slots__ = ("custom_meta", "fields", "global_index", "partition_id", "production_status")

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: Mapping[str, Any]
    fields: Mapping[str, Mapping[str, Any]]

    def __init__(self, meta: BatchMeta, position: int) -> None:
        entries = _row_of(meta.field_schema, position)
        for name, value in {
            "global_index": meta.global_indexes[position],
            "partition_id": meta.partition_ids[position],
            "production_status": int(meta.production_status[position]),
            "custom_meta": MappingProxyType(meta.custom_meta[position]),
            "fields": MappingProxyType({name: MappingProxyType(entry) for name, entry in entries.items()}),
        }.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError(f"a sample is a read-only view: {name!r} can't be set. Change the BatchMeta it belongs to.")

    def __delattr__(self, name: str) -> NoReturn:
        raise TypeError(f"a sample is a read-only view: {name!r} can't be deleted. Change the BatchMeta it belongs to.")

    def __repr__(self) -> str:
        return (
            f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r}, "
            f"production_status={self.production_status}, fields={sorted(self.fields)}, "
            f"custom_meta={dict(self.custom_meta)})"
        )


class SamplesView:
    """The rows of a batch: length, index, slice, iterate."""

    __slots__ = ("_meta",)

    def __init__(self, meta: BatchMeta) -> None:
        self._meta = meta

    def __len__(self) -> int:
        return self._meta.size

    def __getitem__(self, item: Any) -> Any:
        size = self._meta.size
        if isinstance(item, slice):
            return [SampleView(self._meta, position) for position in range(size)[item]]
        position = operator.index(item)
        if not -size <= position < size:
            raise IndexError(f"sample {position} of a batch of {size} rows")
        return SampleView(self._meta, position % size)

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._meta, position) for position in range(self._meta.size))
