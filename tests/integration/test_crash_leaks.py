# SPDX-License-Identifier: Apache-2.0
"""Clients that are killed, or give up, in the middle of a clear or a put: nothing of it stays in the storage units."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.noticing import WAIT_S, ended, until
from tests.integration.soak import has_arena
from transfer_queue.transport.modes import run_blocking

# Without an arena a unit isn't told when a client ends: what was found by a closed connection there must not be missed.
CONF = {
    "backend": {
        "SimpleStorage": {
            "num_data_storage_units": 1,
            "capacity_bytes": 1 << 20,
            "put_timeout_s": 20.0,
            **({"arena": False} if has_arena() else {}),
        }
    }
}


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def unit() -> Any:
    return run_blocking(tq.get_client().storage_manager.stats())[0]


def nothing_stored() -> bool:
    return (unit().values, unit().live_nbytes, unit().parked) == (0, 0, 0)


@pytest.fixture(autouse=True)
def emptied(client):
    """Each test begins with empty units, whatever the one before it left."""
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    run_blocking(client.storage_manager.clear_rows(range(1000)))
    assert nothing_stored()


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def cancelled_before(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, whose first call is cancelled by its caller while it waits for its first answer."""
    cancels = iter([True])

    async def cancelled(*args: Any, **kwargs: Any) -> Any:
        if next(cancels, False):
            asyncio.current_task().cancel()
        return await method(*args, **kwargs)

    return cancelled


# ---- clears ----


def clear_and_die_between_controller_and_storage(indexes: list[int], partition: str) -> None:
    client = tq.get_client()
    client.storage_manager.clear_rows = die
    client.clear_samples(tq.BatchMeta(indexes, [partition] * len(indexes)))


def clear_partition_and_die_between_controller_and_storage(partition: str) -> None:
    client = tq.get_client()
    client.storage_manager.clear_rows = die
    client.clear_partition(partition)


def test_values_of_samples_whose_clearing_process_was_killed_are_freed(client, name, fork):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    assert ended(fork(clear_and_die_between_controller_and_storage, meta.global_indexes, name)) == -signal.SIGKILL
    assert client.get_stats()["partitions"][name]["samples"] == 0
    assert until(nothing_stored), unit()


def test_values_of_a_partition_whose_clearing_process_was_killed_are_freed(client, name, fork):
    client.put(rows(a=torch.arange(3)), partition_id=name)
    assert ended(fork(clear_partition_and_die_between_controller_and_storage, name)) == -signal.SIGKILL
    assert name not in client.get_partition_list()
    assert until(nothing_stored), unit()


def test_a_clear_that_was_cancelled_halfway_frees_the_values(client, name, monkeypatch):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    with monkeypatch.context() as patched:
        patched.setattr(client.storage_manager, "clear_rows", cancelled_before(client.storage_manager.clear_rows))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(client.async_clear_samples(meta))
    assert until(lambda: client.get_stats()["partitions"][name]["samples"] == 0)
    assert until(nothing_stored), unit()


# ---- puts onto samples that are cleared meanwhile ----


def write_onto_cleared_samples_and_die_before_publishing(indexes: list[int], partition: str) -> None:
    client = tq.get_client()
    meta = tq.BatchMeta(indexes, [partition] * len(indexes))
    client._publish = die
    client.put(rows(b=torch.arange(len(indexes))), metadata=meta, data_parser=clearing(client, meta))


def clearing(client: Any, meta: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A parser at whose time the samples that are written to get cleared."""

    def parse(columns: dict[str, Any]) -> dict[str, Any]:
        client.clear_samples(meta)
        return columns

    return parse


def test_what_a_killed_writer_stored_for_samples_cleared_meanwhile_is_freed(client, name, fork):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    writer = fork(write_onto_cleared_samples_and_die_before_publishing, meta.global_indexes, name)
    assert ended(writer) == -signal.SIGKILL
    assert client.get_stats()["partitions"][name]["samples"] == 0
    assert until(nothing_stored), unit()


def test_what_a_cancelled_put_stored_for_samples_cleared_meanwhile_is_freed(client, name, monkeypatch):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    with monkeypatch.context() as patched:
        patched.setattr(client, "_publish", cancelled_before(client._publish))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(client.async_put(rows(b=torch.arange(3)), metadata=meta, data_parser=clearing(client, meta[:])))
    assert client.get_stats()["partitions"][name]["samples"] == 0
    assert until(nothing_stored), unit()


# ---- puts by key ----


def put_by_key_and_die_before_publishing(keys: list[str], partition: str) -> None:
    client = tq.get_client()
    client.publish = die
    tq.kv_batch_put(keys, partition, rows(b=torch.arange(len(keys)), c=torch.arange(len(keys))))


@pytest.mark.parametrize("known", [["a", "b"], ["a"], []], ids=["all", "some", "none"])
def test_what_a_killed_writer_put_by_keys_of_which_some_were_known_is_freed(client, name, fork, known):
    if known:
        tq.kv_batch_put(known, name, rows(a=torch.arange(len(known))))
    before = (unit().values, unit().live_nbytes)
    assert ended(fork(put_by_key_and_die_before_publishing, ["a", "b"], name)) == -signal.SIGKILL
    assert until(lambda: (unit().values, unit().live_nbytes) == before), unit()


def test_what_a_killed_writer_replaced_by_key_stays_readable(client, name, fork):
    tq.kv_batch_put(["a", "b"], name, rows(b=torch.tensor([7, 8])))
    assert ended(fork(put_by_key_and_die_before_publishing, ["a", "b"], name)) == -signal.SIGKILL
    assert until(lambda: unit().values == 2), "the new field is freed"
    assert tq.kv_batch_get(["a", "b"], name)["b"].tolist() == [0, 1]


# ---- writes that wait for room ----


def half_a_unit() -> TensorDict:
    return rows(a=torch.from_numpy(np.zeros((1, 600_000), np.uint8)))  # torch.zeros hangs in a fork: OpenMP's threads


def put_half_a_unit_more(partition: str) -> None:
    tq.get_client().put(half_a_unit(), partition_id=partition)


def test_a_write_that_waits_for_room_goes_with_its_killed_writer(client, name, fork):
    put_half_a_unit_more(name)
    writer = fork(put_half_a_unit_more, name)
    assert until(lambda: unit().parked == 1)
    writer.kill()
    assert ended(writer) == -signal.SIGKILL
    assert until(lambda: not client.get_stats()["partitions"][name]["held"])
    client.clear_partition(name)
    assert until(nothing_stored), unit()


def test_a_write_that_waits_for_room_goes_with_its_cancelled_put(client, name):
    put_half_a_unit_more(name)

    async def give_up() -> None:
        put = asyncio.ensure_future(client.async_put(half_a_unit(), partition_id=name))
        while not (await client.storage_manager.stats())[0].parked:
            pass
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put

    asyncio.run(asyncio.wait_for(give_up(), WAIT_S))
    client.clear_partition(name)
    assert until(nothing_stored), unit()
