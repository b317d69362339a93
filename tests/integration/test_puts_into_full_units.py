# SPDX-License-Identifier: Apache-2.0
"""Puts that wait for room in a storage unit: published when they are let in, whoever does that, and else never."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from calls import answered, blocking
from clients import connect
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.noticing import WAIT_S, ended, until
from transfer_queue import protocol as p

SIZES = {"inline": 60_000, "in the arena": 70_000}
"""Bytes of a row: the unit has room for one of them."""
KINDS = {
    "one process": {"server_processes": "one", "arena": True},
    "one process, frames": {"server_processes": "one", "arena": False},
    "a process each": {"server_processes": "each", "arena": True},
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    storage = {
        "num_data_storage_units": 1,
        "capacity_bytes": 100_000,
        "total_storage_size": 8,
        "put_timeout_s": 20.0,
        "arena": request.param["arena"],
    }
    yield tq.init({"server_processes": request.param["server_processes"], "backend": {"SimpleStorage": storage}})
    tq.close()


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def nbytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def other(queue: Any) -> Iterator[tq.TransferQueueClient]:
    client = connect("other", queue)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def emptied(client) -> Iterator[None]:
    yield
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    assert until(lambda: (unit(client)["values"], unit(client)["parked"], unit(client)["leased_nbytes"]) == (0, 0, 0))


def unit(client: tq.TransferQueueClient) -> dict[str, Any]:
    return client.get_storage_stats()[0]


def parked(client: tq.TransferQueueClient, count: int) -> None:
    assert until(lambda: unit(client)["parked"] == count)


def row(nbytes: int, value: int, field: str = "a") -> TensorDict:
    # torch's own fill would hang in a fork: OpenMP's threads
    return TensorDict({field: torch.from_numpy(np.full((1, nbytes), value, np.uint8))}, batch_size=[1])


def several(nbytes: int) -> TensorDict:
    """As many rows of so many bytes as the queue takes."""
    return TensorDict({"a": torch.from_numpy(np.full((8, nbytes), 1, np.uint8))}, batch_size=[8])


def fill(client: tq.TransferQueueClient, partition: str, nbytes: int) -> tq.BatchMeta:
    return client.put(row(nbytes, 1), partition_id=f"{partition}/full")


def seen(client: tq.TransferQueueClient, partition: str, field: str = "a") -> list[int]:
    """The values of the samples that have this field, in order."""
    meta = client.get_meta(partition_id=partition, mode="force_fetch")
    if field not in meta.field_names:
        return []
    return [int(values.unique()) for values in client.get_data(meta.select_fields(field))[field].unbind()]


@contextmanager
def beside(*acts: Callable[[], Any]) -> Iterator[list[Any]]:
    """What they returned, or raised, once the block is over."""
    done: list[Any] = [None] * len(acts)

    def run(n: int) -> None:
        try:
            done[n] = acts[n]()
        except tq.TransferQueueError as error:
            done[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(acts))]
    for thread in threads:
        thread.start()
    yield done
    for thread in threads:
        thread.join(WAIT_S)


# ---- let in ----


@pytest.mark.parametrize("by_key", [False, True], ids=["new", "by key"])
def test_two_puts_never_hold_what_the_other_waits_for(client, other, name, by_key):
    """One has leased the memory and waits for samples. The other would have the samples and wait for memory."""
    full = client.put(several(5_000), partition_id=f"{name}/full")
    client.create_partition(name)

    def small() -> None:
        keys = [f"key-{number}" for number in range(8)]
        tq.kv_batch_put(keys, name, several(6_250)) if by_key else client.put(several(6_250), partition_id=name)

    with beside(lambda: other.put(several(11_250), partition_id=name), small) as done:
        assert until(lambda: len(client.get_stats()["waiting"]) == 2)
        client.clear_samples(full)
        for _ in done:
            client.clear_samples(client.get_meta(["a"], 8, name, task_name="t", timeout_s=WAIT_S))
    assert not any(isinstance(each, Exception) for each in done)


def test_new_samples_are_published_when_a_clear_lets_them_in(client, other, name, nbytes):
    full = fill(client, name, nbytes)
    client.create_partition(name)
    with beside(lambda: other.put(row(nbytes, 2), partition_id=name)) as done:
        parked(client, 1)
        assert seen(client, name) == []
        client.clear_samples(full)
    assert (done[0].size, seen(client, name)) == (1, [2])


def test_a_new_field_is_published_when_a_clear_lets_it_in(client, other, name, nbytes):
    meta = client.put(row(8, 5), partition_id=name)
    full = fill(client, name, nbytes)
    with beside(lambda: other.put(row(nbytes, 2, "b"), metadata=meta[:])) as done:
        parked(client, 1)
        assert seen(client, name, "b") == []
        client.clear_samples(full)
    assert (done[0].field_names, seen(client, name, "b")) == (["a", "b"], [2])


def test_a_fetch_is_answered_by_the_clear_that_lets_the_put_in(client, other, name, nbytes, queue):
    full = fill(client, name, nbytes)
    third = connect("third", queue)
    fetch = lambda: third.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S)  # noqa: E731
    with beside(lambda: other.put(row(nbytes, 2), partition_id=name), fetch) as done:
        parked(client, 1)
        assert until(lambda: client.get_stats()["waiting"])
        client.clear_samples(full)
    assert int(client.get_data(done[1])["a"].values().unique()) == 2
    third.close()


def test_those_that_waited_for_one_clear_are_all_published(client, other, name, queue):
    full, third = fill(client, name, 60_000), connect("third", queue)
    client.create_partition(name)
    with beside(lambda: other.put(row(50_000, 2), partition_id=name)) as first:
        parked(client, 1)
        with beside(lambda: third.put(row(45_000, 3), partition_id=name)) as second:
            parked(client, 2)
            client.clear_samples(full)
    assert ([first[0].size, second[0].size], sorted(seen(client, name))) == ([1, 1], [2, 3])
    third.close()


def write_and_wait_to_be_killed(partition: str, nbytes: int) -> None:
    client = tq.get_client()
    session, storage = client.session, client.storage_manager
    reserve = p.Reserve(session.number(), partition, 1)
    reserved = answered(client, reserve, p.Reserved, keep=True)
    indexes = p.unpack_indexes(reserved.indexes).tolist()
    blocking(storage.write(reserve.id, indexes, storage.prepare(row(nbytes, 1))))
    signal.pause()


def test_a_put_that_the_end_of_a_killed_writer_lets_in_is_published(client, other, name, nbytes, fork):
    writer = fork(write_and_wait_to_be_killed, name, nbytes)
    assert until(lambda: unit(client)["uncommitted_nbytes"] == nbytes)
    with beside(lambda: other.put(row(nbytes, 2), partition_id=name)) as done:
        parked(client, 1)
        writer.kill()
        assert ended(writer) == -signal.SIGKILL
    assert (done[0].size, seen(client, name)) == (1, [2])
    assert client.get_stats()["partitions"][name]["held"] == 0


# ---- never let in ----


class Hasty(tq.TransferQueueClient):
    async def put_timeout_s(self) -> float:
        return 0.1


def give_up_by_time(client: Any, put: Callable[[Any], Any], queue: Any) -> None:
    hasty = Hasty("hasty", queue.controller.zmq_info)
    hasty.initialize_storage_manager("SimpleStorage", queue.backend.SimpleStorage, put_timeout_s=0.1)
    with pytest.raises(tq.StorageFullError, match="Storage capacity exceeded"):
        blocking(put(hasty))
    hasty.close()


def give_up_by_cancelling(client: Any, put: Callable[[Any], Any], queue: Any) -> None:
    async def go() -> None:
        task = asyncio.ensure_future(put(client))
        while not (await client.storage_manager.stats())[0].parked:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(go(), WAIT_S))


WAYS = {"by time": give_up_by_time, "by cancelling": give_up_by_cancelling}


@pytest.mark.parametrize("give_up", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("field", ["a", "b"], ids=["new samples", "a new field"])
def test_a_put_that_gave_up_waiting_is_never_seen(client, name, nbytes, queue, give_up, field):
    meta = client.put(row(8, 5), partition_id=name)
    full = fill(client, name, nbytes)
    where = {"partition_id": name} if field == "a" else {"metadata": meta}
    give_up(client, lambda writer: writer.async_put(row(nbytes, 2, field), **where), queue)
    client.clear_samples(full)
    assert until(lambda: (unit(client)["values"], unit(client)["parked"]) == (1, 0))
    assert (seen(client, name), seen(client, name, "b")) == ([5], [])
    assert client.get_stats()["partitions"][name]["held"] == 0
    client.put(row(nbytes, 3, field), **where)
    assert seen(client, name, field)[-1] == 3


def put_more(partition: str, nbytes: int, indexes: list[int]) -> None:
    client = tq.get_client()
    if indexes:
        client.put(row(nbytes, 2, "b"), metadata=tq.BatchMeta(indexes, [partition]))
    else:
        client.put(row(nbytes, 2), partition_id=partition)
    os._exit(7)


@pytest.mark.parametrize("field", ["a", "b"], ids=["new samples", "a new field"])
def test_a_put_whose_writer_was_killed_waiting_is_never_seen(client, name, nbytes, fork, field):
    meta = client.put(row(8, 5), partition_id=name)
    full = fill(client, name, nbytes)
    writer = fork(put_more, name, nbytes, meta.global_indexes if field == "b" else [])
    parked(client, 1)
    writer.kill()
    assert ended(writer) == -signal.SIGKILL
    parked(client, 0)
    client.clear_samples(full)
    assert until(lambda: client.get_stats()["partitions"][name]["held"] == 0)
    assert (seen(client, name), seen(client, name, "b"), unit(client)["values"]) == ([5], [], 1)


@pytest.mark.parametrize("what", ["its samples", "its partition"])
def test_a_new_field_whose_samples_are_cleared_while_it_waits_is_refused(client, other, name, nbytes, what):
    meta = client.put(row(8, 5), partition_id=name)
    full = fill(client, name, nbytes)
    with beside(lambda: other.put(row(nbytes, 2, "b"), metadata=meta[:])) as done:
        parked(client, 1)
        if what == "its samples":
            client.clear_samples(meta)
        else:
            client.clear_partition(name)
    assert type(done[0]) is tq.SampleClearedError
    assert unit(client)["values"] == 1
    client.clear_samples(full)
