# SPDX-License-Identifier: Apache-2.0
"""Partitions and tasks: make, seal, clear; how a task draws; what is produced and consumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue import protocol as p
from transfer_queue.client.base import as_names, check_meta, check_tags, checked_wait
from transfer_queue.client.kv import Keys
from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import BaseSampler

Status = tuple[torch.Tensor | None, torch.Tensor | None]


class Partitions(Keys):
    """Verbs about whole partitions, tasks and the queue."""

    async def async_create_partition(
        self,
        partition_id: str,
        num_samples: int | None = None,
        fields: Mapping[str, tuple[torch.dtype | str, Sequence[int | None] | None]] | None = None,
    ) -> bool:
        """Make a partition ahead of its first put; False if it exists.

        Args:
            num_samples: It seals itself at this number.
            fields: ``{name: (dtype, shape of one sample)}``. Every later put of such a field must match; otherwise it
                fails before anything is written. "object" is the dtype of plain objects; a size of None is any size,
                as in ``("int64", [None])``, and a shape of None any shape.
        Raises:
            SchemaConflictError: a field was declared otherwise, or has samples of another dtype.
            InvalidRequestError: ``num_samples`` below 1, or another number than before.
        Examples:
            >>> fields = {"ids": ("int64", [None]), "reward": (torch.float32, [])}
            >>> client.create_partition("train", num_samples=1000, fields=fields)
            True
        """
        declared = {name: _declared(name, *of_field) for name, of_field in (fields or {}).items()}
        return bool((await self.session.ask(p.CreatePartition, p.Done, partition_id, num_samples, declared)).value)

    async def async_seal_partition(self, partition_id: str) -> None:
        """Say that no more samples will be put: the end of the stream. An unused partition is created.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.seal_partition("train")
            >>> client.get_stats()["partitions"]["train"]["sealed"]
            True
        """
        await self.session.ask(p.SealPartition, p.Done, partition_id)

    async def async_register_task(
        self,
        task_name: str,
        sampler: BaseSampler | str | Mapping[str, Any] | None = None,
        dp_size: int | None = None,
        tail: str | None = None,
        follows: str | None = None,
    ) -> None:
        """How a task draws. Parts that are None stay as they are.

        Args:
            sampler: An instance, a built-in's name, or ``"module:Class"`` of an allowed module.
            dp_size: Number of data-parallel ranks: batches are then drawn for all of them or none.
            tail: What happens to samples that can't fill a last round: "drop", "pad" or "uneven_ok".
            follows: Another task. This one fetches nothing, but is given the same batches from now on, and keeps their
                samples from ``clear_consumed`` until it acknowledges them: see ``save_batches``.
        Raises:
            SamplerError: there is no such sampler, or its module is not allowed.
            InvalidRequestError: ``dp_size`` below 1, or an unknown ``tail``.
        Examples:
            >>> client.register_task("grpo", sampler=tq.GRPOGroupNSampler(4), dp_size=2, tail="drop")
        """
        spec: Any = sampler.spec() if isinstance(sampler, BaseSampler) else sampler
        spec = dict(spec) if isinstance(spec, Mapping) else spec
        await self.session.ask(p.RegisterTask, p.Done, task_name, spec, dp_size, tail, follows)

    async def async_clear_consumed(self, partition_id: str, task_names: Sequence[str] = ()) -> int:
        """Delete the samples, with their values, that every task of the partition has consumed and acknowledged.

        ``ack`` acknowledges a batch. A batch fetched without a rank or batch_index needs no ``ack``. Its
        samples stay until ``get_data`` has returned all of them, or its client has no metadata of it any more.

        Args:
            task_names: Tasks that must be done with a sample, too, even if they have not fetched yet.
        Returns:
            How many samples were cleared.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> data = client.get_data(client.get_meta(["x"], 2, "train", task_name="update_actor"))
            >>> client.clear_consumed("train", ["update_actor"])
            2
        """
        count = 0
        while True:
            cleared = await self.clear(p.ClearConsumed, partition_id, as_names(task_names, "task_names"))
            count += len(cleared.indexes) // 8
            if not cleared.more:
                return count

    async def async_held_up_by(self, partition_id: str, task_names: Sequence[str] = ()) -> dict[str, Any]:
        """What keeps ``clear_consumed`` with the same arguments from clearing all samples. It changes nothing.

        Returns:
            ``{"tasks": {task: samples}, "not_begun": [task, ...], "unread": samples, "readers": {client: samples}}``,
            all empty for an unknown partition. Samples of a task are those that it has not consumed, or has consumed
            and neither acknowledged nor read; tasks without any are left out. ``not_begun`` are those of ``task_names``
            that have never fetched from the partition: until they do, nothing is cleared. ``unread`` samples stay
            because no task has fetched. ``readers`` are the clients that were given samples without a rank or
            batch_index, have not read all of them, and still have metadata of them; ``get_stats()["clients"]`` has the
            same names.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> data = client.get_data(client.get_meta(["x"], 1, "train", task_name="update_actor"))
            >>> client.held_up_by("train", ["update_actor", "critic"])
            {'tasks': {'update_actor': 3}, 'not_begun': ['critic'], 'unread': 0, 'readers': {}}
        """
        cleared = await self.session.ask(
            p.ClearConsumed, p.Cleared, partition_id, as_names(task_names, "task_names"), True
        )
        return {
            "tasks": cleared.held_by, "not_begun": cleared.not_begun, "unread": cleared.unread,
            "readers": cleared.readers,
        }  # fmt: skip

    async def async_clear_partition(self, partition_id: str) -> None:
        """Delete a partition and all it holds, if it exists. For consumers that wait, their stream has ended.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.clear_partition("train")
            >>> client.get_partition_list()
            []
        """
        await self.clear(p.ClearPartition, partition_id)

    async def async_get_partition_list(self) -> list[str]:
        """Names of all partitions.

        Examples:
            >>> client.create_partition("train@0")
            True
            >>> client.get_partition_list()
            ['train@0']
        """
        return [str(name) for name in (await self.session.ask(p.ListPartitions, p.Names)).names]

    async def async_forget_task(self, task_name: str) -> int:
        """Make no partition keep samples for this task: its name was misspelt, or it will never read again.

        Returns:
            How many partitions knew it. For its waiting fetches, their stream has ended.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> batch = client.get_meta(["x"], 2, "train", task_name="udpate_actor")
            >>> client.forget_task("udpate_actor")
            1
        """
        return int((await self.session.ask(p.ForgetTask, p.Done, task_name)).value)

    async def async_expect_producers(self) -> None:
        """Call this before new producers start, where earlier ones may have died and other consumers of them remain.

        A fetch that finds too few samples fails once all producers of a field died (``ProducersGoneError``). Those that
        died until now don't count any more. So fetches wait for the new ones, however long they take to start.

        Examples:
            >>> client.expect_producers()
        """
        await self.session.ask(p.ExpectProducers, p.Done)

    async def async_note_exit(self, client_name: str, how: str, last_line: str = "", *, planned: bool = False) -> None:
        """Say how the process of a producer has ended. Errors, status and dashboard show it with the producer's fields.

        A data module calls it for its producers. Call it where a program of yours starts and watches producers.

        Args:
            client_name: The producer's ``TQ_CLIENT_NAME``.
            how: Process, pid and exit, such as "pid 71 ended with exit code 1".
            last_line: Of its output.
            planned: You have ended it, because its work is over. Then its death is no finding of ``diagnose``.
        Examples:
            >>> client.note_exit("rollout-0", "pid 71 was killed by SIGKILL", "CUDA out of memory")
        """
        await self.session.ask(p.NoteExit, p.Done, client_name, how, last_line, planned)

    async def async_evict_client(self, client: str, *, unit: bool = False) -> bool:
        """End the session of a client that hangs, as if it had died; ``get_stats()["clients"]`` names them.

        Args:
            unit: Also if it is a storage unit. All values in it are lost.
        Returns:
            Whether it held anything.
        Raises:
            InvalidRequestError: it is this client itself, whose session ``close`` ends, or a storage unit.
        Examples:
            >>> client.evict_client("rollout-7")  # there is no such client
            False
        """
        return bool((await self.session.ask(p.EvictClient, p.Done, client, unit)).value)

    async def async_get_stats(self) -> dict[str, Any]:
        """Numbers of the whole queue, by partition and task, and what waiting fetches lack.

        ``clients`` says by client what it holds; ``asked_by`` is this client's own name there. ``alarms`` are the
        latest samplers that held the server, numbered from 1. ``metrics`` are latencies and ages as counts below the
        bounds in ``metrics["bounds"]``. A partition with groups has ``groups``: how many were ``added``, and how
        many are in each of the ``states``; the ``oldest`` lease; numbers ``rejected`` by gate; ``slots`` by task.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.get_stats()["partitions"]["train"]["published"]
            4
        """
        return await self.session.stats()

    async def async_get_lost_samples(self, partition_id: str) -> dict[str, list[int]]:
        """Samples that lost values with a storage unit: {field: [global index, ...]}, without those put again.

        They count as not produced. Put the field again with their metadata, or clear them.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.get_lost_samples("train")
            {}
        """
        lost = (await self.session.ask(p.ListLost, p.Done, partition_id)).value
        return {name: p.unpack_indexes(indexes).tolist() for name, indexes in lost.items()}

    async def async_watch_run(
        self, run: str, name: str | None = None, opens: bool = False, timeout_s: float = 0.0
    ) -> str | None:
        """Be a member of a run: processes, on any host, that can't go on without each other.

        Args:
            name: A name for this process, which the others get if it is lost. None: it is a member already.
            opens: The run begins with this member.
            timeout_s: How long to wait until a member is lost.
        Returns:
            The name of a member that failed, or whose process ended; None if there is none, or this member has left.
        Raises:
            InvalidRequestError: this queue has no such run and ``opens`` is False, or this client is no member.
        Examples:
            >>> client.watch_run("run-1", name="rank 0", opens=True)
            >>> client.watch_run("run-1", timeout_s=0.1)  # nobody is lost
            >>> client.leave_run("run-1")
        """
        wait_s = checked_wait("watch_run", timeout_s)
        reply = await self.session.ask(p.WatchRun, p.Done, run, name, opens, wait_s, wait_s=wait_s)
        return None if reply.value is None else str(reply.value)

    async def async_leave_run(self, run: str, failed: bool = False) -> None:
        """Leave a run; ``failed`` says that the others can't go on.

        Examples:
            >>> client.watch_run("run-1", name="rank 0", opens=True)
            >>> client.leave_run("run-1", failed=True)
        """
        await self.session.ask(p.LeaveRun, p.Done, run, failed)

    async def async_get_storage_stats(self) -> list[dict[str, Any]]:
        """Numbers of each storage unit: samples, bytes held and allowed, readers. Some backends have none. A unit that
        does not answer is left out; ``get_stats()["storage_units"]`` has all of them.

        ``path`` says how this client's values go there. "arena": through memory that the unit and this process both
        map; at most 64 KiB still travel in the message. "frames": in messages, as from another host, or with
        ``SimpleStorage.arena: false``, or where no memory can be mapped. "undecided": the first put or get decides.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> [unit["samples"] for unit in client.get_storage_stats()]
            [4]
        """
        return await self.storage_manager.numbers()

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """(indexes int64 [N], consumed int8 [N]), pre-allocated samples included; (None, None): unknown partition.

        Examples:
            >>> meta = client.put({"x": torch.arange(3)}, partition_id="train")
            >>> batch = client.get_meta(["x"], 2, "train", task_name="update_actor")
            >>> indexes, consumed = client.get_consumption_status("update_actor", "train")
            >>> consumed
            tensor([1, 1, 0], dtype=torch.int8)
        """
        return _status(await self.pages(p.ConsumptionStatus, p.Status, partition_id, task_name, False))

    async def async_get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """(indexes int64 [N], produced int8 [N, F]), columns as the fields were registered; (None, None) unknown.

        Examples:
            >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
            >>> meta = client.put({"y": torch.arange(1)}, metadata=meta[0])
            >>> indexes, produced = client.get_production_status(["x", "y"], "train")
            >>> produced
            tensor([[1, 1],
                    [1, 0]], dtype=torch.int8)
        """
        fields = as_names(data_fields)
        return _status(await self.pages(p.FieldStatus, p.Status, partition_id, fields, False), two_dim=True)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Has the task consumed every sample? False for an empty or unknown partition.

        Examples:
            >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
            >>> batch = client.get_meta(["x"], 2, "train", task_name="update_actor")
            >>> client.check_consumption_status("update_actor", "train")
            True
        """
        return bool((await self.session.ask(p.ConsumptionStatus, p.Done, partition_id, task_name, True)).value)

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Does every sample have all these fields? False for an unknown partition or field.

        Examples:
            >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
            >>> client.check_production_status(["x"], "train")
            True
        """
        fields = as_names(data_fields)
        return bool((await self.session.ask(p.FieldStatus, p.Done, partition_id, fields, True)).value)

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Make consumed samples available again; batches already given keep their answer. False: no such partition.

        Examples:
            >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
            >>> batch = client.get_meta(["x"], 2, "train", task_name="update_actor")
            >>> client.reset_consumption("train", "update_actor")
            True
            >>> client.get_meta(["x"], 2, "train", task_name="update_actor").global_indexes == batch.global_indexes
            True
        """
        return bool((await self.session.ask(p.ResetConsumption, p.Done, partition_id, task_name)).value)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Replace the controller's tags of these samples by the metadata's.

        Raises:
            UnsupportedValueError: a tag is not plain data. Samples that were cleared are no error.
        Examples:
            >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
            >>> meta.update_custom_meta([{"score": 0.5}, {"score": 1.0}])
            >>> client.set_custom_meta(meta)
            >>> client.get_meta(["x"], 1, "train", task_name="best", where="score > 0.9").custom_meta
            [{'score': 1.0}]
        """
        check_meta("set_custom_meta", metadata)
        tags: dict[str, dict[int, dict[str, Any]]] = {}
        rows = zip(metadata.partition_ids, metadata.global_indexes, metadata.custom_meta, strict=True)
        for partition, index, own in rows:
            tags.setdefault(partition, {})[index] = dict(own)
        for of_partition in tags.values():
            check_tags(of_partition)
        for partition, of_partition in tags.items():
            await self.set_tags(partition, of_partition)
        metadata.mark_custom_meta_clean()


def _declared(name: str, dtype: torch.dtype | str, shape: Sequence[int | None] | None = None) -> p.DeclaredField:
    """Raises ValueError for what is no dtype."""
    text = str(dtype).removeprefix("torch.")
    if text == "object":
        return p.DeclaredField(None, None)
    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise InvalidRequestError(f'field {name!r} is declared as {dtype!r}, which is no dtype of torch, nor "object".')
    return p.DeclaredField(text, None if shape is None else tuple(shape))


def _status(pages: Sequence[p.Status], two_dim: bool = False) -> Status:
    if not pages[0].known:
        return None, None
    indexes = torch.from_numpy(np.concatenate([p.unpack_indexes(page.indexes) for page in pages]))
    status = torch.from_numpy(np.concatenate([np.frombuffer(page.status, dtype=np.int8) for page in pages]))
    return indexes, status.reshape(-1, pages[0].columns) if two_dim else status
