# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, or a cancelled task, in a client that lives on: no value stays that nobody can name, and no memory."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.noticing import until
from transfer_queue.transport.blocking import is_blocking

ROWS = 16
LONGEST_S = 1e-3
"""A clear takes less, so some interrupts come before it begins, within it, and after it."""


def put(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta:
    return client.put({"x": torch.ones(ROWS, 10_000)}, partition_id=partition)


def stored(client: tq.TransferQueueClient) -> tuple[int, int]:
    """(samples, bytes leased) at all units."""
    units = client.get_storage_stats()
    return sum(unit["samples"] for unit in units), sum(unit["leased_nbytes"] for unit in units)


def clear_samples(client: tq.TransferQueueClient, partition: str, meta: tq.BatchMeta) -> Any:
    return client.async_clear_samples(meta)


def clear_partition(client: tq.TransferQueueClient, partition: str, meta: tq.BatchMeta) -> Any:
    return client.async_clear_partition(partition)


def clear_consumed(client: tq.TransferQueueClient, partition: str, meta: tq.BatchMeta) -> Any:
    client.get_meta(["x"], ROWS, partition, task_name="t")
    return client.async_clear_consumed(partition)


CLEARS = [clear_samples, clear_partition, clear_consumed]
Clear = Callable[[tq.TransferQueueClient, str, tq.BatchMeta], Any]


NEVER_AWAITED = pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")  # Ctrl-C came before the call
UNRAISABLE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C came in a __del__


def at_random(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of random Ctrl-C slow, because one that escapes ends pytest's run.

    Its timeout is a thread, because ``interrupting`` uses the alarm that pytest's other kind of timeout needs.
    """
    return pytest.mark.slow(pytest.mark.timeout(method="thread")(NEVER_AWAITED(UNRAISABLE(test))))


@pytest.fixture
def interrupting() -> Iterator[Callable[[float], None]]:
    """``interrupting(seconds)``: Ctrl-C comes then; 0: it doesn't come any more."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("clear", CLEARS)
def test_of_a_clear_that_is_cancelled_at_any_step_no_value_stays(client, name, clear: Clear):
    async def given_up_after(steps: int, meta: tq.BatchMeta) -> bool:
        task = asyncio.create_task(clear(client, name, meta))
        for _ in range(steps):
            await asyncio.sleep(0)
        given_up = task.cancel()
        await asyncio.wait([task])
        return given_up and task.cancelled()

    before, steps = stored(client)[0], 0
    while asyncio.run(given_up_after(steps, put(client, name))):
        client.clear_partition(name)
        assert stored(client)[0] == before
        steps += 1
    client.clear_partition(name)
    assert stored(client)[0] == before
    assert steps > 2, "there were some at which it was not done yet"


@at_random
@pytest.mark.parametrize("clear", [clear_samples, clear_partition])
def test_of_a_clear_that_ctrl_c_interrupts_no_value_stays(client, name, clear: Clear, interrupting):
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, before, interrupted = random.Random(seed), stored(client)[0], 0
    for _ in range(150):
        meta = put(client, name)
        try:
            interrupting(moments.uniform(0, LONGEST_S) or LONGEST_S)
            client.clear_samples(meta) if clear is clear_samples else client.clear_partition(name)
            interrupting(0)
        except KeyboardInterrupt:
            interrupted += 1
        client.clear_partition(name)  # as one would who isn't sure
    assert interrupted
    assert stored(client)[0] == before
    assert not is_blocking(), "the calls of an event loop would block it from now on"


@at_random
def test_a_put_that_ctrl_c_interrupts_is_there_whole_or_not_at_all_and_leaves_no_memory_leased(
    client, name, interrupting
):
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, interrupted = random.Random(seed), 0
    put(client, name)
    for _ in range(150):
        try:
            interrupting(moments.uniform(0, 5 * LONGEST_S) or LONGEST_S)
            put(client, name)
            interrupting(0)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    assert until(lambda: stored(client)[1] == 0)
    meta = client.get_meta(partition_id=name, mode="force_fetch")
    assert meta.size % ROWS == 0
    assert client.get_stats()["partitions"][name]["held"] == 0
    for part in range(0, meta.size, ROWS):
        assert bool((client.get_data(meta[part : part + ROWS])["x"].values() == 1).all())
    client.clear_partition(name)
    assert stored(client) == (0, 0)


@at_random
def test_a_get_that_ctrl_c_interrupts_leaves_nothing_pinned(client, name, interrupting):
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, interrupted, meta = random.Random(seed), 0, put(client, name)
    for _ in range(150):
        try:
            interrupting(moments.uniform(0, LONGEST_S) or LONGEST_S)
            client.get_data(meta)
            interrupting(0)
        except KeyboardInterrupt:
            interrupted += 1
        except TypeError as error:  # torch makes one of a Ctrl-C that comes while it reads its arguments
            if "KeyboardInterrupt" not in str(error):
                raise
            interrupted += 1
    assert interrupted
    assert until(lambda: not sum(unit["pins"] for unit in client.get_storage_stats()))
    client.clear_partition(name)
