# SPDX-License-Identifier: Apache-2.0
"""A streaming data queue between producers and trainers. Names load at first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors; a test keeps both lists equal
    from transfer_queue.client import (
        AsyncTransferQueueClient as AsyncTransferQueueClient,
    )
    from transfer_queue.client import (
        TransferQueueClient as TransferQueueClient,
    )
    from transfer_queue.dataloader import (
        StreamingDataLoader as StreamingDataLoader,
    )
    from transfer_queue.dataloader import (
        StreamingDataset as StreamingDataset,
    )
    from transfer_queue.dataloader import (
        chunk_batch_fn as chunk_batch_fn,
    )
    from transfer_queue.dataloader import (
        default_fetch_batch_fn as default_fetch_batch_fn,
    )
    from transfer_queue.dataloader import (
        token_budget_batch_fn as token_budget_batch_fn,
    )
    from transfer_queue.errors import (
        BatchTimeoutError as BatchTimeoutError,
    )
    from transfer_queue.errors import (
        CheckpointError as CheckpointError,
    )
    from transfer_queue.errors import (
        CheckpointNotFoundError as CheckpointNotFoundError,
    )
    from transfer_queue.errors import (
        ConfigError as ConfigError,
    )
    from transfer_queue.errors import (
        EndOfPartitionError as EndOfPartitionError,
    )
    from transfer_queue.errors import (
        FieldNotReadyError as FieldNotReadyError,
    )
    from transfer_queue.errors import (
        ProducersGoneError as ProducersGoneError,
    )
    from transfer_queue.errors import (
        QueueUnreachableError as QueueUnreachableError,
    )
    from transfer_queue.errors import (
        SampleClearedError as SampleClearedError,
    )
    from transfer_queue.errors import (
        SchemaConflictError as SchemaConflictError,
    )
    from transfer_queue.errors import (
        StorageFullError as StorageFullError,
    )
    from transfer_queue.errors import (
        StorageKeyNotFoundError as StorageKeyNotFoundError,
    )
    from transfer_queue.errors import (
        TransferQueueError as TransferQueueError,
    )
    from transfer_queue.errors import (
        UnsupportedValueError as UnsupportedValueError,
    )
    from transfer_queue.interface import (
        async_kv_batch_get as async_kv_batch_get,
    )
    from transfer_queue.interface import (
        async_kv_batch_get_by_meta as async_kv_batch_get_by_meta,
    )
    from transfer_queue.interface import (
        async_kv_batch_put as async_kv_batch_put,
    )
    from transfer_queue.interface import (
        async_kv_clear as async_kv_clear,
    )
    from transfer_queue.interface import (
        async_kv_list as async_kv_list,
    )
    from transfer_queue.interface import (
        async_kv_put as async_kv_put,
    )
    from transfer_queue.interface import (
        close as close,
    )
    from transfer_queue.interface import (
        get_client as get_client,
    )
    from transfer_queue.interface import (
        get_metrics_endpoint as get_metrics_endpoint,
    )
    from transfer_queue.interface import (
        init as init,
    )
    from transfer_queue.interface import (
        kv_batch_get as kv_batch_get,
    )
    from transfer_queue.interface import (
        kv_batch_get_by_meta as kv_batch_get_by_meta,
    )
    from transfer_queue.interface import (
        kv_batch_put as kv_batch_put,
    )
    from transfer_queue.interface import (
        kv_clear as kv_clear,
    )
    from transfer_queue.interface import (
        kv_list as kv_list,
    )
    from transfer_queue.interface import (
        kv_put as kv_put,
    )
    from transfer_queue.interface import (
        load_checkpoint as load_checkpoint,
    )
    from transfer_queue.interface import (
        save_checkpoint as save_checkpoint,
    )
    from transfer_queue.metadata import (
        BatchMeta as BatchMeta,
    )
    from transfer_queue.metadata import (
        KVBatchMeta as KVBatchMeta,
    )
    from transfer_queue.sampler import (
        BaseSampler as BaseSampler,
    )
    from transfer_queue.sampler import (
        GRPOGroupNSampler as GRPOGroupNSampler,
    )
    from transfer_queue.sampler import (
        RankAwareSampler as RankAwareSampler,
    )
    from transfer_queue.sampler import (
        SeqlenBalancedSampler as SeqlenBalancedSampler,
    )
    from transfer_queue.sampler import (
        SequentialSampler as SequentialSampler,
    )
    from transfer_queue.sampler import (
        TokenBudgetSampler as TokenBudgetSampler,
    )

_KV = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear")
_MODULES = {
    "transfer_queue.interface": (
        "init", "close", "get_client", "get_metrics_endpoint", "save_checkpoint", "load_checkpoint",
        *_KV, *(f"async_{name}" for name in _KV),
    ),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.client": ("AsyncTransferQueueClient", "TransferQueueClient"),
    "transfer_queue.errors": (
        "BatchTimeoutError", "CheckpointError", "CheckpointNotFoundError", "ConfigError", "EndOfPartitionError",
        "FieldNotReadyError", "ProducersGoneError", "QueueUnreachableError", "SampleClearedError",
        "SchemaConflictError", "StorageFullError", "StorageKeyNotFoundError", "TransferQueueError",
        "UnsupportedValueError",
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
