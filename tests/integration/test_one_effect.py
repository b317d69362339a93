# SPDX-License-Identifier: Apache-2.0
"""A call that is given up while the server stands still had one effect or none, and holds nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch
from calls import fetch_of

import transfer_queue as tq
from tests.integration import given_up
from tests.integration.faults import (
    NOTICE_S,
    SERVED_S,
    client_of,
    comes_true,
    impatient_client,
    server_pids,
    stopped,
)
from tests.integration.given_up import CAPACITY, VERBS, WAYS, Verb, nothing_occupied, numbers, rows

CONF = {"backend": {"SimpleStorage": {"total_storage_size": CAPACITY, "put_timeout_s": 0.3}}}


pytestmark = pytest.mark.usefixtures("emptied")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_given_up_at_a_stopped_server_had_one_effect_or_none(queue, name, verb, way):
    meta = given_up.prepare(name)
    WAYS[way](queue, VERBS[verb].act, name, meta, server_pids(queue))
    given_up.check_one_effect(name, VERBS[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_whose_client_was_killed_at_a_stopped_server_had_one_effect_or_none(queue, name, verb, fork):
    meta = given_up.prepare(name)
    given_up.by_death(queue, VERBS[verb].act, name, meta, server_pids(queue), fork)
    given_up.check_one_effect(name, VERBS[verb])


@pytest.mark.parametrize("width", [1, given_up.LARGE], ids=["small", "large"])
def test_a_put_given_up_at_a_stopped_server_and_repeated_is_there_once(client, queue, name, width):
    impatient = impatient_client(queue)
    with stopped(*server_pids(queue)), pytest.raises(tq.QueueUnreachableError):
        impatient.put(rows(4, width), partition_id=name)
    impatient.put(rows(4, width), partition_id=name)
    assert numbers(client, name)["samples"] == 4
    assert client.get_meta(["x"], 4, name, task_name="t", timeout_s=SERVED_S).size == 4
    client.clear_partition(name)
    assert comes_true(lambda: nothing_occupied(client, name))
    impatient.close()


# ---- what waits for room ----


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["put", "large put", "insert", "kv_put"])
def test_a_put_into_a_full_queue_given_up_at_a_stopped_server_takes_no_room(client, queue, name, verb, way):
    meta = given_up.prepare(name)
    client.put(rows(CAPACITY - given_up.BEFORE - 1), partition_id="fills")
    WAYS[way](queue, VERBS[verb].act, name, meta, server_pids(queue))
    client.clear_partition("fills")
    assert numbers(client, name)["samples"] == given_up.BEFORE + 1
    given_up.check_one_effect(name, Verb(VERBS[verb].act, 0))


# ---- fetches ----


def fetch_rank(client: Any, partition: str) -> Any:
    return client.get_meta(["x"], 2, partition, task_name="t", sampling_config={"dp_rank": 0}, timeout_s=0.0)


FETCHES = {
    "metadata": lambda client, partition: client.get_meta(["x"], 2, partition, task_name="t", timeout_s=0.0),
    "of a rank": fetch_rank,
    "with values": lambda client, partition: client.fetch_batch(fetch_of(["x"], 2, partition, "t")),
}


@pytest.mark.parametrize("width", [1, given_up.LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fetch", FETCHES)
def test_no_sample_is_gone_that_was_fetched_from_a_stopped_server(client, queue, name, fetch, width):
    client.put(rows(8, width), partition_id=name)
    client.seal_partition(name)
    impatient = impatient_client(queue)
    for _ in range(3):
        with stopped(*server_pids(queue)), pytest.raises(tq.QueueUnreachableError):
            FETCHES[fetch](impatient, name)
    found: list[int] = []
    for _ in range(4):
        config = {"dp_rank": 0} if fetch == "of a rank" else None
        meta = client.get_meta(["x"], 2, name, task_name="t", sampling_config=config, timeout_s=SERVED_S)
        found += meta.global_indexes
    assert len(set(found)) == 8
    assert comes_true(lambda: nothing_occupied(client, name))
    impatient.close()


async def cancelled(calls: list[Any], steps: int) -> list[int]:
    """Start these fetches, cancel them so many turns of the loop later. Returns what some of them got all the same."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in range(steps):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    got = [task.result() for task in tasks if not task.cancelled()]
    return [index for meta in got if meta is not None for index in meta.global_indexes]


async def fetch_with_values(client: Any, partition: str) -> Any:
    batch = await client.async_fetch_batch(fetch_of(["x"], 1, partition, "t"))
    return getattr(batch, "meta", None)  # None: not ready


async def fetch_metadata(client: Any, partition: str) -> Any:
    return await client.async_get_meta(["x"], 1, partition, task_name="t", timeout_s=SERVED_S)


@pytest.mark.parametrize("num_at_once", [200, 1])
@pytest.mark.parametrize("fetch", [fetch_with_values, fetch_metadata])
def test_of_200_cancelled_fetches_no_sample_is_gone(client, queue, name, num_at_once, fetch):
    for _ in range(CAPACITY // 4):
        client.put(rows(4, given_up.LARGE // 4), partition_id=name)
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, other, got = random.Random(seed), client_of(queue, "many"), list[int]()

    async def go() -> None:
        await other.async_get_partition_list()
        for _ in range(200 // num_at_once):
            got.extend(await cancelled([fetch(other, name) for _ in range(num_at_once)], moments.randrange(6)))

    asyncio.run(go())
    while len(got) < CAPACITY:
        got += client.get_meta(["x"], 1, name, task_name="t", timeout_s=SERVED_S).global_indexes
    assert len(set(got)) == CAPACITY
    other.close()
    assert comes_true(lambda: nothing_occupied(client, name))


@pytest.mark.parametrize(("num_fetches", "width"), [(1000, 1), (400, given_up.LARGE // 4)], ids=["unsent", "unread"])
def test_what_a_loop_has_cancelled_is_given_back_although_its_client_says_nothing_more(
    client, queue, name, num_fetches, width
):
    """The server stands still meanwhile: the socket is full of requests, or will be full of answers."""
    for _ in range(CAPACITY // 4):
        client.put(rows(4, width), partition_id=name)
    other, (pid, *_) = client_of(queue, "many"), server_pids(queue)

    async def go() -> None:
        await other.async_get_partition_list()
        with stopped(pid):
            for _ in range(num_fetches):
                assert await cancelled([fetch_with_values(other, name)], 3) == []

    asyncio.run(go())
    got: list[int] = []
    while len(got) < CAPACITY:
        got += client.get_meta(["x"], 1, name, task_name="t", timeout_s=SERVED_S).global_indexes
    assert len(set(got)) == CAPACITY
    other.close()


def test_a_stream_at_a_stopped_server_loses_no_sample(client, queue, name):
    """The deadline of the stream's own client passes again and again, and its user goes on."""
    client.put({"x": torch.arange(12)}, partition_id=name)
    client.seal_partition(name)
    pid, found = server_pids(queue)[0], list[int]()
    dataset = tq.StreamingDataset(queue, 2, 2, ["x"], name, "t", 0)
    batches = iter(dataset)
    found += next(batches)[0]["x"].tolist()
    with stopped(pid):
        threading.Event().wait(0.5)
    for batch, _ in batches:
        found += batch["x"].tolist()
    assert sorted(found) == list(range(12))
    batches.close()


# ---- at any moment ----


@pytest.mark.programs
@pytest.mark.parametrize("verb", ["put", "kv_put"])
def test_puts_while_the_server_stops_again_and_again_have_one_effect_or_none(client, queue, name, verb):
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, pid, over = random.Random(seed), server_pids(queue)[0], threading.Event()
    impatient = impatient_client(queue)
    impatient.session.timeout_s = 0.02

    def disturb() -> None:
        while not over.wait(moments.uniform(0, 0.02)):
            with stopped(pid):
                over.wait(moments.uniform(0, 0.06))

    thread = threading.Thread(target=disturb)
    thread.start()
    done, failed = set[int](), set[int]()
    try:
        for number in range(CAPACITY):
            try:
                impatient.put({"x": torch.tensor([number])}, partition_id=name)
                done.add(number)
            except (tq.QueueUnreachableError, tq.StorageFullError):
                failed.add(number)
    finally:
        over.set()
        thread.join()
    assert comes_true(lambda: nothing_occupied(client, name)), NOTICE_S
    stored = client.get_data(client.get_meta(["x"], partition_id=name, mode="force_fetch"))["x"].tolist()
    assert len(stored) == len(set(stored)), "no put took effect twice"
    assert done <= set(stored) <= done | failed
    impatient.close()
