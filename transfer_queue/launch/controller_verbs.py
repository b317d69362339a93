# SPDX-License-Identifier: Apache-2.0
"""The verbs of the controller's actor: each asks the server through a client in the actor's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, UnknownPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.transport.blocking import run_blocking

if TYPE_CHECKING:
    import torch

    from transfer_queue.client import TransferQueueClient
    from transfer_queue.launch.partition_snapshot import PartitionSnapshot

    Status = tuple[torch.Tensor | None, torch.Tensor | None]
# What loads torch is imported by the verbs: an actor that only hosts its server starts sooner without.
_NO_TASK = ""


class ControllerVerbs:
    """As the client's methods of similar names, where nothing else is said. They take partitions that don't exist."""

    @property
    def client(self) -> TransferQueueClient:
        raise NotImplementedError

    # ---- partitions ----

    def create_partition(self, partition_id: str) -> bool:
        """False if it exists."""
        return self.client.create_partition(partition_id)

    def list_partitions(self) -> list[str]:
        return self.client.get_partition_list()

    def get_partition_index_range(self, partition_id: str) -> list[int]:
        """All global indexes of the partition, ascending."""
        indexes, _ = self.client.get_consumption_status(_NO_TASK, partition_id)
        return [] if indexes is None else list(indexes.tolist())

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """A copy of the partition's state; None if there is none."""
        from transfer_queue.launch.partition_snapshot import PartitionSnapshot

        exists = partition_id in self.client.get_partition_list()
        return PartitionSnapshot.of(self.client, partition_id) if exists else None

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Delete the partition with its values, if it exists."""
        self.client.clear_partition(partition_id)

    def clear_meta(
        self, global_indexes: Sequence[int], partition_ids: Sequence[str], clear_consumption: bool = True
    ) -> None:
        """Delete these samples with their values. Indexes that are not in their partition are ignored.

        Raises:
            ValueError: there are no lists, or their lengths differ.
        """
        if global_indexes is None or partition_ids is None or len(global_indexes) != len(partition_ids):
            raise InvalidRequestError("clear_meta needs two lists of the same length: global_indexes, partition_ids.")
        if len(global_indexes):
            self.client.clear_samples(BatchMeta(list(global_indexes), list(partition_ids)))

    # ---- samples ----

    def get_metadata(
        self,
        data_fields: Sequence[str],
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        batch_size: int | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """The client's ``get_meta``."""
        return self.client.get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config)

    def generate_batch_meta(
        self,
        partition_id: str,
        batch_global_indexes: Sequence[int],
        data_fields: Sequence[str],
        mode: str = "fetch",
    ) -> BatchMeta:
        """Metadata of these samples, in this order; nothing is consumed."""
        meta = self.client.get_meta(list(data_fields), None, partition_id, mode="force_fetch")
        position = {index: at for at, index in enumerate(meta.global_indexes)}
        return meta.select_samples([position[index] for index in batch_global_indexes])

    def update_production_status(
        self,
        partition_id: str,
        global_indexes: Sequence[int],
        field_schema: Mapping[str, Mapping[str, Any]],
        custom_backend_meta: Any = None,
    ) -> bool:
        """Make these fields of these samples readable. Their values must be stored. False: no such partition."""
        from transfer_queue.client.base import to_specs

        entries = {name: {"dtype": None, "shape": None, **entry} for name, entry in field_schema.items()}
        packed = p.pack_indexes(list(global_indexes))
        try:
            run_blocking(self.client.session.ask(p.Publish, p.Reply, partition_id, packed, to_specs(entries)))
        except UnknownPartitionError:
            return False
        return True

    def scan_data_status(self, partition_id: str, data_fields: Sequence[str], task_name: str) -> list[int]:
        """Samples that have all these fields and that the task has not consumed."""
        _, produced = self.client.get_production_status(list(data_fields), partition_id)
        indexes, consumed = self.client.get_consumption_status(task_name, partition_id)
        if indexes is None or produced is None or consumed is None:
            return []
        ready = produced.all(dim=1) & (consumed == 0)
        return list(indexes[ready].tolist())

    def set_custom_meta(self, partition_custom_meta: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
        """Replace tags, given by partition and index. Unknown partitions are ignored."""
        known = set(self.client.get_partition_list())
        for name, own in partition_custom_meta.items():
            if name in known:
                run_blocking(self.client.set_tags(name, own))

    # ---- production and consumption ----

    def get_consumption_status(self, partition_id: str, task_name: str) -> Status:
        return self.client.get_consumption_status(task_name, partition_id)

    def get_production_status(self, partition_id: str, data_fields: Sequence[str]) -> Status:
        return self.client.get_production_status(data_fields, partition_id)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> None:
        self.client.reset_consumption(partition_id, task_name)

    # ---- keys ----

    def kv_retrieve_meta(self, keys: Sequence[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        return self.client.kv_retrieve_meta(keys, partition_id, create)

    def kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Keys of samples, None for one without; [] for an unknown partition."""
        try:
            return self.client.kv_retrieve_keys(global_indexes, partition_id)
        except UnknownPartitionError:
            return []

    # ---- the whole queue ----

    def save_checkpoint(self, path: str) -> None:
        self.client.save_controller_checkpoint(path)

    def load_checkpoint(self, path: str) -> None:
        self.client.load_controller_checkpoint(path)
