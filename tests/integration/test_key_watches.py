# SPDX-License-Identifier: Apache-2.0
"""Waiting for keys through a real queue: from other processes, with both clients, and with ends of every kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from streaming_support import WAIT_S, InThread

import transfer_queue as tq
from tests.integration.faults import client_of
from tests.integration.noticing import ended, until, until_parked

DONE = "status == 'done'"


def put_done(partition: str, first: int, count: int) -> None:
    """In a process of its own: keys that are running, and then done one by one."""
    keys = [str(i) for i in range(first, first + count)]
    tq.kv_batch_put(keys, partition, tags=[{"status": "running"}] * count)
    for key in keys:
        tq.kv_put(key, partition, {"x": torch.tensor(int(key))}, {"status": "done"})


# ---- wait_keys ----


def test_wait_keys_returns_when_enough_keys_of_other_processes_match(queue, client, fork, name):
    waiting = InThread(lambda: client.wait_keys(name, DONE, 30, timeout_s=WAIT_S))
    until_parked(client, partition=name)
    producers = [fork(put_done, name, first, 10) for first in (0, 10, 20)]
    found = waiting.result()
    assert sorted(map(int, found)) == list(range(30))
    assert all(tags == {"status": "done"} for tags in found.values())
    assert [ended(each) for each in producers] == [0, 0, 0]


def test_wait_keys_returns_all_that_match_in_pages(client, name):
    tq.kv_batch_put([str(i) for i in range(12_000)], name, tags=[{"even": i % 2 == 0} for i in range(12_000)])
    assert list(tq.kv_wait_keys(name, "even == true", 10)) == [str(i) for i in range(0, 12_000, 2)]
    assert len(tq.kv_wait_keys(name, count=12_000)) == 12_000


def test_wait_keys_that_wait_too_long_say_how_many_matched(client, name):
    tq.kv_batch_put(["a", "b", "c"], name, tags=[{"v": 1}, {"v": 2}, {"v": 3}])
    with pytest.raises(tq.KeysTimeoutError, match=r"for 3 keys .* where v > 1: 2 of its 3 keys match") as error:
        client.wait_keys(name, "v > 1", 3, timeout_s=0.01)
    assert isinstance(error.value, TimeoutError)
    with pytest.raises(tq.KeysTimeoutError, match="no such partition"):
        client.wait_keys("nowhere", timeout_s=0.0)
    for wrong in ({"count": 0}, {"where": "v >"}, {"timeout_s": float("nan")}):
        with pytest.raises(tq.errors.InvalidRequestError):
            client.wait_keys(name, **wrong)


def test_wait_keys_ends_when_the_partition_is_cleared(client, name):
    tq.kv_put("a", name, tag={})
    waiting = InThread(lambda: client.wait_keys(name, count=2, timeout_s=WAIT_S))
    until_parked(client, partition=name)
    client.clear_partition(name)
    with pytest.raises(tq.EndOfPartitionError, match="was cleared while 2 of its keys were awaited"):
        waiting.result()


# ---- kv_watch ----


def replay(watch: Iterator[tq.KeyChanges], known: dict[str, Any], until_done: int) -> dict[str, Any]:
    """Follow until so many keys are done."""
    for changed, removed, fresh in watch:
        assert known.keys() >= set(removed)
        assert fresh or not any(known.get(key) == tags for key, tags in changed.items())
        known = {**{key: tags for key, tags in known.items() if key not in removed}, **changed}
        if sum(tags.get("status") == "done" for tags in known.values()) >= until_done:
            return known
    raise AssertionError("the watch ended")


def test_kv_watch_tells_each_change_of_other_processes(queue, client, fork, name):
    watch = tq.kv_watch(name, timeout_s=WAIT_S)
    producers = [fork(put_done, name, first, 20) for first in (0, 20)]
    known = replay(watch, {}, 40)
    assert known == tq.kv_list(name)[name]
    tq.kv_clear(["3", "4"], name)
    assert next(watch) == ({}, ["3", "4"], False)
    tq.kv_put("5", name, tag={"status": "read"})
    assert next(watch).changed == {"5": {"status": "read"}}
    assert [ended(each) for each in producers] == [0, 0]


def test_kv_watch_with_a_filter_tells_who_comes_and_who_goes(client, name):
    tq.kv_batch_put(["a", "b"], name, tags=[{"v": 1}, {"v": 5}])
    watch = client.kv_watch(name, "v > 3", timeout_s=WAIT_S)
    assert next(watch) == ({"b": {"v": 5}}, [], True)
    tq.kv_put("a", name, tag={"v": 2})
    tq.kv_put("c", name, tag={"v": 0})
    tq.kv_put("a", name, tag={"v": 4})
    assert next(watch) == ({"a": {"v": 4}}, [], False)
    tq.kv_put("b", name, tag={"v": 3})
    assert next(watch) == ({}, ["b"], False)


def test_a_watch_that_times_out_goes_on_where_it_was(client, name):
    tq.kv_put("a", name, tag={"v": 1})
    watch = client.kv_watch(name, timeout_s=0.02)
    assert next(watch).changed == {"a": {"v": 1}}
    with pytest.raises(tq.KeysTimeoutError, match=r"kv_watch waited .* for changed keys of .*: 1 are known"):
        next(watch)
    tq.kv_put("b", name, tag={})
    assert next(watch) == ({"b": {}}, [], False)


def test_a_long_list_comes_whole_and_what_changes_then_is_told(client, name):
    tq.kv_batch_put([str(i) for i in range(12_000)], name, tags=[{"v": i} for i in range(12_000)])
    watch = client.kv_watch(name, timeout_s=WAIT_S)
    first = next(watch)
    assert (first.fresh, first.changed) == (True, tq.kv_list(name)[name])
    tq.kv_put("11999", name, tag={"v": 0})
    assert next(watch).changed == {"11999": {"v": 0}}


def test_a_watch_ends_with_its_partition(client, name):
    tq.kv_put("a", name, tag={})
    watch = client.kv_watch(name, timeout_s=WAIT_S)
    next(watch)
    rest = InThread(lambda: list(watch))
    until_parked(client, partition=name)
    client.clear_partition(name)
    assert rest.result() == []
    tq.kv_put("a", name, tag={})
    assert list(watch) == [], "it has ended for good"


def test_the_async_twins(client, name):
    async def follow() -> None:
        watch = tq.async_kv_watch(name)
        waiting = asyncio.ensure_future(anext(watch))
        also = asyncio.ensure_future(tq.async_kv_wait_keys(name, "v == 2", timeout_s=WAIT_S))
        await tq.async_kv_put("a", name, tag={"v": 1})
        assert (await waiting).changed == {"a": {"v": 1}}
        given_up = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        await tq.async_kv_put("a", name, tag={"v": 2})
        assert await also == {"a": {"v": 2}}
        assert (await anext(watch)).changed == {"a": {"v": 2}}, "a cancelled call has taken nothing"
        await client.async_clear_partition(name)
        assert [each async for each in watch] == []

    asyncio.run(follow())


def test_parked_watches_end_with_their_session_and_delay_nobody(queue, client, name):
    tq.kv_put("a", name, tag={"v": 0})
    other = client_of(queue, "watcher")
    failed: list[BaseException] = []

    def follow(watch: Any) -> None:
        try:
            list(watch)
        except tq.TransferQueueError as error:
            failed.append(error)

    watches = [other.kv_watch(name, "v == 99") for _ in range(8)]
    threads = [threading.Thread(target=follow, args=(watch,)) for watch in watches]
    for thread in threads:
        thread.start()
    until_parked(client, 8, partition=name)
    for v in range(20):
        tq.kv_put("a", name, tag={"v": v})
    other.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(failed) == 8
    assert until(lambda: not client.get_stats()["waiting"])
