# SPDX-License-Identifier: Apache-2.0
"""Controller and storage in one process: a fetch may wait for ever, and its values are taken once."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.calls import fetch_of
from tests.integration.noticing import until
from transfer_queue.errors import InvalidRequestError

WAIT_S = 10.0
FOREVER = [1e7, 1e300, math.inf]
"""The system's own waits take neither a month nor for ever."""


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count * 2).view(count, 2)}, batch_size=[count])


@pytest.mark.parametrize("wait_s", FOREVER)
def test_a_fetch_may_wait_for_ever(client, name, wait_s):
    got: list[tq.BatchMeta] = []

    def wait() -> None:
        got.append(client.get_meta(["x"], 2, name, task_name="t", timeout_s=wait_s))

    waiting = threading.Thread(target=wait)
    waiting.start()
    parked(client, name)
    client.put(rows(2), partition_id=name)
    waiting.join(WAIT_S)
    assert [meta.size for meta in got] == [2]


@pytest.mark.parametrize("wait_s", FOREVER)
def test_a_fetch_on_an_event_loop_may_wait_for_ever(client, name, wait_s):
    async def both() -> tq.BatchMeta:
        waiting = asyncio.create_task(client.async_get_meta(["x"], 2, name, task_name="t", timeout_s=wait_s))
        await asyncio.to_thread(parked, client, name)
        await client.async_put(rows(2), partition_id=name)
        return await asyncio.wait_for(waiting, WAIT_S)

    assert asyncio.run(both()).size == 2


def parked(client: tq.TransferQueueClient, name: str) -> None:
    """A fetch waits in the controller."""
    assert until(lambda: [each for each in client.get_stats()["waiting"] if each["partition"] == name])


def test_a_batch_is_taken_once(client, name):
    client.put(rows(2), partition_id=name)
    batch = client.fetch_batch(fetch_of(["x"], 2, name, "t"))
    assert client.take(batch)["x"].values().tolist() == list(range(4))
    with pytest.raises(InvalidRequestError, match="was taken or closed"):
        client.take(batch)
    assert client.get_data(batch.meta)["x"].values().tolist() == list(range(4))
