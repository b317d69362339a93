# SPDX-License-Identifier: Apache-2.0
"""What a queue does whatever its storage backend is, seen from its client."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.contract.backend_kit import BACKENDS, RUNNING, die_before_commit, manager_by_hand, missing, prepared
from tests.contract.storage_kit import blocking
from tests.integration.noticing import until
from tests.own_processes import SLOW, own_processes
from tests.warm_python import ROOT, run_python
from transfer_queue import protocol as p

_names = itertools.count()
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=BACKENDS)
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The running queue's configuration; the backend's files, if it has any, are in ``directory``."""
    if reason := missing(request.param):
        pytest.skip(reason)
    directory, before = tmp_path_factory.mktemp("values"), len(own_processes())
    with prepared(request.param):
        conf = tq.init(BACKENDS[request.param](directory))
        conf.directory = str(directory)
        yield conf
        assert (["FilesByKey"] if request.param == "FilesByKey" else []) == RUNNING
        tq.close()
    assert RUNNING == []
    assert len(own_processes()) == before
    assert not [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture
def client(queue: Any) -> tq.TransferQueueClient:
    return tq.get_client()


@pytest.fixture
def name(client: tq.TransferQueueClient) -> Iterator[str]:
    """A partition; when the test is over its values are gone."""
    own = f"p{next(_names)}"
    yield own
    client.clear_partition(own)


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def listed(column: Any) -> list[Any]:
    return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else list(column.tolist())


def keys_in_files(queue: Any) -> list[str]:
    return sorted(path.name for path in Path(queue.directory).iterdir() if path.is_file())


def test_tensors_texts_and_objects_come_back_in_the_order_of_the_metadata(client, name):
    objects = [{"k": [1, "a"]}, None, (1, (2,)), np.arange(3)]
    meta = client.put(
        rows(
            x=torch.arange(8.0).view(4, 2),
            n=torch.tensor([7, 8, 9, 10]),
            s=["a", "", "c", "ü"],
            o=NonTensorStack(*objects),
        ),
        partition_id=name,
    )
    got = client.get_data(meta.select_samples([2, 0, 3, 1]))
    assert (listed(got["x"]), listed(got.get("n"))) == ([[4, 5], [0, 1], [6, 7], [2, 3]], [9, 7, 10, 8])
    assert listed(got.get("s")) == ["c", "a", "ü", ""]
    found = listed(got.get("o"))
    assert found[1:2] + found[3:] == [objects[0], objects[1]]
    assert list(found[0]) == [1, (2,)]
    assert np.array_equal(found[2], objects[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8], ids=str)
def test_dtypes_are_kept(client, name, dtype):
    data = torch.arange(12).view(3, 4).to(dtype)
    column = client.get_data(client.put(rows(x=data), partition_id=name))["x"]
    assert column.dtype == dtype
    assert torch.equal(column.values().view(3, 4), data)


def test_a_call_may_name_its_layout(client, name):
    meta = client.put(rows(x=torch.ones(2, 3)), partition_id=name)
    assert client.get_data(meta, layout="jagged")["x"].is_nested
    assert torch.equal(client.get_data(meta, layout="dense")["x"], torch.ones(2, 3))


def test_jagged_and_empty_rows_come_back(client, name):
    lengths = [3, 0, 1, 5]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    data = torch.nested.nested_tensor_from_jagged(torch.arange(int(offsets[-1])), offsets)
    meta = client.put(rows(x=data, empty=torch.zeros(4, 0)), partition_id=name)
    assert listed(client.get_data(meta.select_fields(["x"]))["x"]) == [[0, 1, 2], [], [3], [4, 5, 6, 7, 8]]
    assert [tuple(row.shape) for row in client.get_data(meta)["empty"].unbind()] == [(0,)] * 4


def test_large_values_come_back_equal(client, name):
    data = torch.randint(0, 255, (6, 3 << 20), dtype=torch.uint8)
    meta = client.put(rows(x=data), partition_id=name)
    assert torch.equal(client.get_data(meta)["x"].values().view(6, -1), data)


def test_many_small_puts_are_read_as_one_batch(client, name):
    for n in range(40):
        client.put(rows(x=torch.tensor([[n, n]]), s=[f"{n}"]), partition_id=name)
    meta = client.get_meta(["x", "s"], 40, name, task_name="t")
    got = client.get_data(meta)
    assert (listed(got["x"]), listed(got.get("s"))) == ([[n, n] for n in range(40)], [f"{n}" for n in range(40)])


def test_fields_are_added_replaced_and_read_apart(client, name):
    meta = client.put(rows(a=torch.zeros(3, 2)), partition_id=name)
    client.put(rows(b=torch.ones(3, 2)), metadata=meta)
    client.put(rows(a=torch.full((2, 3), 5.0)), metadata=meta[1:])
    assert listed(client.get_data(meta.select_fields(["a"]))["a"]) == [[0, 0], [5, 5, 5], [5, 5, 5]]
    assert listed(client.get_data(meta.select_fields(["b"]))["b"]) == [[1, 1]] * 3


def test_a_value_read_is_the_readers_own(client, name):
    meta = client.put(rows(x=torch.zeros(2, 3)), partition_id=name)
    client.get_data(meta)["x"].values().fill_(9)
    assert listed(client.get_data(meta)["x"]) == [[0, 0, 0]] * 2


def test_a_stream_s_batches_come_with_their_values(client, name):
    client.put(rows(x=torch.arange(8).view(8, 1)), partition_id=name)
    client.seal_partition(name)
    seen = []
    for _ in range(2):
        meta = client.get_meta(["x"], 4, name, task_name="t")
        seen += listed(client.get_data(meta)["x"])
    assert seen == [[n] for n in range(8)]
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["x"], 4, name, task_name="t")


def test_keys_put_get_and_clear(client, queue, name):
    before = keys_in_files(queue)
    tq.kv_batch_put(["k0", "k1"], name, rows(x=torch.arange(4).view(2, 2)), [{"t": 0}, {"t": 1}])
    tq.kv_put("k1", name, {"y": torch.ones(2)})
    assert listed(tq.kv_batch_get(["k1", "k0"], name, "x")["x"]) == [[2, 3], [0, 1]]
    tq.kv_clear(["k0", "k1"], name)
    assert keys_in_files(queue) == before


def test_cleared_values_are_gone_and_reading_them_is_a_typed_error(client, queue, name):
    if queue.backend.storage_backend == "FilesByHand":
        pytest.skip("what it raises is its author's")
    meta = client.put(rows(x=torch.arange(3).view(3, 1)), partition_id=name)
    client.clear_samples(meta[:2])
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta[:1])
    assert listed(client.get_data(meta[2:])["x"]) == [[2]]


def test_clearing_a_partition_frees_its_values(client, queue, name):
    for _ in range(3):
        client.put(rows(x=torch.zeros(5, 1000), s=["x"] * 5), partition_id=name)
    client.clear_partition(name)
    assert keys_in_files(queue) == []
    assert [unit["values"] for unit in client.get_storage_stats()] == [0] * len(client.get_storage_stats())


def test_a_cleared_consumed_sample_frees_its_values(client, queue, name):
    client.put(rows(x=torch.arange(4).view(4, 1)), partition_id=name)
    client.get_meta(["x"], 3, name, task_name="t")
    client.get_partition_list()
    assert client.clear_consumed(name) == 3
    assert client.get_stats()["partitions"][name]["samples"] == 1


def test_a_refused_put_leaves_no_value(client, queue, name):
    client.put(rows(x=torch.zeros(2, 2)), partition_id=name)
    client.seal_partition(name)
    before, held = keys_in_files(queue), [unit["values"] for unit in client.get_storage_stats()]
    with pytest.raises(ValueError, match="is sealed"):
        client.put(rows(x=torch.zeros(2, 2)), partition_id=name)
    assert (keys_in_files(queue), [unit["values"] for unit in client.get_storage_stats()]) == (before, held)


def test_a_parser_s_values_are_stored(client, name):
    meta = client.put(
        rows(x=torch.arange(2).view(2, 1)), partition_id=name, data_parser=lambda columns: {"x": columns["x"] + 10}
    )
    assert listed(client.get_data(meta)["x"]) == [[10], [11]]


def test_async_verbs_work_on_a_loop(client, name):
    async def story() -> Any:
        meta = await client.async_put(rows(x=torch.arange(4).view(4, 1)), partition_id=name)
        halves = await asyncio.gather(client.async_get_data(meta[:2]), client.async_get_data(meta[2:]))
        await client.async_clear_samples(meta[:1])
        return [listed(half["x"]) for half in halves]

    assert asyncio.run(story()) == [[[0], [1]], [[2], [3]]]


def test_several_threads_put_and_get(client, name):
    failures: list[BaseException] = []

    def work(own: int) -> None:
        try:
            for n in range(5):
                meta = client.put(rows(x=torch.full((4, 100), 10 * own + n)), partition_id=name)
                assert (client.get_data(meta)["x"].values() == 10 * own + n).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0 * SLOW)
    assert failures == []


def test_a_checkpoint_is_saved_and_loaded(client, queue, name, tmp_path):
    lengths = torch.tensor([0, 2, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5), lengths)
    meta = client.put(rows(x=torch.arange(6).view(3, 2), j=jagged, s=["a", "b", "c"]), partition_id=name)
    client.put(rows(late=torch.ones(1, 2)), metadata=meta[:1])
    client.save_checkpoint(tmp_path / "saved")
    client.clear_partition(name)
    client.load_checkpoint(tmp_path / "saved")
    found = client.get_meta(["x", "j", "s"], 3, name, task_name="t")
    got = client.get_data(found)
    assert (listed(got["x"]), listed(got.get("s"))) == ([[0, 1], [2, 3], [4, 5]], ["a", "b", "c"])
    assert listed(got["j"]) == [[0, 1], [], [2, 3, 4]]
    assert listed(client.get_data(client.get_meta(["late"], 1, name, task_name="u"))["late"]) == [[1, 1]]


def test_a_manager_made_by_hand_reads_what_the_queue_holds(client, queue, name):
    meta = client.put(rows(x=torch.arange(4).view(2, 2)), partition_id=name)
    backend = queue.backend.storage_backend
    manager = manager_by_hand(queue)
    if backend == "SimpleStorage" and len(queue.backend.SimpleStorage.zmq_info) > 1:
        with pytest.raises(ValueError, match=r"several storage units.*use the client's get_data"):
            blocking(manager.get_data(meta))
    else:
        assert listed(blocking(manager.get_data(meta))["x"]) == [[0, 1], [2, 3]]
    blocking(manager.close())
    manager.session.close()


_OTHER = """
import os, sys, torch, transfer_queue as tq
import tests.contract.backend_kit
from tensordict import TensorDict
client = tq.get_client()
meta = client.get_meta(["x"], 2, sys.argv[1], task_name="t", timeout_s=30.0)
x = client.get_data(meta)["x"].values()
client.put(TensorDict({"y": (x * 2).view(2, 1)}, batch_size=[2]), metadata=meta)
tq.close()
"""


@pytest.mark.programs
def test_another_process_reads_and_writes(client, name, tmp_path):
    client.put(rows(x=torch.tensor([[3], [4]])), partition_id=name)
    other = tmp_path / "other.py"
    other.write_text(_OTHER)
    environment = {**os.environ, "TQ_ADDRESS": queue_address(), "PYTHONPATH": str(ROOT)}
    done = run_python(other, name, env=environment, timeout=90 * SLOW)
    assert done.returncode == 0, done.stderr
    meta = client.get_meta(["y"], 2, name, task_name="u")
    assert listed(client.get_data(meta)["y"]) == [[6], [8]]


def queue_address() -> str:
    return str(tq.init().address)


def _run(target: Callable[[str], None], partition: str, conf: Any) -> None:
    torch.set_num_threads(1)  # the others of a fork are its parent's, and never answer
    tq.init(conf)
    target(partition)


def exit_code_of(target: Callable[[str], None], partition: str, conf: Any, method: str | None = None) -> int | None:
    """Of a process that is forked by default, unless it uses Ray, which doesn't work in forks."""
    default = "spawn" if conf.backend.storage_backend == "RayStore" else "fork"
    context = multiprocessing.get_context(method or default)
    process = context.Process(target=_run, args=(target, partition, conf))
    process.start()
    process.join(90 * SLOW)
    process.kill()
    process.join()
    return process.exitcode


def large() -> TensorDict:
    """Too much to travel in a message."""
    return rows(x=torch.from_numpy(np.zeros((2, 30_000), np.float32)))


def put_and_die_before_the_publish(partition: str) -> None:
    client = tq.get_client()
    send = client.session.send_with_frames

    async def dying(request: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(request, (p.Publish, p.Put)):
            os._exit(7)
        return await send(request, *args, **kwargs)

    client.session.send_with_frames = dying
    client.put(large(), partition_id=partition)


def test_a_writer_that_dies_before_its_publish_leaves_no_value(client, queue, name):
    if queue.backend.storage_backend == "FilesByHand":
        pytest.skip("nobody knows the fields of what was never published")
    assert exit_code_of(put_and_die_before_the_publish, name, queue) == 7

    def is_empty() -> bool:
        return not keys_in_files(queue) and not any(unit["values"] for unit in client.get_storage_stats())

    # The server of a RayStore joins Ray to delete its first value, which takes 45 s beside two busy processes.
    assert any(until(is_empty) for _ in range(8))
    assert client.get_stats()["partitions"].get(name, {"samples": 0})["samples"] == 0


def put_in_vain(partition: str) -> None:
    with pytest.raises(tq.TransferQueueError, match=r'a fork of one that uses Ray.*context="spawn"'):
        tq.get_client().put(large(), partition_id=partition)


def test_a_fork_of_a_process_that_uses_ray_is_refused_where_ray_would_hang(client, queue, name):
    if queue.backend.storage_backend != "RayStore":
        pytest.skip("the others work in forks")
    assert exit_code_of(put_in_vain, name, queue, "fork") == 0


def put_and_die_before_the_commit(partition: str) -> None:
    client = tq.get_client()
    die_before_commit(client, 7)
    client.put(large(), metadata=client.get_meta(["a"], partition_id=partition, mode="force_fetch"))


def test_a_writer_that_dies_before_it_commits_references_leaves_none(client, queue, name):
    if queue.backend.storage_backend != "FilesByKey":
        pytest.skip("all key-value stores have the same references")
    client.put(rows(a=torch.zeros(2, 1)), partition_id=name)
    before = keys_in_files(queue)
    assert exit_code_of(put_and_die_before_the_commit, name, queue) == 7
    assert until(lambda: not any(unit["uncommitted_nbytes"] for unit in client.get_storage_stats()))
    assert (keys_in_files(queue), [unit["values"] for unit in client.get_storage_stats()]) == (before, [2])
