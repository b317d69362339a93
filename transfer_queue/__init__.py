# SPDX-License-Identifier: Apache-2.0
"""A streaming data queue between producers and trainers. Names load at first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue import own_files as own_files  # which raises ImportError if files of TransferQueue's replaced these

# isort: off
if TYPE_CHECKING:  # the same names for type checkers and editors; a test keeps both lists equal
    from transfer_queue.checkpoint.inspection import describe_checkpoint as describe_checkpoint
    from transfer_queue.checkpoint.recorded import RecordedBatches as RecordedBatches
    from transfer_queue.checkpoint.remote import (
        remove_checkpoint as remove_checkpoint,
        upload_checkpoint as upload_checkpoint,
    )
    from transfer_queue.checkpoint.spool import spooled_checkpoint as spooled_checkpoint
    from transfer_queue.client import (
        AsyncTransferQueueClient as AsyncTransferQueueClient,
        KeyChanges as KeyChanges,
        TransferQueueClient as TransferQueueClient,
    )
    from transfer_queue.client.lease import Lease as Lease
    from transfer_queue.control.tag_filter import parse_filter as parse_filter
    from transfer_queue.dataloader import (
        StreamingDataLoader as StreamingDataLoader,
        StreamingDataset as StreamingDataset,
        chunk_batch_fn as chunk_batch_fn,
        default_fetch_batch_fn as default_fetch_batch_fn,
        token_budget_batch_fn as token_budget_batch_fn,
    )
    from transfer_queue.diagnosis import (
        diagnose as diagnose,
        is_internal as is_internal,
    )
    from transfer_queue.errors import (
        BatchTimeoutError as BatchTimeoutError,
        CheckpointError as CheckpointError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        ConfigError as ConfigError,
        EndOfPartitionError as EndOfPartitionError,
        FieldNotReadyError as FieldNotReadyError,
        GateStarvedError as GateStarvedError,
        GroupStateError as GroupStateError,
        KeysTimeoutError as KeysTimeoutError,
        LeaseLostError as LeaseLostError,
        ProducersGoneError as ProducersGoneError,
        QueueUnreachableError as QueueUnreachableError,
        SampleClearedError as SampleClearedError,
        SchemaConflictError as SchemaConflictError,
        StorageFullError as StorageFullError,
        StorageKeyNotFoundError as StorageKeyNotFoundError,
        TransferQueueError as TransferQueueError,
        UnitLostError as UnitLostError,
        UnsupportedValueError as UnsupportedValueError,
    )
    from transfer_queue.finding import Finding as Finding
    from transfer_queue.interface import (
        async_kv_batch_get as async_kv_batch_get,
        async_kv_batch_get_by_meta as async_kv_batch_get_by_meta,
        async_kv_batch_put as async_kv_batch_put,
        async_kv_clear as async_kv_clear,
        async_kv_list as async_kv_list,
        async_kv_put as async_kv_put,
        async_kv_wait_keys as async_kv_wait_keys,
        async_kv_watch as async_kv_watch,
        close as close,
        get_client as get_client,
        get_metrics_endpoint as get_metrics_endpoint,
        init as init,
        kv_batch_get as kv_batch_get,
        kv_batch_get_by_meta as kv_batch_get_by_meta,
        kv_batch_put as kv_batch_put,
        kv_clear as kv_clear,
        kv_list as kv_list,
        kv_put as kv_put,
        kv_wait_keys as kv_wait_keys,
        kv_watch as kv_watch,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from transfer_queue.launch.running import Observer as Observer
    from transfer_queue.launch.serve import serve as serve
    from transfer_queue.metadata import (
        BatchMeta as BatchMeta,
        KVBatchMeta as KVBatchMeta,
    )
    from transfer_queue.storage.number_lists import ragged as ragged
    from transfer_queue.sampler import (
        BaseSampler as BaseSampler,
        GRPOGroupNSampler as GRPOGroupNSampler,
        GroupSampler as GroupSampler,
        RankAwareSampler as RankAwareSampler,
        SeqlenBalancedSampler as SeqlenBalancedSampler,
        SequentialSampler as SequentialSampler,
        TokenBudgetSampler as TokenBudgetSampler,
    )
    from transfer_queue.transport.tcp_wire import make_key_file as make_key_file

# isort: on

_KV = (
    "kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear", "kv_wait_keys", "kv_watch",
)  # fmt: skip
_MODULES = {
    "transfer_queue.finding": ("Finding",),
    "transfer_queue.interface": (
        "init", "close", "get_client", "get_metrics_endpoint", "save_checkpoint", "load_checkpoint",
        *_KV, *(f"async_{name}" for name in _KV),
    ),
    "transfer_queue.checkpoint.inspection": ("describe_checkpoint",),
    "transfer_queue.checkpoint.recorded": ("RecordedBatches",),
    "transfer_queue.checkpoint.remote": ("remove_checkpoint", "upload_checkpoint"),
    "transfer_queue.checkpoint.spool": ("spooled_checkpoint",),
    "transfer_queue.launch.running": ("Observer",),
    "transfer_queue.launch.serve": ("serve",),
    "transfer_queue.transport.tcp_wire": ("make_key_file",),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.client": ("AsyncTransferQueueClient", "KeyChanges", "TransferQueueClient"),
    "transfer_queue.client.lease": ("Lease",),
    "transfer_queue.control.tag_filter": ("parse_filter",),
    "transfer_queue.diagnosis": ("diagnose", "is_internal"),
    "transfer_queue.errors": (
        "BatchTimeoutError", "CheckpointError", "CheckpointNotFoundError", "ConfigError", "EndOfPartitionError",
        "FieldNotReadyError", "GateStarvedError", "GroupStateError", "KeysTimeoutError", "LeaseLostError",
        "ProducersGoneError", "QueueUnreachableError", "SampleClearedError", "SchemaConflictError", "StorageFullError",
        "StorageKeyNotFoundError", "TransferQueueError", "UnitLostError", "UnsupportedValueError",
    ),
    "transfer_queue.sampler": (
        "BaseSampler", "GRPOGroupNSampler", "GroupSampler", "RankAwareSampler", "SeqlenBalancedSampler",
        "SequentialSampler", "TokenBudgetSampler",
    ),
    "transfer_queue.storage.number_lists": ("ragged",),
    "transfer_queue.dataloader": (
        "StreamingDataLoader", "StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn", "token_budget_batch_fn",
    ),
}  # fmt: skip
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)
_versions = Path(__file__).with_name("version")
__version__ = (_versions / "version").read_text().strip()
"""Level of the API: the version of TransferQueue whose public names work here. Programs compare it."""
__distribution_version__ = (_versions / "distribution").read_text().strip()
"""Version of lightning-tq, which both packages belong to."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'transfer_queue' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
