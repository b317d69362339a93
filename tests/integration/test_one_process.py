# SPDX-License-Identifier: Apache-2.0
"""Controller and units in one process: whatever one client says must not end what all others are served by."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.storage.simple.messages import Wish, encode

import transfer_queue as tq
from tests.integration.noticing import until
from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError
from transfer_queue.transport.base import Call
from transfer_queue.transport.modes import run_blocking

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


WISHES = {
    "no message": b"no message",
    "no text": bytes([0x93, 0xA4]) + b"W\xffsh" + bytes([0x90, 0x90]),
    "no unit": encode(Wish(["x"], [])),
    "no such field": encode(Wish(["y"], [None, None])),
}


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_a_batch_is_given_out_whatever_is_wrong_with_the_wish_beside_its_fetch(client, name, wish):
    client.put(rows(2), partition_id=name)
    fetch = p.Fetch(10**6, name, "t", ["x"], 2)
    (reply,) = run_blocking(
        client.session.caller.call_many([Call(client.session.controller, p.encode(fetch), [wish])], WAIT_S)
    )
    assert len(p.unpack_indexes(p.decode_reply(reply.header).indexes)) == 2
    assert client.get_partition_list()


def test_a_batch_is_taken_once(client, name):
    client.put(rows(2), partition_id=name)
    batch = client.fetch_batch(["x"], 2, name, "t")
    assert client.take(batch)["x"].values().tolist() == list(range(4))
    with pytest.raises(InvalidRequestError, match="was taken or closed"):
        client.take(batch)
    assert client.get_data(batch.meta)["x"].values().tolist() == list(range(4))
