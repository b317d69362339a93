# SPDX-License-Identifier: Apache-2.0
"""A queue on three nodes of a Ray cluster: every process finds it, each node stores values, a node may die."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.on_ray.conftest import NODES, WAIT_S, on
from tests.own_processes import own_processes
from transfer_queue import interface
from transfer_queue.client import connect
from transfer_queue.errors import SamplerError
from transfer_queue.utils.zmq_utils import ZMQServerInfo

ray = pytest.importorskip("ray")

ROWS = 6


def controller() -> Any:
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def servers() -> list[int]:
    """Server processes of this machine that descend from this one: Ray's nodes do."""
    found = own_processes()
    return [each.pid for each in found if "transfer_queue.server.main" in " ".join(each.cmdline())]


def watched(pids: list[int]) -> list[int]:
    """Descriptors by which ``end`` sees the end of these processes, whoever is their parent."""
    return [os.pidfd_open(pid) for pid in pids]


def end(descriptors: list[int]) -> bool:
    """Whether all of them end, in good time."""
    ended = [bool(select.select([each], [], [], WAIT_S)[0]) for each in descriptors]
    for each in descriptors:
        os.close(each)
    return all(ended)


def rows(start: int, count: int = ROWS) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + count).unsqueeze(1).repeat(1, 20_000)}


@ray.remote
def attach() -> None:
    tq.init()


def server_at(socket: str, conf: Any) -> ZMQServerInfo:
    """The controller's server, at its address for other hosts."""
    return ZMQServerInfo("controller", "controller", ports={socket: conf.listen}, key_file=conf.key_file)


@ray.remote
def put(partition: str, start: int, conf: Any) -> list[int]:
    """As from another host: the units, which are all on this machine, take turns."""
    conf = conf.copy()
    conf.controller.zmq_info = server_at("request_handle_socket", conf)
    conf.backend.SimpleStorage.zmq_info = {"unit0": server_at("put_get_socket", conf)}
    client = connect("writer", conf)
    try:
        return [client.put(rows(start + row, 1), partition_id=partition).global_indexes[0] for row in range(ROWS)]
    finally:
        client.close()


@ray.remote
class Consumer:
    """Takes batches, on whichever node it runs."""

    def __init__(self) -> None:
        self.conf = tq.init()

    def take(self, partition: str, count: int, task: str = "t") -> list[int]:
        client = tq.get_client()
        meta = client.get_meta(["x"], count, partition, task_name=task, timeout_s=60.0)
        return [int(row[0]) for row in client.get_data(meta)["x"].unbind()]

    def launch(self) -> str:
        return str(self.conf.launch)

    def stream(self, conf: Any, partition: str) -> list[int]:
        """With two DataLoader workers, which know nothing of Ray."""
        dataset = tq.StreamingDataset(conf, 2, 2, ["x"], partition, "stream", 0, should_check_consumption_status=True)
        loader = tq.StreamingDataLoader(dataset, num_workers=2)
        return [int(row[0]) for data, _ in loader for row in data["x"].unbind()]

    def leave(self) -> None:
        tq.close()


def test_values_spread_over_units_and_are_consumed_on_every_node(queue):
    assert queue.launch == "ray"
    indexes = ray.get([put.options(**on(number)).remote("p", ROWS * number, queue) for number in range(NODES)])
    assert sorted(chain(*indexes)) == list(range(ROWS * NODES))
    stats = tq.get_client().get_storage_stats()
    assert sorted(unit["unit"] for unit in stats) == [
        "TransferQueueStorageUnit#1",
        "TransferQueueStorageUnit#2",
        "unit0",
    ]
    assert all(unit["samples"] for unit in stats if unit["unit"] != "unit0")  # the others are near these writers
    assert {unit["capacity_bytes"] for unit in stats} == {(192 << 20) // NODES}
    assert len(servers()) == NODES
    consumers = [Consumer.options(**on(number)).remote() for number in range(NODES)]
    taken = ray.get([each.take.remote("p", ROWS) for each in consumers])
    assert sorted(chain(*taken)) == list(range(ROWS * NODES))


def test_a_task_without_init_finds_the_queue(queue):
    @ray.remote(num_cpus=0)
    def list_keys() -> Any:
        return tq.kv_list("p")

    tq.kv_put("k", "p", {"x": torch.ones(3)}, {"a": 1})
    assert ray.get(list_keys.remote()) == {"p": {"k": {"a": 1}}}


def test_workers_of_a_loader_need_no_ray(queue):
    client = tq.get_client()
    client.create_partition("p", num_samples=ROWS)
    client.put(rows(0), partition_id="p")
    consumer = Consumer.options(**on(2)).remote()
    for conf in (queue, ray.get(controller().get_config.remote()), None):
        assert sorted(ray.get(consumer.stream.remote(conf, "p"))) == list(range(ROWS))
        client.reset_consumption("p")


def test_the_process_that_attached_leaves_the_queue_running(queue):
    tq.get_client().put(rows(0), partition_id="p")
    consumer = Consumer.options(**on(1)).remote()
    assert ray.get(consumer.launch.remote()) == "ray"
    ray.get(consumer.leave.remote())
    assert tq.get_client().get_partition_list() == ["p"]


def test_after_close_nothing_is_left_and_the_next_queue_is_a_new_one(queue):
    @ray.remote(num_cpus=0)
    def partitions() -> list[str]:
        tq.init()
        return tq.get_client().get_partition_list()

    tq.get_client().put(rows(0), partition_id="p")
    assert ray.get(partitions.remote()) == ["p"]
    tq.close()
    assert servers() == []
    assert "TQ_ADDRESS" not in os.environ
    with pytest.raises(tq.errors.NotInitializedError):
        tq.get_client()
    tq.init()
    assert [ray.get(partitions.remote()) for _ in range(3)] == [[], [], []]  # in the process of before, among others


def test_of_processes_that_start_it_at_once_one_does(cluster):
    starters = [Consumer.options(**on(number)).remote() for number in range(NODES)]
    assert ray.get([each.launch.remote() for each in starters]) == ["ray"] * NODES
    tq.init()
    assert interface._TQ_STORAGE is None
    tq.get_client().put(rows(0), partition_id="p")
    taken = ray.get([each.take.remote("p", ROWS // NODES) for each in starters])
    assert sorted(chain(*taken)) == list(range(ROWS))
    tq.close()
    ray.get([each.leave.remote() for each in starters])
    assert servers() == []


class Reversed(tq.SequentialSampler):
    """Not importable on the controller's node."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return super().sample(sorted(ready_indexes, reverse=True), batch_size)


@pytest.mark.parametrize("sampler", [Reversed, Reversed()], ids=["class", "instance"])
def test_a_sampler_of_the_drivers_own_script_is_used(cluster, sampler):
    Reversed.__module__ = "__main__"  # as in a script
    tq.init({"controller": {"sampler": sampler}})
    tq.get_client().put(rows(0), partition_id="p")
    assert ray.get(Consumer.options(**on(1)).remote().take.remote("p", 2)) == [5, 4]
    assert len(servers()) == NODES - 1
    tq.close()


class Unloadable(tq.SequentialSampler):
    def __reduce__(self) -> Any:
        return exec, ("raise ImportError('no module named mine')",)


def test_a_sampler_that_cannot_be_loaded_there_is_an_error_and_nothing_stays(cluster):
    Unloadable.__module__ = "__main__"
    with pytest.raises(SamplerError, match="no module named mine"):
        tq.init({"controller": {"sampler": Unloadable()}})
    assert servers() == []
    tq.init()
    tq.close()


def test_units_are_on_nodes_with_the_required_resource_alone(cluster):
    tq.init({"backend": {"SimpleStorage": {"required_node_resource": "n2"}}})
    assert [unit["unit"] for unit in tq.get_client().get_storage_stats()] == ["unit0"]
    tq.close()
    with pytest.raises(ValueError, match=r"no node of the Ray cluster offers the resource 'gpu9'.* n0, n1, n2"):
        tq.init({"backend": {"SimpleStorage": {"required_node_resource": "gpu9"}}})


def test_a_queue_of_several_units_is_saved_and_loaded(queue, tmp_path):
    ray.get([put.options(**on(number)).remote("p", ROWS * number, queue) for number in range(NODES)])
    tq.kv_put("k", "kv", {"y": torch.arange(3)}, {"a": 1})
    tq.save_checkpoint(tmp_path / "saved")
    tq.close()
    tq.init()
    tq.load_checkpoint(tmp_path / "saved")
    taken = ray.get(Consumer.options(**on(1)).remote().take.remote("p", ROWS * NODES))
    assert sorted(taken) == list(range(ROWS * NODES))
    assert tq.kv_batch_get("k", "kv")["y"].unbind()[0].tolist() == [0, 1, 2]


def test_a_second_driver_attaches(queue, cluster):
    tq.get_client().put(rows(0), partition_id="p")
    code = "import ray, sys, transfer_queue as tq; ray.init(address=sys.argv[1]); conf = tq.init(); "
    code += "print(conf.launch, tq.get_client().get_partition_list()); tq.close(); tq.close()"
    done = subprocess.run(
        [sys.executable, "-c", code, cluster.address], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "ray ['p']"
    assert tq.get_client().get_partition_list() == ["p"]


def test_the_queue_ends_with_the_driver_that_started_it(cluster):
    code = "import os, ray, signal, sys, transfer_queue as tq; ray.init(address=sys.argv[1]); tq.init(); "
    code += "print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as driver:
        while driver.stdout.readline() != "up\n":
            assert driver.poll() is None
        running = watched(servers())
        driver.kill()
    assert len(running) == NODES
    assert end(running)
    tq.init()
    assert tq.get_client().get_partition_list() == []
    tq.close()


def test_the_servers_end_with_an_actor_that_is_killed(queue):
    running = watched(servers())
    ray.kill(controller())
    assert end(running)


def test_a_later_node_has_a_unit_from_the_first_init_there_on(cluster, monkeypatch):
    queue = tq.init({"backend": {"SimpleStorage": {"memory": "192MiB"}}})
    with monkeypatch.context() as patch:  # the node is a child of this process, unlike a real one
        for name in ("TQ_ADDRESS", "TQ_KEY_FILE"):
            patch.delenv(name, raising=False)
        node = cluster.add_node(num_cpus=0, resources={f"n{NODES}": 10})
    try:
        assert len(tq.get_client().get_storage_stats()) == NODES
        ray.get([attach.options(**on(NODES)).remote() for _ in range(2)])  # both at once
        units = tq.get_client().get_storage_stats()
        assert len(units) == NODES + 1
        assert len({unit["capacity_bytes"] for unit in units}) == 1
        ray.get([put.options(**on(number)).remote("p", ROWS * number, queue) for number in range(NODES + 1)])
        meta = tq.get_client().get_meta(["x"], ROWS * (NODES + 1), "p", task_name="t")
        assert sorted(row[0].item() for row in tq.get_client().get_data(meta)["x"]) == list(range(ROWS * (NODES + 1)))
        stats = tq.get_client().get_storage_stats()
        assert all(unit["samples"] for unit in stats if unit["unit"] != "unit0")
        running = watched(servers())
        tq.close()
        assert end(running)
    finally:
        tq.close()
        cluster.remove_node(node)
        cluster.wait_for_nodes(WAIT_S)  # otherwise the next queue would have a unit there


def test_what_a_dead_node_held_is_lost_and_everything_else_goes_on(cluster):
    node = cluster.add_node(num_cpus=0, resources={"n3": 10})
    queue = tq.init()
    client = tq.get_client()
    ray.get([put.options(**on(number)).remote("p", ROWS * number, queue) for number in range(NODES + 1)])
    held = {unit["unit"]: unit["samples"] for unit in client.get_storage_stats()}
    unit = ray.get(controller_unit_of(node))
    running = watched([unit.pid])
    cluster.remove_node(node, allow_graceful=False)
    assert end(running)
    assert sum(held.values()) == ROWS * (NODES + 1)
    lost = {}
    while not lost:  # the controller hears of it at once, but not at the same moment
        lost = client.get_lost_samples("p")
    assert len(lost["x"]) == held[unit.id]
    meta = client.get_meta(["x"], ROWS * (NODES + 1) - held[unit.id], "p", task_name="t")
    assert not set(meta.global_indexes) & set(lost["x"])
    assert client.get_data(meta).batch_size[0] == meta.size
    again = client.get_meta(None, None, "p", mode="force_fetch").select_samples(lost["x"])
    client.put(rows(0, len(lost["x"])), again)
    assert client.get_lost_samples("p") == {}
    tq.close()


def controller_unit_of(node: Any) -> Any:
    """The information of the storage unit that this node hosts."""
    nodes = sorted(each["NodeID"] for each in ray.nodes() if each["Alive"])
    own = ray.get_runtime_context().get_node_id()
    order = sorted(nodes, key=lambda name: name != own)
    name = f"TransferQueueStorageUnit#{order.index(node.node_id)}"
    return ray.get_actor(name, namespace="transfer_queue").get_zmq_server_info.remote()
