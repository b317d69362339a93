# SPDX-License-Identifier: Apache-2.0
"""Topology: which data-parallel rank this process is, and which rank acts for its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from transfer_queue.errors import InvalidRequestError, from_wire, to_wire

Rank = int | Callable[[Any], int]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of one data-parallel group (tensor, pipeline or context peers) have the same ``dp_rank``.

    ``is_reader``: true for one rank per group, which acknowledges what the group has read.

    Raises:
        InvalidRequestError: ``dp_size`` below 1, or ``dp_rank`` outside 0 ... dp_size - 1.
    Examples:
        >>> Topology(dp_rank=1, dp_size=4)
        Topology(dp_rank=1, dp_size=4, is_reader=True)
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_reader: bool = True

    def __post_init__(self) -> None:
        if self.dp_size < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise InvalidRequestError(
                f"dp_rank {self.dp_rank} of dp_size {self.dp_size} is impossible: dp_size is at least 1, and ranks go "
                f"from 0 to dp_size - 1."
            )


def trainer_topology(trainer: Trainer | Fabric, dp_rank: Rank | None = None, dp_size: int | None = None) -> Topology:
    """What the Trainer's strategy reports; valid from ``setup`` on, not before.

    Args:
        dp_rank: A number, or a function of the Trainer, for strategies that report no groups. This makes the call a
            collective, because all ranks compare their numbers.
        dp_size: Without dp_rank, neighbouring ranks form a group: rank r is in group r // (world_size / dp_size).
    Raises:
        InvalidRequestError: numbers that don't fit the world's size.
    Examples:
        >>> trainer_topology(L.Trainer(accelerator="cpu", devices=1))
        Topology(dp_rank=0, dp_size=1, is_reader=True)
    """
    global_rank, world_size = trainer.global_rank, trainer.world_size
    reported_rank, reported_size = _reported(trainer.strategy, global_rank, world_size)
    size = reported_size if dp_size is None else dp_size
    if size < 1 or world_size % size:
        raise InvalidRequestError(
            f"dp_size {size} doesn't divide the {world_size} processes of this run. Every data-parallel group must "
            f"have the same number of ranks."
        )
    peers = world_size // size
    if dp_rank is not None:
        rank = dp_rank(trainer) if callable(dp_rank) else dp_rank
        return Topology(rank, size, _is_first_with_dp_rank(rank, size, global_rank, world_size))
    if dp_size is not None:
        return Topology(global_rank // peers, size, global_rank % peers == 0)
    return Topology(reported_rank, size, peers == 1 or _is_first_of_group(trainer.strategy, global_rank % peers == 0))


def fabric_topology(fabric: Fabric, dp_rank: Rank | None = None, dp_size: int | None = None) -> Topology:
    """The same for Fabric, after ``fabric.launch()``; a function gets the Fabric.

    Raises:
        InvalidRequestError: numbers that don't fit the world's size, or ``launch()`` was not called.
    Examples:
        >>> fabric = L.Fabric(accelerator="cpu", devices=1)
        >>> fabric.launch()
        >>> fabric_topology(fabric)
        Topology(dp_rank=0, dp_size=1, is_reader=True)
    """
    if fabric.world_size > 1 and not fabric._launched:
        raise InvalidRequestError(
            f"this Fabric has {fabric.world_size} processes and is not launched yet, so their ranks are unknown. "
            f"Call fabric.launch() first."
        )
    return trainer_topology(fabric, dp_rank, dp_size)


def run_on_rank_zero(owner: Trainer | Fabric, action: Callable[[], R]) -> R:
    """Run on global rank 0, and return its result or raise its error on every rank. This is a collective."""
    if owner.is_global_zero:
        try:
            result = action()
        except Exception as error:  # of any kind: the other ranks would wait forever
            owner.strategy.broadcast((None, to_wire(error)), src=0)
            raise
        owner.strategy.broadcast((result, None), src=0)
        return result
    received: tuple[Any, Any] = owner.strategy.broadcast((None, None), src=0)
    if received[1] is not None:
        raise from_wire(*received[1])
    answer: R = received[0]
    return answer


def run_on_every_rank(owner: Trainer | Fabric, action: Callable[[], None]) -> None:
    """Run on every rank. If it fails on some, all raise the first error. This is a collective."""
    import torch.distributed as dist

    error: Exception | None = None
    try:
        action()
    except Exception as own:  # of any kind, as above
        error = own
    errors = [None if error is None else to_wire(error)]
    if owner.world_size > 1 and dist.is_available() and dist.is_initialized():
        errors = errors * owner.world_size
        dist.all_gather_object(errors, errors[0])
    if error is not None:
        raise error
    for rank, found in enumerate(errors):
        if found is not None:
            raise from_wire(found[0], f"rank {rank} can't take part: {found[1]}")


def _is_first_with_dp_rank(rank: int, size: int, global_rank: int, world_size: int) -> bool:
    """Whether this is the lowest global rank with this dp_rank. A collective where process groups exist."""
    import torch.distributed as dist

    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return global_rank % (world_size // size) == 0
    ranks: list[int] = [0] * world_size
    dist.all_gather_object(ranks, rank)
    check_dp_ranks(ranks, size)
    return ranks.index(rank) == global_rank


def check_dp_ranks(ranks: list[int], size: int) -> None:
    """Raise InvalidRequestError unless equally many processes have each dp_rank."""
    peers = len(ranks) // size
    if any(ranks.count(each) != peers for each in range(size)):
        raise InvalidRequestError(
            f"the {len(ranks)} processes have dp_rank {ranks}. With dp_size {size}, each rank from 0 to {size - 1} "
            f"must occur {peers} times. Where several processes share their batches, set dp_size too."
        )


def _reported(strategy: Any, global_rank: int, world_size: int) -> tuple[int, int]:
    """(dp_rank, dp_size) as the strategy reports them."""
    from lightning.pytorch.strategies import ParallelStrategy

    peers = _deepspeed_peers(strategy)
    if peers > 1:
        return global_rank // peers, max(1, world_size // peers)
    if getattr(type(strategy), "distributed_sampler_kwargs", None) is ParallelStrategy.distributed_sampler_kwargs:
        return global_rank, world_size  # the inherited property counts the devices of one node only
    reported = getattr(strategy, "distributed_sampler_kwargs", None)
    return (int(reported["rank"]), int(reported["num_replicas"])) if reported else (0, 1)


def _deepspeed_peers(strategy: Any) -> int:
    """Number of neighbouring ranks that share a batch under DeepSpeed's configuration.

    Its strategy counts every process as a replica, regardless of tensor and sequence parallelism.
    """
    if not any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return 1
    config = getattr(strategy, "config", None)
    if not isinstance(config, dict):
        return 1
    tensor = (config.get("tensor_parallel") or {}).get("autotp_size")
    return int(tensor or 1) * int(config.get("sequence_parallel_size") or 1)


def _is_first_of_group(strategy: Any, is_first_neighbour: bool) -> bool:
    mesh = getattr(strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if mesh is None or "data_parallel" not in names:
        return is_first_neighbour
    return all(mesh[name].get_local_rank() == 0 for name in names if name != "data_parallel")
