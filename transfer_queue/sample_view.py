# SPDX-License-Identifier: Apache-2.0
"""SamplesView: the rows of a BatchMeta one by one, read-only."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from transfer_queue.schema import row_of

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta


class SampleView:
    """One row, as the batch was when the view was created. Assigning to it raises TypeError."""

    __slots__ = ("custom_meta", "fields", "global_index", "partition_id", "production_status")

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: Mapping[str, Any]
    fields: Mapping[str, Mapping[str, Any]]

    def __init__(self, meta: BatchMeta, position: int) -> None:
        entries = row_of(meta.field_schema, position)
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
