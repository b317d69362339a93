# SPDX-License-Identifier: Apache-2.0
"""A streaming data queue between producers and trainers. Names load at first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_KV = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear")
_MODULES = {
    "transfer_queue.interface": (
        "init", "close", "get_client", "get_metrics_endpoint", *_KV, *(f"async_{name}" for name in _KV),
    ),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.client": ("AsyncTransferQueueClient", "TransferQueueClient"),
    "transfer_queue.errors": (
        "BatchTimeoutError", "ConfigError", "EndOfPartitionError", "FieldNotReadyError", "ProducersGoneError",
        "QueueUnreachableError", "SampleClearedError", "SchemaConflictError", "StorageFullError",
        "StorageKeyNotFoundError", "TransferQueueError", "UnsupportedValueError",
    ),
    "transfer_queue.sampler": (
        "BaseSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler",
        "TokenBudgetSampler",
    ),
    "transfer_queue.dataloader": (
        "StreamingDataLoader", "StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn", "token_budget_batch_fn",
    ),
}  # fmt: skip
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)
__version__ = Path(__file__).with_name("version").joinpath("version").read_text().strip()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'transfer_queue' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
