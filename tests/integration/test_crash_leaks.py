# SPDX-License-Identifier: Apache-2.0
"""Clients that are killed, or give up, in the middle of a clear or a put: nothing of it stays in the storage units."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import blocking
from clients import units
from plain_rows import rows
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.calls import before, die
from tests.integration.noticing import WAIT_S, ended, until

# A process each: there a put and a clear have several steps, and a client may end between any two of them.
CONF = {
    "server_processes": "each",
    "backend": {"SimpleStorage": {"num_data_storage_units": 1, "capacity_bytes": 1 << 20, "put_timeout_s": 20.0}},
}


def unit() -> Any:
    return units()[0]


def stored() -> tuple[int, int, int, int]:
    """(values, their bytes, those of uncommitted writes, writes that wait for room)."""
    stats = unit()
    return stats.values, stats.live_nbytes, stats.uncommitted_nbytes, stats.parked


def nothing_stored() -> bool:
    return stored() == (0, 0, 0, 0)


@pytest.fixture(autouse=True)
def emptied(client):
    """Each test begins with empty units, whatever the one before it left."""
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    blocking(client.storage_manager.clear_rows(range(1000)))
    assert nothing_stored()


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

    def clear_and_die() -> None:
        client.clear_samples(meta)
        die()

    with before(client, "Publish", clear_and_die):
        client.put(rows(b=torch.arange(len(indexes))), metadata=meta)


def test_what_a_killed_writer_stored_for_samples_cleared_meanwhile_is_freed(client, name, fork):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    writer = fork(write_onto_cleared_samples_and_die_before_publishing, meta.global_indexes, name)
    assert ended(writer) == -signal.SIGKILL
    assert client.get_stats()["partitions"][name]["samples"] == 0
    assert until(nothing_stored), unit()


@pytest.mark.parametrize("step", ["Write", "Publish"])
def test_what_a_cancelled_put_stored_for_samples_cleared_meanwhile_is_freed(client, name, step):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)

    def clear_and_cancel() -> None:
        client.clear_samples(meta[:])
        asyncio.current_task().cancel()

    with before(client, step, clear_and_cancel), pytest.raises(asyncio.CancelledError):
        asyncio.run(client.async_put(rows(b=torch.arange(3)), metadata=meta))
    assert client.get_stats()["partitions"][name]["samples"] == 0
    assert until(nothing_stored), unit()


def test_a_put_cancelled_at_its_publish_is_undone(client, name):
    with (
        before(client, "Publish", lambda: asyncio.current_task().cancel()),
        pytest.raises(asyncio.CancelledError),
    ):
        asyncio.run(client.async_put(rows(a=torch.arange(3)), partition_id=name))
    assert until(lambda: client.get_stats()["partitions"][name]["samples"] == 0)
    assert until(nothing_stored), unit()


# ---- puts that are published and not committed ----


def put_and_die_before_committing(partition: str, indexes: list[int]) -> None:
    client = tq.get_client()
    with before(client, "Commit", die):
        client.put(rows(a=torch.tensor([7, 8])), metadata=tq.BatchMeta(indexes, [partition] * 2))


def test_what_a_killed_writer_had_published_replaces_what_was_there(client, name, fork):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert ended(fork(put_and_die_before_committing, name, meta.global_indexes)) == -signal.SIGKILL
    assert until(lambda: stored()[2] == 0)
    assert (client.get_data(meta)["a"].tolist(), stored()[0]) == ([7, 8], 2)


def put_what_is_refused_and_die(partition: str, indexes: list[int]) -> None:
    """Its samples are cleared when it publishes, and it dies before it aborts its write."""
    client = tq.get_client()
    client.session.cancel = die
    meta = tq.BatchMeta(indexes, [partition] * 2)
    with before(client, "Publish", lambda: client.clear_samples(meta[:1])):
        client.put(rows(b=torch.arange(2)), metadata=meta)


def test_what_a_killed_writer_was_refused_to_publish_is_freed(client, name, fork):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert ended(fork(put_what_is_refused_and_die, name, meta.global_indexes)) == -signal.SIGKILL
    assert until(lambda: stored()[2] == 0)
    assert stored()[0] == 1, "of the sample that is left"


# ---- puts by key ----


def put_by_key_and_die_before_publishing(keys: list[str], partition: str) -> None:
    with before(tq.get_client(), "Publish", die):
        tq.kv_batch_put(keys, partition, rows(b=torch.arange(len(keys)), c=torch.arange(len(keys))))


@pytest.mark.parametrize("known", [["a", "b"], ["a"], []], ids=["all", "some", "none"])
def test_what_a_killed_writer_put_by_keys_of_which_some_were_known_is_freed(client, name, fork, known):
    if known:
        tq.kv_batch_put(known, name, rows(a=torch.arange(len(known))))
    count = stored()
    assert ended(fork(put_by_key_and_die_before_publishing, ["a", "b"], name)) == -signal.SIGKILL
    assert until(lambda: stored() == count), unit()


def test_what_a_killed_writer_would_have_replaced_by_key_stays_as_it_was(client, name, fork):
    tq.kv_batch_put(["a", "b"], name, rows(b=torch.tensor([7, 8])))
    assert ended(fork(put_by_key_and_die_before_publishing, ["a", "b"], name)) == -signal.SIGKILL
    assert until(lambda: stored()[0] == 2 and not stored()[2]), "the new field is freed"
    assert tq.kv_batch_get(["a", "b"], name)["b"].tolist() == [7, 8]


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
