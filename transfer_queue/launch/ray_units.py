# SPDX-License-Identifier: Apache-2.0
"""The storage units of a queue on Ray: on which nodes they are, and how their actors are started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from transfer_queue import controller
from transfer_queue.errors import ConfigError, LaunchError
from transfer_queue.launch.local import start_error
from transfer_queue.storage.clients.ray_client import NAMESPACE, import_ray
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
T = TypeVar("T")
_UNIT_NAME = "TransferQueueStorageUnit#{}"
START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 3.0
_LOOK_S = 0.05
"""How often it is checked whether Ray has freed the name of an actor."""


def eligible_nodes(resource: str | None) -> list[str]:
    """Nodes that get a storage unit, by id; the first one also gets the controller, at best this process's own.

    Raises:
        ConfigError: no node offers the resource.
    """
    ray = import_ray()
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    own = ray.get_runtime_context().get_node_id()
    nodes = [name for name in sorted(alive) if resource is None or alive[name].get(resource)]
    if not nodes:
        offered = sorted({name for resources in alive.values() for name in resources if not name.startswith("node:")})
        raise ConfigError(
            f"no node of the Ray cluster offers the resource {resource!r} "
            f"(backend.SimpleStorage.required_node_resource). Its {len(alive)} nodes offer: {', '.join(offered)}."
        )
    return sorted(nodes, key=lambda name: name != own)


def start_unit(number: int, node: str, arguments: dict[str, Any], deadline: float) -> Any:
    """Start the actor of a storage unit on this node. Its ``failed`` says whether the unit has started."""
    name = _UNIT_NAME.format(number)
    actor_class = controller.SimpleStorageUnit.options(
        name=name, namespace=NAMESPACE, scheduling_strategy=at_node(node)
    )

    def start() -> Any | None:
        try:
            return actor_class.remote(name=name, **arguments)
        except ValueError:  # an earlier queue's unit is ending
            return None

    return await_name(start, deadline, f"there still is an actor {name}")


def has_started(unit: Any, node: str, deadline: float) -> bool:
    """Whether the unit runs. False: its node has died, which Ray may have learned only now.

    Raises:
        LaunchError: its actor ended on a node that lives, or it took too long; otherwise the error that it met.
    """
    ray = import_ray()
    try:
        failed = answer(unit.failed.remote(), deadline)
    except ray.exceptions.RayError as error:
        if any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):
            raise LaunchError(f"the actor of a storage unit ended while it started on node {node}: {error}") from error
        _log.warning("node %s of the Ray cluster has died: the queue has no storage unit there.", node)
        return False
    if failed is not None:
        raise start_error(*failed)
    return True


def end_units(units: list[Any]) -> None:
    """End the actors of storage units, with their servers. A server also ends without its actor or the controller, so
    a node that has died, and does not answer, keeps nobody waiting.
    """
    ray = import_ray()
    if units:
        ray.wait([unit.shutdown.remote() for unit in units], num_returns=len(units), timeout=_STOP_TIMEOUT_S)
    for unit in units:
        ray.kill(unit)


def answer(asked: Any, deadline: float) -> Any:
    ray = import_ray()
    try:
        return ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(
            f"the queue's actors did not start within {START_TIMEOUT_S:.0f} s. See why with 'ray list actors': their "
            f"nodes may have ended, or lack the resources that were asked for."
        ) from None


def at_node(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def await_name(look: Callable[[], T], deadline: float, otherwise: str) -> T:
    """Look again and again, until what is found is true. Raises LaunchError at the deadline."""
    turn = threading.Event()
    while not (found := look()):
        if time.monotonic() > deadline:
            raise LaunchError(f"the queue's name in the Ray cluster isn't free: {otherwise}.")
        turn.wait(_LOOK_S)
    return found
