# SPDX-License-Identifier: Apache-2.0
"""A partition as it was at one moment, with the attributes that programs read from the controller's actor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import InvalidRequestError

_MOST_ROWS = 2**28
"""256 MiB for one column."""


@dataclass
class PartitionSnapshot:
    """Rows of tensors are global indexes: row i belongs to sample i, also if that is in another partition."""

    partition_id: str
    global_indexes: set[int]
    """Samples of the partition."""
    pre_allocated_global_indexes: set[int]
    """Reserved for the next samples."""
    field_name_mapping: dict[str, int]
    """Columns of ``production_status``."""
    keys_mapping: dict[str, int]
    custom_meta: dict[int, dict[str, Any]]
    """Tags by index; samples without any are left out."""
    produced: torch.Tensor | None
    """int8 [samples, fields], in the order of their indexes: 1 where the sample has the field."""
    consumed: dict[str, torch.Tensor | None]
    """By task, int8 [samples], in the same order: 1 where the task has consumed the sample."""

    @classmethod
    def of(cls, client: TransferQueueClient, partition_id: str) -> PartitionSnapshot:
        """Ask for the state of an existing partition."""
        stats = client.get_stats()["partitions"][partition_id]
        fields = list(stats["fields"])
        meta = client.get_meta([], None, partition_id, mode="force_fetch")
        indexes = list(meta.global_indexes)
        taken = indexes[: int(stats["samples"])]
        found = client.kv_list(partition_id).get(partition_id, {})
        of_keys = client.kv_retrieve_meta(list(found), partition_id).global_indexes if found else []
        keys = dict(zip(found, of_keys, strict=True))
        _, produced = client.get_production_status(fields, partition_id)
        consumed = {task: client.get_consumption_status(task, partition_id)[1] for task in stats["tasks"]}
        return cls(
            partition_id,
            set(taken),
            set(indexes[len(taken) :]),
            {name: column for column, name in enumerate(fields)},
            keys,
            {index: dict(tag) for index, tag in zip(indexes, meta.custom_meta, strict=True) if tag},
            produced,
            consumed,
        )

    @property
    def production_status(self) -> torch.Tensor:
        """int8 [largest index + 1, fields]: 1 where the sample has the field.

        Raises:
            InvalidRequestError: indexes are too large for tensors of so many rows.
        """
        return self._by_index(self.produced, self.total_fields_num)

    @property
    def consumption_status(self) -> dict[str, torch.Tensor]:
        """By task, int8 [largest index + 1]: 1 where the task has consumed the sample. Raises as production_status."""
        return {task: self._by_index(status) for task, status in self.consumed.items()}

    def _by_index(self, status: torch.Tensor | None, *columns: int) -> torch.Tensor:
        """The status of the partition's samples, in the rows of their indexes."""
        reserved = {index for index in self.pre_allocated_global_indexes if index < _MOST_ROWS}
        count = max(self.global_indexes | reserved, default=-1) + 1
        if count > _MOST_ROWS:
            raise InvalidRequestError(
                f"partition {self.partition_id!r} has sample {count - 1}, and tensors with a row for each index up to "
                f"there are too large: indexes leave a gap at each load_checkpoint. Read `produced` and `consumed`, "
                f"which have a row per sample, in the order of sorted(global_indexes)."
            )
        rows = torch.zeros((count, *columns), dtype=torch.int8)
        if status is not None and self.global_indexes:
            rows[torch.tensor(sorted(self.global_indexes))] = status[: len(self.global_indexes)]
        return rows

    @property
    def revert_keys_mapping(self) -> dict[int, str]:
        """Keys by index."""
        return {index: key for key, index in self.keys_mapping.items()}

    @property
    def total_samples_num(self) -> int:
        return len(self.global_indexes)

    @property
    def total_fields_num(self) -> int:
        return len(self.field_name_mapping)

    @property
    def allocated_fields_num(self) -> int:
        """Columns of ``production_status``."""
        return int(self.production_status.shape[1])

    @property
    def allocated_samples_num(self) -> int:
        """Rows of ``production_status``."""
        return int(self.production_status.shape[0])

    def get_custom_meta(self, global_indexes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Tags of those of these samples that have some."""
        return {index: self.custom_meta[index] for index in global_indexes if index in self.custom_meta}

    def get_field_custom_backend_meta(
        self, global_indexes: Iterable[int], fields: Sequence[str]
    ) -> Mapping[int, Mapping[str, Any]]:
        """What a storage backend keeps with the values: nothing here."""
        return {}
