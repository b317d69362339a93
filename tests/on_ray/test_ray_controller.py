# SPDX-License-Identifier: Apache-2.0
"""The controller's actor by hand: its methods, and the partition's state that programs read from it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue import GRPOGroupNSampler
from transfer_queue.controller import SimpleStorageUnit, TransferQueueController
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies, get_placement_group
from transfer_queue.utils.zmq_utils import process_zmq_server_info

ray = pytest.importorskip("ray")
SCHEMA = {"x": {"dtype": "torch.int64", "shape": (1,)}, "y": {"dtype": "torch.float32", "shape": (2,)}}


@pytest.fixture(scope="module")
def one_node() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Actor:
    """``actor.method(...)`` waits for the result."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: ray.get(getattr(self.handle, name).remote(*args, **kwargs))


@pytest.fixture(scope="module")
def polling(one_node: None) -> Iterator[Actor]:
    actor = Actor(TransferQueueController.remote(sampler=GRPOGroupNSampler(2), polling_mode=True))
    yield actor
    actor.shutdown()
    ray.kill(actor.handle)


def test_samples_are_inserted_produced_fetched_and_cleared(polling: Actor) -> None:
    assert (polling.create_partition("p"), polling.create_partition("p")) == (True, False)
    meta = polling.get_metadata(["x", "y"], "p", mode="insert", batch_size=4)
    indexes = meta.global_indexes
    assert (indexes, polling.get_partition_index_range("p")) == (sorted(indexes), indexes)
    assert polling.get_metadata(["x"], "p", mode="fetch", task_name="t", batch_size=2).size == 0
    assert polling.update_production_status("p", indexes, SCHEMA) is True
    assert polling.update_production_status("unknown", indexes, SCHEMA) is False
    batch = polling.get_metadata(
        ["x"], "p", mode="fetch", task_name="t", batch_size=2, sampling_config={"dp_rank": 0, "batch_index": 0}
    )
    assert (batch.global_indexes, batch.is_ready) == (indexes[:2], True)
    assert polling.scan_data_status("p", ["x", "y"], "t") == indexes[2:]
    assert polling.generate_batch_meta("p", [indexes[3], indexes[0]], ["x"]).global_indexes == [indexes[3], indexes[0]]
    own, consumed = polling.get_consumption_status("p", "t")
    assert (own.tolist(), consumed.tolist()) == (indexes, [1, 1, 0, 0])
    assert polling.get_production_status("p", ["x", "y"])[1].tolist() == [[1, 1]] * 4
    assert polling.reset_consumption("p", "t") is None
    assert polling.reset_consumption("unknown") is None
    assert polling.get_consumption_status("p", "t")[1].tolist() == [0] * 4
    polling.clear_meta([indexes[0], 10_000], ["p", "p"])
    assert polling.get_partition_index_range("p") == indexes[1:]
    with pytest.raises(ValueError, match="two lists of the same length"):
        polling.clear_meta([1], None)
    polling.clear_partition("p")
    polling.clear_partition("p")
    assert polling.list_partitions() == []
    assert polling.get_partition_index_range("p") == []
    assert polling.get_partition_snapshot("p") is None


def test_the_snapshot_has_rows_by_global_index(polling: Actor) -> None:
    first = polling.get_metadata(["x"], "before", mode="insert", batch_size=1)
    meta = polling.kv_retrieve_meta(["a", "b"], "q", create=True)
    indexes = meta.global_indexes
    assert polling.kv_retrieve_keys(indexes, "q") == ["a", "b"]
    assert polling.kv_retrieve_keys(indexes, "unknown") == []
    polling.update_production_status("q", indexes[:1], SCHEMA)
    polling.set_custom_meta({"q": {indexes[1]: {"n": 1}}, "unknown": {0: {}}})
    polling.get_consumption_status("q", "t")
    seen = polling.get_partition_snapshot("q")
    assert seen.global_indexes == set(indexes)
    assert seen.field_name_mapping == {"x": 0, "y": 1}
    assert seen.production_status.shape == (max(indexes) + 1, 2)
    assert seen.production_status[indexes].tolist() == [[1, 1], [0, 0]]
    assert seen.production_status[first.global_indexes].tolist() == [[0, 0]]
    assert seen.keys_mapping == {"a": indexes[0], "b": indexes[1]}
    assert seen.revert_keys_mapping == {indexes[0]: "a", indexes[1]: "b"}
    assert seen.custom_meta == seen.get_custom_meta(indexes) == {indexes[1]: {"n": 1}}
    assert (seen.total_samples_num, seen.total_fields_num, seen.allocated_fields_num) == (2, 2, 2)
    for name in ("before", "q"):
        polling.clear_partition(name)


def test_the_snapshot_of_a_restored_queue_has_tensors_where_its_indexes_are_small(one_node: None, tmp_path) -> None:
    tq.init()
    actor = Actor(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    tq.kv_put("a", "p", {"x": torch.zeros(2)})
    tq.save_checkpoint(str(tmp_path / "saved"))
    actor.clear_partition("p")
    tq.load_checkpoint(str(tmp_path / "saved"))
    seen = actor.get_partition_snapshot("p")
    assert (set(seen.keys_mapping), int(seen.production_status.sum())) == ({"a"}, 1)
    tq.kv_put("b", "p", {"x": torch.zeros(2)})
    seen = actor.get_partition_snapshot("p")
    assert (set(seen.keys_mapping), seen.produced.tolist(), seen.consumption_status) == ({"a", "b"}, [[1], [1]], {})
    with pytest.raises(ValueError, match="a gap at each load_checkpoint"):
        _ = seen.production_status
    tq.close()


def test_a_partition_cleared_through_the_actor_frees_its_values(one_node: None) -> None:
    tq.init({"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"total_storage_size": 4}}})
    actor = Actor(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    client = tq.get_client()
    for turn in range(3):
        client.put({"x": torch.arange(4)}, partition_id=f"p{turn}")
        assert client.get_meta(["x"], 4, f"p{turn}", task_name="t").size == 4
        assert actor.get_partition_snapshot(f"p{turn}").consumption_status["t"][-4:].tolist() == [1] * 4
        actor.clear_partition(f"p{turn}")
    assert client.get_storage_stats()[0]["samples"] == 0
    tq.close()


def test_the_configuration_makes_clients_by_hand(one_node: None, tmp_path: Any) -> None:
    tq.init()
    actor = Actor(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    conf = actor.get_config()
    assert actor.get_zmq_server_info() == conf.controller.zmq_info
    client = tq.TransferQueueClient("by hand", conf.controller.zmq_info)
    client.initialize_storage_manager(conf.backend.storage_backend, conf.backend[conf.backend.storage_backend])
    client.put({"x": torch.arange(4)}, partition_id="p")
    assert client.get_data(client.get_meta(["x"], 4, "p", task_name="t"))["x"].tolist() == [0, 1, 2, 3]
    client.close()
    tq.close()


def test_programs_change_the_options_of_actors_and_mark_their_queue(one_node: None, monkeypatch: Any) -> None:
    given: list[dict[str, Any]] = []
    options = TransferQueueController.options
    monkeypatch.setattr(
        TransferQueueController, "options", lambda **own: given.append(own) or options(**own, max_concurrency=3)
    )
    tq.init({"controller": {"owner_token": "mine"}})
    actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    assert ray.get(actor.get_config.remote()).controller.owner_token == "mine"
    assert given[0]["name"] == "TransferQueueController"
    assert import_module("transfer_queue.storage.simple_storage").SimpleStorageUnit is SimpleStorageUnit
    tq.close()


def test_a_client_by_hand_asks_the_actor_for_its_address(one_node: None) -> None:
    actor = TransferQueueController.remote()
    info = process_zmq_server_info(actor)
    assert process_zmq_server_info({"a": actor}) == {"a": info}
    client = tq.TransferQueueClient("by hand", info)
    section = ray.get(actor.get_config.remote()).backend.SimpleStorage
    client.initialize_storage_manager("AsyncSimpleStorageManager", section)
    client.put({"x": torch.arange(2)}, partition_id="p")
    assert client.get_data(client.get_meta(["x"], 2, "p", task_name="t"))["x"].tolist() == [0, 1]
    client.close()
    ray.get(actor.shutdown.remote())
    ray.kill(actor)


def test_actors_of_a_program_are_placed_in_turn(one_node: None) -> None:
    group = get_placement_group(2, num_cpus_per_actor=1)
    assert group.bundle_count == 2
    ray.util.remove_placement_group(group)
    own = ray.get_runtime_context().get_node_id()
    assert [each.node_id for each in get_node_round_robin_scheduling_strategies(3)] == [own] * 3
    with pytest.raises(ValueError, match="offers the resource 'gpu9'"):
        get_node_round_robin_scheduling_strategies(1, "gpu9")


def test_a_configuration_that_is_refused_is_told_and_the_name_is_free_again(one_node: None) -> None:
    with pytest.raises(ValueError, match="Could not find sampler"):
        tq.init({"controller": {"sampler": "SequentailSampler"}})
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    assert tq.init().launch == "ray"
    tq.close()


def test_values_may_lie_in_rays_object_store(one_node: None) -> None:
    conf = tq.init({"backend": {"storage_backend": "RayStore"}})
    assert (conf.launch, conf.listen) == ("ray", None)
    tq.get_client().put({"x": torch.arange(4)}, partition_id="p")

    @ray.remote(num_cpus=0)
    def read() -> Any:
        tq.init()
        client = tq.get_client()
        return client.get_data(client.get_meta(["x"], 4, "p", task_name="t"))["x"].tolist()

    assert ray.get(read.remote()) == [0, 1, 2, 3]
    tq.close()


def test_local_servers_are_started_where_the_configuration_says_so(one_node: None) -> None:
    assert tq.init({"launch": "local"}).launch == "local"
    tq.close()


def scraped(endpoint: str | None) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_metrics_are_served_from_the_start_or_from_when_they_are_asked_for(one_node: None) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
    tq.init()
    actor = Actor(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    tq.get_client().put({"x": torch.arange(4)}, partition_id="p")
    assert tq.get_metrics_endpoint() is None
    endpoint = actor.start_metrics()
    assert actor.start_metrics() == endpoint
    assert 'tq_partition_samples_total{partition_id="p"} 4.0' in scraped(endpoint)
    tq.close()
    tq.init({"metrics": {"enabled": True}})
    actor = Actor(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    assert actor.start_metrics() == tq.get_metrics_endpoint()
    assert "tq_partitions_total 0.0" in scraped(tq.get_metrics_endpoint())
    tq.close()
