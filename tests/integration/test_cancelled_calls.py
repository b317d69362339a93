# SPDX-License-Identifier: Apache-2.0
"""A call of an event loop that is cancelled while its answer is on the way has had its whole effect, or none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.calls import fetch_of
from tests.integration.noticing import until
from transfer_queue import protocol as p
from transfer_queue.interface import connect
from transfer_queue.transport.blocking import run_blocking


@pytest.fixture
def other(queue: Any) -> Iterator[tq.TransferQueueClient]:
    client = connect("other", queue)
    yield client
    client.close()


def numbers(client: tq.TransferQueueClient, partition: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get_stats()["partitions"][partition]
    return found


async def cancelled_too_late(call: Coroutine[Any, Any, Any], other: tq.TransferQueueClient, partition: str) -> Any:
    """What the controller knew when it had answered the first exchange, and the loop hadn't read that."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)  # it runs until it waits for the controller
    numbers(other, partition)  # blocks the loop; the exchange after this one comes after the task's
    before = numbers(other, partition)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return before


async def connected(client: tq.TransferQueueClient) -> None:
    """The loop's own connection is there, and the storage's memory is mapped: a call sends at once."""
    await client.async_create_partition("elsewhere")
    await client.async_fetch_batch(fetch_of(["x"], 1, "elsewhere", "t"))


def pins(client: tq.TransferQueueClient) -> int:
    return sum(unit["pins"] for unit in client.get_storage_stats())


def large(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(count, 100_000)}


def test_a_batch_with_its_values_takes_nothing_and_keeps_no_memory(client, other, name):
    other.put(large(2), partition_id=name)

    async def go() -> Any:
        await connected(client)
        return await cancelled_too_late(client.async_fetch_batch(fetch_of(["x"], 2, name, "t")), other, name)

    assert asyncio.run(go())["tasks"]["t"]["consumed"] == 2
    assert until(lambda: numbers(other, name)["tasks"]["t"]["consumed"] == 0)
    assert until(lambda: pins(other) == 0)


def test_a_batch_that_is_closed_instead_of_taken_keeps_no_memory(client, other, name):
    other.put(large(2), partition_id=name)
    batch = client.fetch_batch(fetch_of(["x"], 2, name, "t"))
    run_blocking(batch.close())
    assert until(lambda: pins(other) == 0)
    assert client.get_data(batch.meta)["x"].values().sum() == 200_000


def test_a_batch_that_is_not_there_keeps_no_memory(client, other, name):
    other.put(large(1), partition_id=name)
    assert client.fetch_batch(fetch_of(["x"], 2, name, "t")).ready == 1
    other.seal_partition(name)
    assert client.take(client.fetch_batch(fetch_of(["x"], 2, name, "t")))["x"].values().sum() == 100_000
    with pytest.raises(tq.EndOfPartitionError):
        client.fetch_batch(fetch_of(["x"], 2, name, "t"))
    assert until(lambda: pins(other) == 0)


def test_batches_that_are_closed_while_the_server_is_busy_keep_no_memory(queue, client, other, name):
    other.put(large(100), partition_id=name)
    batches = [client.fetch_batch(fetch_of(["x"], 1, name, "t")) for _ in range(100)]
    assert pins(other) == 100
    (pid,) = {unit.pid for unit in queue.backend.SimpleStorage.zmq_info.values()}
    os.kill(pid, signal.SIGSTOP)
    for batch in batches:
        run_blocking(batch.close())
    os.kill(pid, signal.SIGCONT)
    assert until(lambda: pins(other) == 0)


def test_a_put_is_undone_as_a_whole_and_leaves_no_reservation(client, other, name):
    other.put({"x": torch.zeros(1)}, partition_id=name)

    async def go() -> Any:
        await connected(client)
        return await cancelled_too_late(client.async_put({"x": torch.ones(3)}, partition_id=name), other, name)

    assert asyncio.run(go())["samples"] == 4
    assert until(lambda: (numbers(other, name)["held"], numbers(other, name)["samples"]) == (0, 1))
    other.seal_partition(name)
    meta = other.get_meta(["x"], 1, name, task_name="t")
    assert other.get_data(meta)["x"].tolist() == [0]


def test_a_reservation_is_given_back(client, other, name):
    """The first step of a put where the controller and the storage are apart."""
    other.create_partition(name)

    async def go() -> None:
        await connected(client)
        reserve = p.Reserve(client.session.number(), name, 3, {"x": p.FieldSpec("float32", ())})
        assert (await cancelled_too_late(client.session.send(reserve, p.Reserved), other, name))["held"] == 3

    asyncio.run(go())
    assert until(lambda: (numbers(other, name)["held"], numbers(other, name)["samples"]) == (0, 0))


def test_a_put_by_key_is_there_whole(client, other, name):
    tq.kv_put("known", name, {"x": torch.zeros(2)})

    async def go() -> Any:
        await connected(client)
        return await cancelled_too_late(tq.async_kv_put("new", name, {"x": torch.ones(2)}), other, name)

    assert asyncio.run(go())["keys"] == 2
    assert (numbers(other, name)["held"], numbers(other, name)["keys"]) == (0, 2)
    assert tq.kv_batch_get(["known", "new"], name)["x"].values().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_fetch_takes_nothing(client, other, name, timeout_s):
    other.put({"x": torch.arange(4)}, partition_id=name)

    async def go() -> Any:
        await connected(client)
        call = client.async_get_meta(["x"], 2, name, task_name="t", timeout_s=timeout_s)
        return await cancelled_too_late(call, other, name)

    assert asyncio.run(go())["tasks"]["t"]["consumed"] == 2
    assert until(lambda: numbers(other, name)["tasks"]["t"]["consumed"] == 0)
    assert other.get_data(other.get_meta(["x"], 4, name, task_name="t"))["x"].tolist() == [0, 1, 2, 3]
