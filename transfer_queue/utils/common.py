# SPDX-License-Identifier: Apache-2.0
"""Small helpers for programs that use the queue: flags in the environment, torch's threads, placement on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transfer_queue.config import environment_number, environment_text
from transfer_queue.errors import ConfigError, InvalidRequestError
from transfer_queue.utils.logging_utils import get_logger

_TRUE = frozenset({"true", "1", "yes", "y", "on"})
_log = get_logger(__name__)


def get_env_bool(env_key: str, default: bool = False) -> bool:
    """Whether a variable is true, 1, yes, y or on, in any case; ``default`` if it is unset or empty."""
    return environment_text(env_key, str(default)).strip().lower() in _TRUE


@contextmanager
def limit_pytorch_auto_parallel_threads(target_num_threads: int | None = None, info: str = "") -> Iterator[None]:
    """Limit torch's threads inside the block, and restore their number afterwards.

    Args:
        target_num_threads: None: TQ_NUM_THREADS, 8 by default. It never raises the current number.
        info: Named in the debug log.
    """
    import torch

    wanted = int(environment_number("TQ_NUM_THREADS", 8)) if target_num_threads is None else target_num_threads
    if wanted < 1:
        raise InvalidRequestError(f"torch needs at least 1 thread, got {wanted}.")
    before = torch.get_num_threads()
    _log.debug("%s: torch threads %d -> %d", info, before, min(before, wanted))
    torch.set_num_threads(min(before, wanted))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def get_placement_group(num_ray_actors: int, num_cpus_per_actor: int = 1) -> Any:
    """Reserve CPUs for so many Ray actors, one bundle each, on as many nodes as possible, and wait for them."""
    import ray

    group = ray.util.placement_group([{"CPU": num_cpus_per_actor}] * num_ray_actors, strategy="SPREAD")
    ray.get(group.ready())
    return group


def get_node_round_robin_scheduling_strategies(num_actors: int, required_node_resource: str | None = None) -> list[Any]:
    """Scheduling strategies that place Ray actors on the living nodes in turn, by id.

    Args:
        required_node_resource: Only nodes that offer this resource take part.
    Raises:
        ConfigError: no node offers the resource, or none is alive.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    nodes = sorted(name for name in alive if required_node_resource is None or alive[name].get(required_node_resource))
    if not nodes:
        raise ConfigError(
            f"none of the {len(alive)} living nodes of the Ray cluster offers the resource {required_node_resource!r}."
        )
    return [NodeAffinitySchedulingStrategy(node_id=nodes[n % len(nodes)], soft=False) for n in range(num_actors)]
