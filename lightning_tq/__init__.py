# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning fed by a live queue. Names load at first use: importing this loads neither torch nor lightning."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "lightning_tq.batch": ("TQBatch",),
    "lightning_tq.callbacks.checkpoint": ("TQCheckpoint",),
    "lightning_tq.callbacks.partition_switch": ("PartitionSwitch",),
    "lightning_tq.callbacks.publish_weights": ("PublishWeights",),
    "lightning_tq.callbacks.queue_monitor": ("QueueMonitor",),
    "lightning_tq.callbacks.staleness": ("StaleSamplesError", "StalenessGuard"),
    "lightning_tq.callbacks.write_back": ("WriteBack", "put_back"),
    "lightning_tq.datamodule": ("TQDataModule",),
    "lightning_tq.fabric": ("FabricLoader",),
    "lightning_tq.pacing": ("Pacer",),
    "lightning_tq.peers": ("RankGoneError",),
    "lightning_tq.producers": ("Producer", "ProducerError", "ProducerGroup"),
    "lightning_tq.queue_config": ("QueueConfig",),
    "lightning_tq.stream": ("Stream",),
    "lightning_tq.trainer_cli": ("TQCLI",),
    "lightning_tq.topology": ("Topology", "fabric_topology", "trainer_topology"),
    "lightning_tq.weights": ("Weights", "WeightsReader"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lightning_tq' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
