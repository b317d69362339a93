# SPDX-License-Identifier: Apache-2.0
"""Topology: which data-parallel rank this process is, out of how many, and whether it speaks for its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

Rank = int | Callable[[Any], int]


@dataclass(frozen=True)
class Topology:
    """Ranks of one data-parallel group (tensor, pipeline or context peers) have the same ``dp_rank``.

    ``is_reader``: one rank per group; it alone settles what the group has read.
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_reader: bool = True

    def __post_init__(self) -> None:
        if self.dp_size < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise InvalidRequestError(
                f"dp_rank {self.dp_rank} of dp_size {self.dp_size}: ranks go from 0 to dp_size - 1, and there is one "
                f"at least."
            )


def trainer_topology(trainer: Trainer, dp_rank: Rank | None = None, dp_size: int | None = None) -> Topology:
    """What the Trainer's strategy says; valid from ``setup`` on, not before.

    Args:
        dp_rank: A number, or a function of the Trainer: for strategies that report no groups.
        dp_size: Alone, neighbouring ranks form a group: rank r is in group r // (world_size / dp_size).
    Raises:
        InvalidRequestError: numbers that don't fit the world's size.
    """
    told = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return _topology(trainer, trainer.strategy, told, (trainer.global_rank, trainer.world_size), dp_rank, dp_size)


def fabric_topology(fabric: Fabric, dp_rank: Rank | None = None, dp_size: int | None = None) -> Topology:
    """The same for Fabric, after ``fabric.launch()``."""
    told = getattr(fabric.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    return _topology(fabric, fabric.strategy, told, (fabric.global_rank, fabric.world_size), dp_rank, dp_size)


def _topology(
    owner: Any, strategy: Any, told: dict[str, Any], world: tuple[int, int], dp_rank: Rank | None, dp_size: int | None
) -> Topology:
    if dp_rank is None and dp_size is None:
        return Topology(int(told["rank"]), int(told["num_replicas"]), _is_first_of_mesh(strategy))
    global_rank, world_size = world
    size = int(told["num_replicas"]) if dp_size is None else dp_size
    if size < 1 or world_size % size:
        raise InvalidRequestError(
            f"dp_size {size} doesn't divide the {world_size} processes of this run. Every data-parallel group has "
            f"equally many ranks."
        )
    peers = world_size // size
    if dp_rank is None:
        return Topology(global_rank // peers, size, global_rank % peers == 0)
    rank = dp_rank(owner) if callable(dp_rank) else dp_rank
    return Topology(rank, size, peers == 1 or global_rank % peers == 0)


def _is_first_of_mesh(strategy: Any) -> bool:
    mesh = getattr(strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if mesh is None or "tensor_parallel" not in names:
        return True
    return bool(mesh["tensor_parallel"].get_local_rank() == 0)
