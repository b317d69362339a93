# SPDX-License-Identifier: Apache-2.0
"""Calls that are given up in every way there is, and what must be true of the queue afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import transfer_queue as tq
from tests.integration.calls import blocking, check_does_not_block, fetch_of
from tests.integration.clients import connect
from tests.integration.faults import (
    IMPATIENT_S,
    NOTICE_S,
    SERVED_S,
    client_of,
    comes_true,
    ctrl_c,
    impatient_client,
    stopped,
)

CAPACITY = 16
BEFORE = 4
"""Samples that the partition has before each call; the task "t" has consumed two of them."""
LARGE = 40_000

Client = tq.TransferQueueClient
Act = Callable[[Client, str, tq.BatchMeta], Coroutine[Any, Any, Any]]


class Verb(NamedTuple):
    """A call, and by how many samples it changes the partition where it takes effect."""

    act: Act
    effect: int


def rows(count: int, width: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.from_numpy(np.ones((count, width), np.float32))}  # torch.ones hangs in a fork: OpenMP's threads


async def kv_put(client: Client, partition: str, meta: tq.BatchMeta) -> None:
    """``tq.async_kv_put`` by this client."""
    from transfer_queue.client import kv

    await kv.batch_put(client, ["new"], partition, await kv.rows_of(kv.one_row({"x": torch.ones(1)})), None)


async def kv_put_onto_known(client: Client, partition: str, meta: tq.BatchMeta) -> None:
    from transfer_queue.client import kv

    await kv.batch_put(client, ["known", "new"], partition, await kv.rows_of(rows(2)), [{"a": 1}, {"a": 2}])


VERBS = {
    "put": Verb(lambda client, partition, meta: client.async_put(rows(4), partition_id=partition), 4),
    "large put": Verb(lambda client, partition, meta: client.async_put(rows(4, LARGE), partition_id=partition), 4),
    "put of a field": Verb(lambda client, partition, meta: client.async_put({"y": rows(BEFORE)["x"]}, meta), 0),
    "put over values": Verb(lambda client, partition, meta: client.async_put(rows(BEFORE, 2), meta), 0),
    "insert": Verb(lambda client, partition, meta: client.async_get_meta(["x"], 4, partition, mode="insert"), 4),
    "kv_put": Verb(kv_put, 1),
    "kv_put onto known": Verb(kv_put_onto_known, 1),
    "clear_samples": Verb(lambda client, partition, meta: client.async_clear_samples(meta[:2]), -2),
    "clear_consumed": Verb(lambda client, partition, meta: client.async_clear_consumed(partition), -2),
    "clear_partition": Verb(lambda client, partition, meta: client.async_clear_partition(partition), -BEFORE - 1),
    "fetch": Verb(
        lambda client, partition, meta: client.async_get_meta(["x"], 2, partition, task_name="t", timeout_s=0.0), 0
    ),
    "get_data": Verb(lambda client, partition, meta: client.async_get_data(meta), 0),
}


# ---- ways to give up ----


def by_deadline(conf: Any, act: Act, partition: str, meta: tq.BatchMeta, pids: list[int]) -> None:
    client = impatient_client(conf)
    try:
        with stopped(*pids), pytest.raises(tq.QueueUnreachableError, match=r"did not answer.*busy or stopped"):
            blocking(act(client, partition, meta))
        check_left_alone(conf, partition)
    finally:
        client.close()


def by_cancellation(conf: Any, act: Act, partition: str, meta: tq.BatchMeta, pids: list[int]) -> None:
    client = client_of(conf, "cancelling")

    async def go() -> None:
        await client.async_get_partition_list()
        with stopped(*pids), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(act(client, partition, meta), IMPATIENT_S)

    try:
        asyncio.run(go())
        check_left_alone(conf, partition)
    finally:
        client.close()


def by_ctrl_c(conf: Any, act: Act, partition: str, meta: tq.BatchMeta, pids: list[int]) -> None:
    client = client_of(conf, "interrupted")
    try:
        with stopped(*pids), pytest.raises(KeyboardInterrupt), ctrl_c(IMPATIENT_S):
            blocking(act(client, partition, meta))
        check_does_not_block()
        check_left_alone(conf, partition)
    finally:
        client.close()


def by_death(conf: Any, act: Act, partition: str, meta: tq.BatchMeta, pids: list[int], fork: Any) -> None:
    child = fork(call_and_die, conf, act, partition, meta, pids)
    child.join(NOTICE_S)
    try:
        assert child.exitcode == -signal.SIGKILL
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    check_left_alone(conf, partition)


def call_and_die(conf: Any, act: Act, partition: str, meta: tq.BatchMeta, pids: list[int]) -> None:
    client = connect("dying", conf)
    client.get_data(meta)

    async def go() -> None:
        await client.async_get_partition_list()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        task = asyncio.ensure_future(act(client, partition, meta))
        await asyncio.wait([task], timeout=IMPATIENT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(go())


WAYS = {"deadline": by_deadline, "cancellation": by_cancellation, "ctrl-c": by_ctrl_c}


def fetch_large(partition: str, task: str = "pins") -> Any:
    """A request for one sample of the field "x", with its values."""
    return fetch_of(["x"], 1, partition, task)


# ---- what must hold ----


def numbers(client: Client, partition: str) -> dict[str, Any]:
    """Of one partition; zeros where it is gone."""
    none = {"samples": 0, "published": 0, "held": 0, "tasks": {}}
    found: dict[str, Any] = client.get_stats()["partitions"].get(partition, none)
    return found


def occupied(client: Client) -> dict[str, int]:
    """What nobody holds any more must be 0."""
    units = client.get_storage_stats()
    return {
        name: sum(unit[name] for unit in units) for name in ("parked", "leased_nbytes", "pins", "uncommitted_nbytes")
    }


def produced(client: Client, partition: str) -> int:
    """Samples that have their values."""
    _, status = client.get_production_status(["x"], partition)
    return 0 if status is None else int(status.sum())


def nothing_occupied(client: Client, partition: str) -> bool:
    return not any(occupied(client).values()) and not numbers(client, partition)["held"]


def check_left_alone(conf: Any, partition: str) -> None:
    """While the client that gave up still lives, or just after its death: it holds nothing."""
    client = tq.get_client()
    assert comes_true(lambda: nothing_occupied(client, partition)), (occupied(client), numbers(client, partition))
    assert not client.get_stats()["waiting"]


def prepare(partition: str) -> tq.BatchMeta:
    """BEFORE samples and one with a key; two of them are consumed by the task "t"."""
    client = tq.get_client()
    meta = client.put(rows(BEFORE), partition_id=partition)
    client.get_meta(["x"], 2, partition, task_name="t")
    client.get_stats()  # says that the batch has come
    tq.kv_put("known", partition, {"x": torch.ones(1)})
    return meta


def is_stored(client: Client, samples: int) -> bool:
    """A sample counts in every unit that has some of its fields."""
    held = [unit["samples"] for unit in client.get_storage_stats()]
    return max(held) <= samples <= sum(held)


def check_one_effect(partition: str, verb: Verb) -> None:
    """The call took effect wholly or not at all; the stream ends; and all of the capacity is there."""
    client = tq.get_client()
    samples = numbers(client, partition)["samples"]
    assert samples in (BEFORE + 1, BEFORE + 1 + verb.effect)
    inserted = samples - produced(client, partition)
    assert inserted in ((0, verb.effect) if verb.effect > 0 else (0,))
    # Units of other processes are told later what was cleared.
    assert comes_true(lambda: is_stored(client, samples - inserted)), (samples, inserted, client.get_storage_stats())
    if samples:
        check_values(client, partition, samples - inserted)
    client.clear_partition(partition)
    assert sum(unit["samples"] for unit in client.get_storage_stats()) == 0
    meta = client.put(rows(CAPACITY), partition_id=partition)
    assert client.get_data(meta)["x"].values().numel() == CAPACITY
    client.clear_partition(partition)


def check_values(client: Client, partition: str, published: int) -> None:
    """Every sample is given out once, and with its values; then comes the end."""
    client.seal_partition(partition)
    found: list[int] = []
    while len(found) < published:
        meta = client.get_meta(["x"], 1, partition, task_name="drains", timeout_s=SERVED_S)
        found += meta.global_indexes
        assert client.get_data(meta)["x"].values().min() == 1
    assert len(set(found)) == published
    with pytest.raises((tq.EndOfPartitionError, tq.BatchTimeoutError)) as told:
        client.get_meta(["x"], 1, partition, task_name="drains", timeout_s=0.5)
    unfilled = numbers(client, partition)["samples"] - published
    assert told.type is (tq.BatchTimeoutError if unfilled else tq.EndOfPartitionError)
