# SPDX-License-Identifier: Apache-2.0
"""Partitions and tasks: make, seal, clear; how a task draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from transfer_queue import protocol as p
from transfer_queue.client.keys import Keys
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
_PER_CLEAR = 5_000


class Partitions(Keys):
    """Verbs about whole partitions, tasks and the queue."""

    async def async_create_partition(self, partition_id: str, num_samples: int | None = None) -> bool:
        """Make a partition ahead of its first put; False if it exists. It seals itself at ``num_samples``."""
        return bool((await self.session.ask(p.CreatePartition, p.Done, partition_id, num_samples)).value)

    async def async_seal_partition(self, partition_id: str) -> None:
        """Say that no more samples will be put: the end of the stream."""
        await self.session.ask(p.SealPartition, p.Done, partition_id)

    async def async_register_task(
        self,
        task_name: str,
        sampler: BaseSampler | str | Mapping[str, Any] | None = None,
        dp_size: int | None = None,
        tail: str | None = None,
    ) -> None:
        """How a task draws. Parts that are None stay as they are.

        Args:
            sampler: An instance, a built-in's name, or ``"module:Class"`` of an allowed module.
            dp_size: Number of data-parallel ranks: batches are then drawn for all of them or none.
            tail: What happens to samples that can't fill a last round: "drop", "pad" or "uneven_ok".
        """
        spec: Any = sampler.spec() if isinstance(sampler, BaseSampler) else sampler
        spec = dict(spec) if isinstance(spec, Mapping) else spec
        await self.session.ask(p.RegisterTask, p.Done, task_name, spec, dp_size, tail)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Forget these samples, values and all; those already cleared are ignored."""
        for part in metadata.chunk_by_partition() if metadata.size else ():
            indexes = part.global_indexes
            for start in range(0, len(indexes), _PER_CLEAR):  # more at once would hold up other clients for too long
                some = p.pack_indexes(indexes[start : start + _PER_CLEAR])
                await self.clear(p.ClearSamples, part.partition_ids[0], some)

    async def async_clear_consumed(self, partition_id: str, task_names: Sequence[str] = ()) -> int:
        """Forget the samples that every task which reads the partition has consumed and settled, values and all.

        A batch is settled by ``ack``; one that was fetched without a rank or batch_index is from the start.

        Args:
            task_names: Tasks that must be done with a sample, too, although they may not have begun to read.
        Returns:
            How many samples were cleared.
        """
        count = 0
        while True:
            cleared = await self.clear(p.ClearConsumed, partition_id, list(task_names))
            count += len(cleared.indexes) // 8
            if not cleared.more:
                break
        if not count and (reasons := _reasons(cleared)):
            _log.info("nothing of partition %r was cleared: %s.", partition_id, ", ".join(reasons))
        return count

    async def async_held_up_by(self, partition_id: str, task_names: Sequence[str] = ()) -> dict[str, Any]:
        """What keeps ``clear_consumed`` with the same arguments from clearing all samples. It changes nothing.

        Returns:
            ``{"tasks": {task: samples}, "not_begun": [task, ...], "unread": samples}``, all empty for an unknown
            partition. Samples of a task are those that it has not consumed, or has consumed and not acknowledged;
            tasks without any are left out. ``not_begun`` are those of ``task_names`` that have never fetched from the
            partition: until they do, nothing is cleared. ``unread`` samples stay because no task has fetched.
        """
        told = await self.session.ask(p.ClearConsumed, p.Cleared, partition_id, list(task_names), True)
        return {"tasks": told.held_by, "not_begun": told.not_begun, "unread": told.unread}

    async def async_clear_partition(self, partition_id: str) -> None:
        """Forget a partition and all it holds; unknown: nothing. Consumers that wait for it are told that it ended."""
        await self.clear(p.ClearPartition, partition_id)

    async def async_get_partition_list(self) -> list[str]:
        """Names of all partitions."""
        return [str(name) for name in (await self.session.ask(p.ListPartitions, p.Names)).names]

    async def async_forget_task(self, task_name: str) -> int:
        """No partition keeps samples for this task any more: its name was misspelt, or it will never read again.

        Returns:
            How many partitions knew it. Fetches of the task that wait are told that their stream has ended.
        """
        return int((await self.session.ask(p.ForgetTask, p.Done, task_name)).value)

    async def async_evict_client(self, client: str) -> bool:
        """End the session of a client that hangs, as if it had died; ``get_stats()["clients"]`` names them.

        Returns:
            Whether it held anything.
        """
        return bool((await self.session.ask(p.EvictClient, p.Done, client)).value)

    async def async_get_stats(self) -> dict[str, Any]:
        """Numbers of the whole queue, partition by partition and task by task, and who waits for what.

        ``clients`` says by client what it holds; ``asked_by`` is this client's own name there. ``alarms`` are samplers
        that held the server.
        """
        return dict((await self.session.ask(p.GetStats, p.Done)).value)

    async def async_get_storage_stats(self) -> list[dict[str, Any]]:
        """Numbers of each storage unit: samples, bytes held and allowed, readers. Some backends have none.

        ``path`` says which way this client's values go there: "arena" (memory that the unit and this process both
        map; at most 64 KiB still travel in the message), "frames" (in messages: from another host, with
        ``SimpleStorage.arena: false``, or where no mapping is to be had), or "undecided" until its first put or get
        there, which decides it once, by trying.
        """
        units = [msgspec.structs.asdict(unit) for unit in await self.storage_manager.stats()]
        return [{name: value for name, value in unit.items() if name != "id"} for unit in units]


def _reasons(cleared: p.Cleared) -> list[str]:
    """Why samples stay, one clause per reason."""
    held_by = [
        f"task {task!r} has not consumed or not acknowledged {count} samples" for task, count in cleared.held_by.items()
    ]
    not_begun = [f"task {task!r} has not begun" for task in cleared.not_begun]
    return held_by + not_begun + ([f"no task reads its {cleared.unread} samples"] if cleared.unread else [])
