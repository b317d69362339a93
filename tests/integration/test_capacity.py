# SPDX-License-Identifier: Apache-2.0
"""A full queue: puts wait for room and go on, or say in time that there was none; nothing unconsumed is dropped."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from plain_rows import rows

import transfer_queue as tq

CONF = {
    "backend": {
        "SimpleStorage": {
            "num_data_storage_units": 1,
            "total_storage_size": 20,
            "capacity_bytes": 1 << 20,
            "put_timeout_s": 0.5,
        }
    }
}
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def emptied(client):
    yield
    for partition in client.get_partition_list():
        client.clear_partition(partition)


def put_more(partition: str, count: int) -> None:
    tq.get_client().put(rows(a=torch.arange(count)), partition_id=partition)


def test_a_put_into_a_full_queue_waits_for_a_clear_and_goes_on(client, name, fork):
    meta = client.put(rows(a=torch.arange(20)), partition_id=name)
    waiting = fork(put_more, name, 5)
    while not any(parked["writer"] for parked in client.get_stats()["waiting"]):
        pass
    assert client.get_stats()["partitions"][name]["samples"] == 20
    client.clear_samples(meta[:5])
    waiting.join(WAIT_S)
    assert waiting.exitcode == 0
    assert client.get_stats()["partitions"][name]["samples"] == 20


def test_a_put_that_waited_in_vain_says_what_to_do_and_leaves_nothing(client, name):
    client.put(rows(a=torch.arange(18)), partition_id=name)
    begin = time.monotonic()
    with pytest.raises(
        tq.StorageFullError, match=r"Storage capacity exceeded: .* for 3 samples of .* 2 of 20 are free"
    ) as caught:
        client.put(rows(a=torch.arange(3)), partition_id=name)
    assert 0.4 < time.monotonic() - begin < 3.0
    assert all(isinstance(caught.value, kind) for kind in (TimeoutError, ValueError, RuntimeError))
    assert client.put(rows(a=torch.arange(2)), partition_id=name).size == 2


@pytest.mark.parametrize(("samples", "floats"), [(20, 1), (1, 200_000)], ids=["samples", "bytes"])
def test_a_fetch_that_starves_while_puts_wait_for_room_says_that_the_queue_is_full(client, name, samples, floats):
    filling = rows(a=torch.zeros(samples, floats))
    client.put(filling, partition_id=name)
    with ThreadPoolExecutor() as pool:
        put = pool.submit(client.put, filling, partition_id=name)
        while not any(parked["writer"] for parked in client.get_stats()["waiting"]):
            assert not put.done()
        with pytest.raises(tq.BatchTimeoutError, match=r"full, and 1 put waits for room\. Clear consumed samples"):
            client.get_meta(["b"], 1, name, task_name="t", timeout_s=0.0)
        with pytest.raises(tq.StorageFullError):
            put.result()


def test_a_put_cancelled_while_it_waits_takes_no_room_later(client, name):
    meta = client.put(rows(a=torch.arange(20)), partition_id=name)

    async def go() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.async_put(rows(a=torch.arange(20)), partition_id=name), 0.05)

    asyncio.run(go())
    client.clear_samples(meta)
    assert client.put(rows(a=torch.arange(20)), partition_id=name).size == 20


def test_a_put_larger_than_the_queue_is_refused_at_once(client, name):
    begin = time.monotonic()
    with pytest.raises(tq.StorageFullError, match="21 samples were put at once, the queue holds 20"):
        client.put(rows(a=torch.arange(21)), partition_id=name)
    assert time.monotonic() - begin < 0.4
    assert name not in client.get_partition_list()


def test_overwriting_and_adding_fields_needs_no_room(client, name):
    meta = client.put(rows(a=torch.arange(20)), partition_id=name)
    client.put(rows(a=torch.arange(20), b=torch.arange(20)), metadata=meta)
    assert client.get_data(meta)["b"].tolist() == list(range(20))


def test_keys_count_as_samples_too(client, name):
    tq.kv_batch_put([f"k{i}" for i in range(20)], name, rows(a=torch.arange(20)))
    with pytest.raises(tq.StorageFullError, match="Storage capacity exceeded"):
        tq.kv_put("one more", name, tag={"a": 1})
    tq.kv_put("k3", name, {"b": torch.tensor(1)})
    tq.kv_clear(["k0"], name)
    tq.kv_put("one more", name, tag={"a": 1})
    assert len(tq.kv_list(name)[name]) == 20


def test_many_puts_of_one_size_fill_the_queue_to_the_last_sample(client, name):
    for _ in range(10):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    assert client.get_stats()["partitions"][name]["samples"] == 20


def test_bytes_are_limited_as_well_and_a_put_that_does_not_fit_leaves_no_sample(client, name):
    client.put(rows(a=torch.zeros(1, 200_000)), partition_id=name)
    with pytest.raises(tq.StorageFullError, match="Storage capacity exceeded"):
        client.put(rows(a=torch.zeros(1, 200_000)), partition_id=name)
    assert client.get_stats()["partitions"][name]["samples"] == 1
    client.clear_partition(name)
    client.put(rows(a=torch.zeros(1, 200_000)), partition_id=name)


def test_an_endless_stream_fits_when_it_is_cleared_as_it_is_consumed(client, name, fork):
    producer = fork(put_many, name)
    seen = []
    for _ in range(25):
        meta = client.get_meta(["a"], 4, name, task_name="t", timeout_s=WAIT_S)
        seen += client.get_data(meta)["a"].tolist()
        client.clear_samples(meta)
    producer.join(WAIT_S)
    assert (producer.exitcode, seen) == (0, list(range(100)))


def put_many(partition: str) -> None:
    client = tq.get_client()
    for i in range(50):
        client.put(rows(a=torch.tensor([2 * i, 2 * i + 1])), partition_id=partition)
