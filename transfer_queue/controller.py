# SPDX-License-Identifier: Apache-2.0
"""The actor classes of a queue on Ray. Importing this needs no Ray; ``remote`` and ``options`` do."""

from __future__ import annotations

from transfer_queue.launch.actor_class import ActorClass

__all__ = ["SimpleStorageUnit", "TransferQueueController"]

# No CPU is reserved, so a small cluster has room for all of them. Users pass options of their own.
TransferQueueController = ActorClass(
    "transfer_queue.launch.ray_actors:ControllerActor",
    at_once=("connection", "keys", "get_config", "get_zmq_server_info", "add_unit"),
    num_cpus=0,
)
SimpleStorageUnit = ActorClass("transfer_queue.launch.ray_actors:UnitActor", num_cpus=0)
