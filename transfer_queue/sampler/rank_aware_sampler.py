# SPDX-License-Identifier: Apache-2.0
"""RankAwareSampler: every process of a data-parallel group gets the same batch, in any order of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import Picked, Round, RoundSampler

_REPLICA_PREFIX = "data_replica_"


class RankAwareSampler(RoundSampler):
    """The oldest ready samples, remembered per (dp_rank, batch_index) so that a repeated call gets them again.

    The older call form names a replica group (``data_replica_group``, ``data_replica_rank``,
    ``data_replica_world_size``).
    The first rank to ask samples; the others get the same lists in the same order. A task of a partition uses one of
    the two forms.

    Args:
        max_buffered_batches: Older form only: how many batches a rank may lag before the leader is refused.
    Raises:
        SamplerError: ``max_buffered_batches`` is below 1.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> client.register_task("pretrain", sampler=tq.RankAwareSampler(), dp_size=2)
        >>> second = {"dp_rank": 1, "batch_index": 0}
        >>> peers = [client.get_meta(["x"], 2, "train", task_name="pretrain", sampling_config=second) for _ in range(2)]
        >>> [client.get_data(meta)["x"].tolist() for meta in peers]
        [[2, 3], [2, 3]]
    """

    def __init__(self, max_buffered_batches: int = 1024) -> None:
        super().__init__()
        if max_buffered_batches < 1:
            raise SamplerError(f"max_buffered_batches must be at least 1, got {max_buffered_batches}.")
        self.max_buffered_batches = max_buffered_batches
        # _states holds {rank: list of batches} for these tasks, {batch_index: batch} for all others.
        self._replica_tasks: set[tuple[str, str]] = set()

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, dp_rank: int | None = None, batch_index: int | None = None,
        task_name: Any = "", partition_id: str = "", *args: Any, **kwargs: Any,
    ) -> Picked:  # fmt: skip
        """The batch of (dp_rank, batch_index), or in the older form the next one of a replica rank.

        The older positional order is (group, rank, world size, task name, partition), recognised by the int in third
        place.
        """
        if isinstance(task_name, int):
            task, partition = partition_id, args[0] if args else kwargs.get("partition_id", "")
            return self._next_of_replica(ready_indexes, batch_size, task, partition, (dp_rank, batch_index, task_name))
        if any(name.startswith(_REPLICA_PREFIX) for name in kwargs):
            return self._next_of_replica(ready_indexes, batch_size, task_name, partition_id, _replica(kwargs))
        return self._numbered_batch(ready_indexes, batch_size, task_name, partition_id, _named(dp_rank, batch_index))

    def round(self, wanted: Round) -> list[list[int]]:
        _named(wanted.ranks[0], wanted.batch_index)
        return super().round(wanted)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        config = sampling_config or {}
        if not any(name.startswith(_REPLICA_PREFIX) for name in config):
            return super().has_cached_result(partition_id, task_name, config)
        group, rank, _ = _replica(config)
        return bool(self._states.get(partition_id, {}).get(task_name, {}).get(group, {}).get(rank))

    def forget(self, partition_id: str, task_name: str, batch_index: int | None) -> None:
        if (partition_id, task_name) not in self._replica_tasks:  # replica batches are removed when read
            super().forget(partition_id, task_name, batch_index)

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._replica_tasks = {key for key in self._replica_tasks if key[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "_replica_tasks": [list(key) for key in sorted(self._replica_tasks)]}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._replica_tasks = {(partition, task) for partition, task in state.get("_replica_tasks", [])}

    def _numbered_batch(
        self, ready: Sequence[int], batch_size: int, task: str, partition: str, batch_of_rank: tuple[int, int]
    ) -> Picked:
        dp_rank, batch_index = self._rank(batch_of_rank[0], None), batch_of_rank[1]
        self._refuse_mixing(partition, task, replicas=False)
        batch = self._states.get(partition, {}).get(task, {}).get(dp_rank, {}).get(batch_index)
        if batch is None:
            batch = list(ready[:batch_size])
            if not batch or len(batch) < batch_size:
                return [], []
            self._states.setdefault(partition, {}).setdefault(task, {}).setdefault(dp_rank, {})[batch_index] = batch
        return list(batch), list(batch)

    def _next_of_replica(
        self, ready: Sequence[int], batch_size: int, task: str, partition: str, replica: tuple[Any, Any, Any]
    ) -> Picked:
        group, rank, world_size = replica
        buffers = self._buffers(partition, task, group, rank, world_size)
        if buffers[rank]:
            batch = buffers[rank].pop(0)
            return list(batch), list(batch)
        batch = list(ready[:batch_size])
        if not batch or len(batch) < batch_size:
            return [], []
        for other, waiting in buffers.items():
            if other != rank and len(waiting) >= self.max_buffered_batches:
                raise SamplerError(
                    f"rank {other} of replica group {group} lags {len(waiting)} batches behind rank {rank} in task "
                    f"{task!r} of partition {partition!r}. Check that it still reads, or raise max_buffered_batches."
                )
        for other, waiting in buffers.items():
            if other != rank:
                waiting.append(list(batch))
        self._states.setdefault(partition, {}).setdefault(task, {})[group] = buffers
        self._replica_tasks.add((partition, task))
        return batch, list(batch)

    def _buffers(self, partition: str, task: str, group: int, rank: int, world_size: int) -> dict[int, list[list[int]]]:
        """The group's unread batches, per rank. Those of a new group are stored once it has sampled."""
        if world_size < 1:
            raise SamplerError(f"data_replica_world_size must >= 1, got {world_size}.")
        if not 0 <= rank < world_size:
            raise SamplerError(f"data_replica_rank must be in [0, {world_size}), got {rank}.")
        self._refuse_mixing(partition, task, replicas=True)
        known: dict[int, list[list[int]]] | None = self._states.get(partition, {}).get(task, {}).get(group)
        if known is None:
            return {each: [] for each in range(world_size)}
        if len(known) != world_size:
            raise SamplerError(
                f"replica group {group} of task {task!r} has {len(known)} ranks, now data_replica_world_size is "
                f"{world_size}. Clear partition {partition!r} before the group changes its size."
            )
        return known

    def _refuse_mixing(self, partition: str, task: str, *, replicas: bool) -> None:
        if task in self._states.get(partition, {}) and ((partition, task) in self._replica_tasks) != replicas:
            raise SamplerError(
                f"task {task!r} of partition {partition!r} was read with {'dp_rank' if replicas else 'data_replica_*'} "
                f"before. Use one call form per task."
            )


def _named(dp_rank: int | None, batch_index: int | None) -> tuple[int, int]:
    if dp_rank is None or batch_index is None:
        raise SamplerError(
            f"RankAwareSampler needs dp_rank and batch_index, got {dp_rank} and {batch_index}. "
            f'Pass sampling_config={{"dp_rank": ..., "batch_index": ...}}, or read under a task name of your own.'
        )
    return dp_rank, batch_index


def _replica(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    names = [_REPLICA_PREFIX + part for part in ("group", "rank", "world_size")]
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise SamplerError(f"a replica is named by {', '.join(names)}; missing: {', '.join(missing)}.")
    return config[names[0]], config[names[1]], config[names[2]]
