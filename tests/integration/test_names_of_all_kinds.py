# SPDX-License-Identifier: Apache-2.0
"""Any text may name a partition, a task or a key, and many may wait at once: nobody else is kept waiting by that."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.faults import SERVED_S, client_of
from tests.integration.noticing import until_parked

NAMES = [
    "\0units", "\0freezers", "\0writers", "units", "fetches", "keys", "memory", "freezes", "runs", " ", "🍰",
    300 * "n",
]  # fmt: skip
FILTERS = 40
TASKS = 700
LATE_S = 0.5

pytestmark = pytest.mark.usefixtures("emptied")


@pytest.mark.parametrize("strange", NAMES, ids=range(len(NAMES)))
def test_a_fetch_that_waits_under_any_name_disturbs_nobody_and_is_served(queue, client, strange):
    waiting = client_of(queue, "waiting")
    with ThreadPoolExecutor(2) as pool:
        fetch = pool.submit(waiting.get_meta, ["x"], 1, strange, task_name=strange, timeout_s=SERVED_S)
        until_parked(client, task=strange)
        meta = client.put({"y": torch.arange(2)}, partition_id="other")
        assert client.get_data(meta)["y"].tolist() == [0, 1]
        client.put({"x": torch.ones(1)}, partition_id=strange)
        assert client.get_data(fetch.result(SERVED_S))["x"].tolist() == [1.0]
        state = client.get_stats()
        assert all(held["freezes"] == 0 for held in state["clients"].values() if "freezes" in held)
    waiting.close()


def test_more_filters_at_once_than_are_remembered_are_all_answered(queue, client, name):
    waiting = client_of(queue, "waiting")

    async def all_answered() -> list[Any]:
        fetches = [
            waiting.async_get_meta(["x"], 1, name, task_name="t", where=f"n == {n}", timeout_s=SERVED_S)
            for n in range(FILTERS)
        ]
        watches = [waiting.async_wait_keys(name, f"n == {n}", timeout_s=SERVED_S) for n in range(FILTERS)]
        late = waiting.async_get_meta(["x"], 1, name, task_name="t", where="n == -1", timeout_s=LATE_S)
        return await asyncio.gather(*fetches, *watches, late, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asyncio.run, all_answered())
        until_parked(client, FILTERS, task="t")
        keys, tags = [f"key {n}" for n in range(FILTERS)], [{"n": n} for n in range(FILTERS)]
        tq.kv_batch_put(keys, name, TensorDict({"x": torch.arange(FILTERS)}, batch_size=[FILTERS]), tags)
        *answered, late = answers.result()
    assert [meta.custom_meta for meta in answered[:FILTERS]] == [[each] for each in tags]
    assert answered[FILTERS:] == [{key: each} for key, each in zip(keys, tags, strict=True)]
    assert isinstance(late, tq.BatchTimeoutError)
    waiting.close()


def test_of_many_tasks_that_wait_for_one_partition_none_starves(queue, client, name):
    waiting = client_of(queue, "waiting")

    async def all_answered() -> list[Any]:
        fetches = [
            waiting.async_get_meta(["x"], 2, name, task_name=f"task {n}", timeout_s=SERVED_S) for n in range(TASKS)
        ]
        return await asyncio.gather(*fetches)

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asyncio.run, all_answered())
        until_parked(client, TASKS, partition=name)
        client.put({"x": torch.arange(2)}, partition_id=name)
        assert {tuple(meta.global_indexes) for meta in answers.result()} == {
            tuple(client.get_meta(["x"], 2, name, task_name="after").global_indexes)
        }
    waiting.close()
