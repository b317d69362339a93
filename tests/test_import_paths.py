# SPDX-License-Identifier: Apache-2.0
"""Every promised module path and name is there."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.resources import files
from inspect import signature
from operator import attrgetter
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


PARAMETERS = {
    "transfer_queue": {
        "init": "conf",
        "kv_put": "key partition_id fields tag data_parser",
        "kv_batch_put": "keys partition_id fields tags data_parser",
        "kv_batch_get": "keys partition_id select_fields",
        "kv_batch_get_by_meta": "meta select_fields",
        "kv_list": "partition_id",
        "kv_clear": "keys partition_id",
        "save_checkpoint": "checkpoint_dir include_storage metadata",
        "load_checkpoint": "checkpoint_dir",
        "TransferQueueClient.put": "data metadata partition_id data_parser",
        "TransferQueueClient.get_meta": "data_fields batch_size partition_id mode task_name sampling_config",
        "TransferQueueClient.get_data": "metadata",
        "TransferQueueClient.clear_samples": "metadata",
        "TransferQueueClient.check_production_status": "data_fields partition_id",
        "TransferQueueClient.check_consumption_status": "task_name partition_id",
        "TransferQueueClient.reset_consumption": "partition_id task_name",
        "TransferQueueClient.kv_retrieve_meta": "keys partition_id create",
        "TransferQueueClient.kv_retrieve_keys": "global_indexes partition_id",
        "BatchMeta.add_fields": "tensor_dict set_all_ready",
        "BatchMeta.reorder": "indices",
        "BatchMeta.select_fields": "field_names",
        "BatchMeta.select_samples": "sample_indices",
        "KVBatchMeta.reorder": "indexes",
        "KVBatchMeta.select_keys": "keys_to_select",
        "StreamingDataset": (
            "config batch_size micro_batch_size data_fields partition_id task_name dp_rank "
            "should_check_consumption_status fetch_batch_fn process_batch_fn"
        ),
    },
    "transfer_queue.storage.managers": {"StorageManagerFactory.register": "manager_type"},
    "transfer_queue.storage.clients": {
        "StorageClientFactory.register": "client_type",
        "StorageClientFactory.create": "client_type config",
    },
    "transfer_queue.utils.common": {"get_env_bool": "env_key default"},
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_promised_name_is_importable(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize(("module", "path"), [(module, path) for module in PARAMETERS for path in PARAMETERS[module]])
def test_parameters_have_the_names_and_the_order_that_programs_use(module: str, path: str) -> None:
    names = [name for name in signature(attrgetter(path)(import_module(module))).parameters if name != "self"]
    promised = PARAMETERS[module][path].split()
    assert names[: len(promised)] == promised


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
