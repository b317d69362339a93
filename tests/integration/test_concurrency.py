# SPDX-License-Identifier: Apache-2.0
"""Writers and readers at the same time: no update is lost, no row is mixed up, no reader sees half of a put."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_rows import rows

import transfer_queue as tq
from tests.own_processes import SLOW

WAIT_S = 20.0


def together(works: list[Callable[[], Any]]) -> None:
    """Run in a thread each; the first failure is raised here."""
    failures: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if failures:
        raise failures[0]


def test_forty_concurrent_tag_merges_all_survive(queue, name):
    async def go() -> None:
        await asyncio.gather(*(tq.async_kv_put("k", name, tag={f"t{i}": i}) for i in range(40)))

    asyncio.run(go())
    assert tq.kv_list(name)[name]["k"] == {f"t{i}": i for i in range(40)}


def test_tag_merges_of_several_processes_all_survive(queue, name, fork):
    children = [fork(merge_tags, name, worker) for worker in range(4)]
    for child in children:
        child.join(WAIT_S)
    assert [child.exitcode for child in children] == [0] * 4
    assert tq.kv_list(name)[name]["k"] == {f"{worker}/{i}": i for worker in range(4) for i in range(10)}


def merge_tags(partition: str, worker: int) -> None:
    for i in range(10):
        tq.kv_put("k", partition, tag={f"{worker}/{i}": i})


def test_one_new_key_put_by_many_at_once_is_one_sample_with_all_fields(queue, client, name):
    together([lambda i=i: tq.kv_put("k", name, {f"f{i}": torch.tensor(i)}, {f"t{i}": i}) for i in range(12)])
    data = tq.kv_batch_get("k", name)
    assert {field: data[field].tolist() for field in data.keys()} == {f"f{i}": [i] for i in range(12)}  # noqa: SIM118
    assert tq.kv_list(name) == {name: {"k": {f"t{i}": i for i in range(12)}}}
    assert client.get_stats()["partitions"][name]["samples"] == 1


def test_a_put_of_a_key_that_fails_does_not_take_it_from_another_writer(queue, name):
    entered, failed = threading.Event(), threading.Event()

    def waits(columns: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert failed.wait(WAIT_S)
        return columns

    def fails() -> None:
        assert entered.wait(WAIT_S)
        with pytest.raises(RuntimeError):
            tq.kv_batch_put(["k"], name, rows(x=torch.arange(1)), data_parser=lambda columns: None)
        failed.set()

    together([lambda: tq.kv_put("k", name, {"x": torch.tensor(5)}, data_parser=waits), fails])
    assert tq.kv_batch_get("k", name)["x"].tolist() == [5]


def test_concurrent_puts_from_threads_keep_their_rows_together(client, name):
    def put(worker: int) -> None:
        for i in range(15):
            value = worker * 1000 + i
            meta = client.put(rows(a=torch.full((3,), value), b=torch.full((3, 4), value)), partition_id=name)
            assert meta.global_indexes == list(range(meta.global_indexes[0], meta.global_indexes[0] + 3))

    together([lambda worker=worker: put(worker) for worker in range(6)])
    every = client.get_meta(["a", "b"], partition_id=name, mode="force_fetch")
    data = client.get_data(every)
    assert (every.size, len(set(every.global_indexes))) == (270, 270)
    assert all(row.tolist() == [value] * 4 for row, value in zip(data["b"].unbind(), data["a"].tolist(), strict=True))


def test_puts_and_fetches_and_clears_at_once_lose_nothing(client, name):
    seen: list[int] = []

    def consume() -> None:
        while True:
            try:
                meta = client.get_meta(["a"], 5, name, task_name="t", timeout_s=WAIT_S)
            except tq.EndOfPartitionError:
                return
            seen.extend(client.get_data(meta)["a"].tolist())
            client.clear_samples(meta)

    def produce() -> None:
        together(
            [
                lambda w=w: [client.put(rows(a=torch.arange(4) + 4 * i), partition_id=name) for i in range(w, 60, 3)]
                for w in range(3)
            ]
        )
        client.seal_partition(name)

    together([consume, consume, produce])
    assert sorted(seen) == list(range(240))
    assert client.get_stats()["partitions"][name]["samples"] == 0


def test_readers_never_see_a_sample_without_the_fields_they_asked_for(client, name):
    def produce() -> None:
        for i in range(40):
            meta = client.put(rows(a=torch.full((2,), i)), partition_id=name)
            client.put(rows(b=torch.full((2, 3), i)), metadata=meta)
        client.seal_partition(name)

    def consume() -> None:
        count = 0
        while count < 80:
            meta = client.get_meta(["a", "b"], 4, name, task_name="t", timeout_s=WAIT_S)
            data = client.get_data(meta)
            pairs = zip(data["b"].unbind(), data["a"].tolist(), strict=True)
            assert all(row.tolist() == [value] * 3 for row, value in pairs)
            count += meta.size

    together([produce, consume])


FIRST_CALLS = """
import pickle, sys, threading
from transfer_queue import TransferQueueClient

controller = pickle.loads(bytes.fromhex(sys.argv[1]))
together, done = threading.Barrier(8), []

def first_call(number):
    client = TransferQueueClient(f"first-{number}", controller)
    together.wait()
    done.append(client.get_partition_list())
    client.close()

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=first_call, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done))
"""


@pytest.mark.programs
def test_the_first_calls_of_a_process_may_be_those_of_many_threads(queue, script):
    controller = pickle.dumps(queue.controller.zmq_info).hex()
    for process in [script(FIRST_CALLS, controller) for _ in range(3)]:  # one process crashed in half of the tries
        said, errors = process.communicate(timeout=3 * WAIT_S * SLOW)
        assert (process.returncode, said) == (0, "8\n"), errors
