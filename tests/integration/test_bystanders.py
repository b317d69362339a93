# SPDX-License-Identifier: Apache-2.0
"""What one client asks for keeps the others waiting for no longer than moments."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.faults import NOTICE_S, SERVED_S, SLOW, client_of, comes_true
from tests.integration.given_up import rows
from tests.integration.noticing import until_parked

KEYS = 100_000
CAPACITY = 2 * KEYS + 1000
CONF = {
    "backend": {
        "SimpleStorage": {
            "total_storage_size": CAPACITY,
            "capacity_bytes": 64 << 20,
            "num_data_storage_units": 1,
            "put_timeout_s": 30.0 * SLOW,
        }
    }
}
MOMENT_S = 2.0 * SLOW
LONG_S = 0.1 * SLOW
"""A request may work for 20 ms; on a busy machine its server loses its core meanwhile."""


pytestmark = pytest.mark.usefixtures("emptied")


def small_puts_while(done: Callable[[], bool], client: tq.TransferQueueClient, least: int = 5) -> float:
    """Put, get and clear small values until ``done``. Returns how long the slowest of these took."""
    slowest, rounds = 0.0, 0
    while not done() or rounds < least:
        began = time.monotonic()
        meta = client.put({"s": torch.arange(2)}, partition_id="small")
        assert client.get_data(meta)["s"].tolist() == [0, 1]
        client.clear_samples(meta)
        slowest, rounds = max(slowest, time.monotonic() - began), rounds + 1
    return slowest


def many_keys(partition: str) -> list[str]:
    keys = [f"key {n}" for n in range(KEYS)]
    data = TensorDict({"x": torch.zeros(KEYS)}, batch_size=[KEYS])
    tq.kv_batch_put(keys, partition, data, [{"n": n} for n in range(KEYS)])
    return keys


@pytest.mark.programs
@pytest.mark.parametrize("verb", ["list keys", "force-fetch", "clear the partition", "statistics", "get", "put by key"])
def test_small_puts_go_on_while_one_client_asks_about_a_large_partition(client, queue, name, verb):
    keys, other = many_keys(name), client_of(queue, "other")
    verbs: dict[str, Callable[[], Any]] = {
        "list keys": lambda: len(tq.kv_list(name)[name]),
        "force-fetch": lambda: client.get_meta(["x"], partition_id=name, mode="force_fetch").size,
        "clear the partition": lambda: client.clear_partition(name),
        "statistics": client.get_stats,
        "get": lambda: tq.kv_batch_get(keys, name),
        "put by key": lambda: tq.kv_batch_put(keys, name, TensorDict({"y": torch.zeros(KEYS)}, batch_size=[KEYS])),
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(verbs[verb])
        assert small_puts_while(asked.done, other) < MOMENT_S
        asked.result()
    other.close()


def num_long_requests(client: tq.TransferQueueClient) -> dict[str, int]:
    """By kind, how many requests the server has worked on for longer than a moment."""
    metrics = client.get_stats()["metrics"]
    long = [bound > LONG_S for bound in metrics["bounds"]["seconds"]].index(True)
    return {kind: sum(each["seconds"]["counts"][long:]) for kind, each in metrics["requests"].items()}


@pytest.mark.programs
def test_no_request_of_a_verb_with_many_keys_takes_the_server_long(client, queue, name):
    before = num_long_requests(client)
    keys = many_keys(name)
    everything = client.get_meta(["x"], partition_id=name, mode="force_fetch")
    everything.update_custom_meta([{"m": n} for n in range(KEYS)])
    client.set_custom_meta(everything)
    tq.kv_batch_put(keys, name, {"x": torch.ones(KEYS)}, [{"n": 1}] * KEYS)
    assert tq.kv_batch_get(keys, name)["x"].sum() == KEYS
    assert client.kv_retrieve_keys(everything.global_indexes, name) == keys
    assert list(client.wait_keys(name, count=KEYS)) == keys
    tq.kv_clear(keys, name)
    client.put({"x": torch.ones(KEYS)}, partition_id=name, tags=[{"n": 1}] * KEYS)
    after = num_long_requests(client)
    assert {kind: count for kind, count in after.items() if count > before.get(kind, 0)} == {}


# ---- a large put that waits for room ----


def large_put(kind: str, pool: ThreadPoolExecutor, client: tq.TransferQueueClient) -> Future[Any]:
    """A put for which there is not enough room while "fills" is there."""
    if kind == "bytes":
        return pool.submit(client.put, rows(8, 1_000_000), None, "large")
    return pool.submit(client.put, rows(1500), None, "large")


def fill(kind: str, client: tq.TransferQueueClient) -> None:
    """All but some room: of 64 MiB, or of the samples that there may be."""
    client.put(rows(10, 1_200_000) if kind == "bytes" else rows(CAPACITY - 1000), partition_id="fills")


def is_waiting(client: tq.TransferQueueClient) -> bool:
    return bool(client.get_stats()["waiting"]) or client.get_storage_stats()[0]["parked"] > 0


@pytest.mark.parametrize("kind", ["bytes", "samples"])
def test_small_puts_that_fit_go_on_while_a_large_one_waits_for_room(client, queue, kind):
    fill(kind, client)
    large, small = client_of(queue, "large"), client_of(queue, "small")
    with ThreadPoolExecutor(1) as pool:
        put = large_put(kind, pool, large)
        assert comes_true(lambda: is_waiting(client))
        try:
            assert small_puts_while(lambda: True, small, least=20) < MOMENT_S
            assert not put.done()
        finally:
            client.clear_partition("fills")
        assert put.result(NOTICE_S).size
    for one in (large, small):
        one.close()


@pytest.mark.programs
@pytest.mark.parametrize("kind", ["bytes", "samples"])
def test_a_large_put_is_not_starved_by_a_stream_of_small_ones(client, queue, name, kind):
    """Room comes back piece by piece, and small puts would take every piece."""
    small = {"x": torch.ones(1, 1_000_000)} if kind == "bytes" else rows(250)
    count = 16 if kind == "bytes" else CAPACITY // 250
    filled = [client.put(small, partition_id=name) for _ in range(count)]
    large, others = client_of(queue, "large"), [client_of(queue, f"small {n}") for n in range(3)]
    over = False

    def stream(own: tq.TransferQueueClient) -> None:
        while not over:
            filled.append(own.put(small, partition_id=name))

    with ThreadPoolExecutor(4) as pool:
        put = large_put(kind, pool, large)
        assert comes_true(lambda: is_waiting(client))
        streams = [pool.submit(stream, own) for own in others]
        try:
            deadline = time.monotonic() + 20.0 * SLOW
            while not put.done() and time.monotonic() < deadline:
                if filled:
                    client.clear_samples(filled.pop(0))
            assert put.done()
        finally:
            over = True
            client.clear_partition(name)
            while not all(each.done() for each in [*streams, put]):
                client.clear_partition(name)
        for each in streams:
            each.result()
    for one in (large, *others):
        one.close()


@pytest.mark.parametrize("verb", ["put", "insert", "kv_put"])
def test_those_that_need_no_room_go_on_while_others_wait_for_some(client, queue, verb):
    tq.kv_put("known", "keys", {"x": torch.ones(1)})
    meta = client.put(rows(CAPACITY - 1), partition_id="fills")
    waits = client_of(queue, "waits")
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(waits.put, rows(2), None, "large")
        until_parked(client, partition="large")
        began = time.monotonic()
        client.put({"y": torch.zeros(2)}, meta[:2])
        tq.kv_put("known", "keys", {"y": torch.ones(1)}, tag={"a": 1})
        client.get_meta(["y"], 2, "fills", task_name=verb, timeout_s=SERVED_S)
        assert time.monotonic() - began < MOMENT_S
        client.clear_partition("fills")
        assert put.result(NOTICE_S).size == 2
    waits.close()
