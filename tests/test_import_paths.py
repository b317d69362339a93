# SPDX-License-Identifier: Apache-2.0
"""Every promised module path and name is there."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

NAMES = {
    "transfer_queue": (
        "init close get_client save_checkpoint load_checkpoint "
        "kv_put kv_batch_put kv_batch_get kv_batch_get_by_meta kv_list kv_clear "
        "async_kv_put async_kv_batch_put async_kv_batch_get async_kv_batch_get_by_meta async_kv_list async_kv_clear "
        "BatchMeta KVBatchMeta TransferQueueClient StorageKeyNotFoundError BaseSampler SequentialSampler "
        "GRPOGroupNSampler RankAwareSampler SeqlenBalancedSampler StreamingDataset StreamingDataLoader"
    ),
    "transfer_queue.interface": "_TQ_CLIENT _TQ_STORAGE _TQ_CONTROLLER init close get_client kv_put",
    "transfer_queue.client": "TransferQueueClient AsyncTransferQueueClient process_zmq_server_info",
    "transfer_queue.metadata": "BatchMeta KVBatchMeta extract_field_schema",
    "transfer_queue.sampler": "BaseSampler SequentialSampler GRPOGroupNSampler RankAwareSampler SeqlenBalancedSampler",
    "transfer_queue.sampler.base": "BaseSampler",
    "transfer_queue.sampler.sequential_sampler": "SequentialSampler",
    "transfer_queue.sampler.grpo_group_n_sampler": "GRPOGroupNSampler",
    "transfer_queue.sampler.rank_aware_sampler": "RankAwareSampler",
    "transfer_queue.sampler.seqlen_balanced_sampler": (
        "SeqlenBalancedSampler get_seqlen_balanced_partitions karmarkar_karp"
    ),
    "transfer_queue.dataloader": "StreamingDataset StreamingDataLoader default_fetch_batch_fn chunk_batch_fn",
    "transfer_queue.dataloader.streaming_dataset": ("StreamingDataset default_fetch_batch_fn chunk_batch_fn"),
    "transfer_queue.dataloader.streaming_dataloader": "StreamingDataLoader",
    "transfer_queue.storage": (
        "StorageManager StorageManagerFactory StorageKeyNotFoundError AsyncSimpleStorageManager MooncakeStorageManager "
        "YuanrongStorageManager RayStorageManager SimpleStorageUnit"
    ),
    "transfer_queue.storage.simple_storage": "SimpleStorageUnit StorageKeyNotFoundError",
    "transfer_queue.storage.managers": (
        "StorageManager StorageManagerFactory KVStorageManager AsyncSimpleStorageManager MooncakeStorageManager "
        "YuanrongStorageManager RayStorageManager"
    ),
    "transfer_queue.storage.managers.base": "StorageManager StorageManagerFactory KVStorageManager",
    "transfer_queue.storage.clients": (
        "StorageKVClient StorageClientFactory RayStorageClient MooncakeStoreClient YuanrongStorageClient"
    ),
    "transfer_queue.storage.clients.base": "StorageKVClient StorageClientFactory",
    "transfer_queue.storage.bootstrap": "StorageBootstrapProvider",
    "transfer_queue.controller": "TransferQueueController",
    "transfer_queue.utils.logging_utils": "get_logger",
    "transfer_queue.utils.zmq_utils": "ZMQServerInfo process_zmq_server_info",
    "transfer_queue.utils.common": (
        "get_placement_group get_node_round_robin_scheduling_strategies limit_pytorch_auto_parallel_threads "
        "get_env_bool"
    ),
    "transfer_queue.utils.enum_utils": "Role ProductionStatus",
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_promised_name_is_importable(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


def test_every_public_name_resolves() -> None:
    package = import_module("transfer_queue")
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_the_default_configuration_is_a_resource() -> None:
    assert "num_data_storage_units" in (files("transfer_queue") / "config.yaml").read_text()


def test_type_checkers_see_the_names_that_are_there_at_run_time() -> None:
    package = import_module("transfer_queue")
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == package.__all__
