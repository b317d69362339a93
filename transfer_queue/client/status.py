# SPDX-License-Identifier: Apache-2.0
"""Status: what is produced and consumed, and the tags of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata_wire import check_tags

Status = tuple[torch.Tensor | None, torch.Tensor | None]


class Statuses(ClientBase):
    """Verbs that look at samples without reading values."""

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """(indexes int64 [N], consumed int8 [N]), pre-allocated samples included; (None, None): unknown partition."""
        pages = [await self.session.ask(p.ConsumptionStatus, p.Status, partition_id, task_name)]
        while pages[-1].more:  # in pages, so that a large partition holds up no other client
            after = _last_index(pages[-1])
            pages.append(await self.session.ask(p.ConsumptionStatus, p.Status, partition_id, task_name, False, after))
        return _status(pages)

    async def async_get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """(indexes int64 [N], produced int8 [N, F]), columns as the fields were registered; (None, None) unknown."""
        fields = [data_fields] if isinstance(data_fields, str) else list(data_fields)
        pages = [await self.session.ask(p.ProductionStatus, p.Status, partition_id, fields)]
        while pages[-1].more:
            after = _last_index(pages[-1])
            pages.append(await self.session.ask(p.ProductionStatus, p.Status, partition_id, fields, False, after))
        return _status(pages, two_dim=True)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Has the task consumed every sample? False for an empty or unknown partition."""
        return bool((await self.session.ask(p.ConsumptionStatus, p.Done, partition_id, task_name, True)).value)

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Does every sample have all these fields? False for an unknown partition or field."""
        fields = [data_fields] if isinstance(data_fields, str) else list(data_fields)
        return bool((await self.session.ask(p.ProductionStatus, p.Done, partition_id, fields, True)).value)

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Make consumed samples available again; batches already given keep their answer. False: no such partition."""
        return bool((await self.session.ask(p.ResetConsumption, p.Done, partition_id, task_name)).value)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Replace the controller's tags of these samples by the metadata's."""
        tags: dict[str, dict[int, dict[str, Any]]] = {}
        rows = zip(metadata.partition_ids, metadata.global_indexes, metadata.custom_meta, strict=True)
        for partition, index, own in rows:
            tags.setdefault(partition, {})[index] = dict(own)
        for of_partition in tags.values():
            check_tags(of_partition)
        if tags:
            await self.session.ask(p.SetTags, p.Done, tags)
            metadata.mark_custom_meta_clean()


def _last_index(page: p.Status) -> int:
    return int(p.unpack_indexes(page.indexes)[-1])


def _status(pages: Sequence[p.Status], two_dim: bool = False) -> Status:
    if not pages[0].known:
        return None, None
    indexes = torch.from_numpy(np.concatenate([p.unpack_indexes(page.indexes) for page in pages]))
    status = torch.from_numpy(np.concatenate([np.frombuffer(page.status, dtype=np.int8) for page in pages]))
    return indexes, status.reshape(-1, pages[0].columns) if two_dim else status
