# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning fed by a live queue. Names load at first use, so the import loads neither torch nor lightning."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_QUEUE = Path(__file__).parents[1] / "transfer_queue"
_found = find_spec("transfer_queue")
if _found is None or _found.origin is None or Path(_found.origin).parent.resolve() != _QUEUE.resolve():
    # Another distribution's package comes first, such as that of TransferQueue: none of its code is run.
    import runpy

    runpy.run_path(str(_QUEUE / "own_files.py"))["refuse_other"](_found)

import transfer_queue  # noqa: E402

_NAMES_BY_MODULE = {
    "lightning_tq.batch": ("TQBatch",),
    "lightning_tq.callbacks.partition_switch": ("PartitionSwitch",),
    "lightning_tq.callbacks.publish_weights": ("PublishWeights",),
    "lightning_tq.callbacks.queue_checkpoint": ("TQCheckpoint",),
    "lightning_tq.callbacks.queue_monitor": ("QueueMonitor",),
    "lightning_tq.callbacks.write_back": ("WriteBack", "put_back"),
    "lightning_tq.cli.trainer_cli": ("TQCLI",),
    "lightning_tq.datamodule": ("TQDataModule",),
    "lightning_tq.fabric": ("FabricLoader",),
    "lightning_tq.producers.group": ("Producer", "ProducerError", "ProducerGroup"),
    "lightning_tq.producers.model_weights": ("Weights", "WeightsReader"),
    "lightning_tq.prompts": ("feed_groups",),
    "lightning_tq.queue_config": ("QueueConfig",),
    "lightning_tq.rank_watchdog": ("RankGoneError",),
    "lightning_tq.stream": ("Stream",),
    "lightning_tq.topology": ("Topology", "fabric_topology", "trainer_topology"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULE_OF)
__version__ = transfer_queue.__distribution_version__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_tq' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
