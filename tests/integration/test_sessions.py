# SPDX-License-Identifier: Apache-2.0
"""What a client holds ends with its last connection, however it ended; and who produces a field is known."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from functools import partial
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.faults import NOTICE_S, SERVED_S, SLOW, check_served, client_of, comes_true
from tests.integration.given_up import LARGE, fetch_large, nothing_occupied, numbers, rows
from tests.integration.noticing import until_parked

GRACE_S = 0.5 * SLOW
CONF = {
    "controller": {"producer_grace_s": GRACE_S},
    "backend": {"SimpleStorage": {"total_storage_size": 1000, "capacity_bytes": 4 << 20, "num_data_storage_units": 1}},
}


pytestmark = pytest.mark.usefixtures("emptied")


def test_a_client_that_was_evicted_goes_on_in_a_session_of_its_own(queue, client, name):
    evicted = client_of(queue, "evicted")
    meta = evicted.put({"x": torch.arange(3)}, partition_id=name)
    (before,) = [each for each in client.get_stats()["clients"] if each.startswith("evicted")]
    assert client.evict_client(before)
    with pytest.raises(tq.QueueUnreachableError):  # how it is told
        evicted.get_partition_list()
    assert evicted.get_data(meta)["x"].tolist() == [0, 1, 2]
    for width in (1, 100_000):
        large = evicted.put({"y": torch.ones(3, width)}, partition_id=f"{name} {width}")
        assert evicted.get_data(large)["y"].values().sum() == 3 * width
    evicted.put({"y": torch.arange(3)}, metadata=meta)
    # The error of above may keep what it was raised in.
    assert comes_true(lambda: gc.collect() >= 0 and before not in client.get_stats()["clients"])
    evicted.close()


def killed(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(NOTICE_S)
    assert process.exitcode == -signal.SIGKILL


# ---- what is held ----


def hold(conf: Any, partition: str) -> None:
    """Pin values, park a fetch and three puts: one without room for its bytes, one without samples left, an insert."""
    client = client_of(conf, "holder")
    pinned = client.fetch_batch(fetch_large(partition))

    async def go() -> None:
        await asyncio.gather(
            client.async_get_meta(["never"], 1, partition, task_name="waits", timeout_s=300.0),
            client.async_put(rows(1, 900_000), partition_id=partition),
            client.async_put(rows(999), partition_id=partition),
            client.async_get_meta(["x"], 999, partition, mode="insert"),
        )

    asyncio.run(go())
    pinned.close()


def test_all_that_a_killed_client_held_is_free_again(client, queue, name, fork):
    client.put(rows(4, 100_000), partition_id=name)
    holder = fork(hold, queue, name)
    assert comes_true(lambda: len(client.get_stats()["waiting"]) == 4), client.get_stats()["waiting"]
    assert comes_true(lambda: client.get_storage_stats()[0]["parked"] == client.get_storage_stats()[0]["pins"] == 1)
    killed(holder)
    assert comes_true(lambda: not client.get_stats()["waiting"])
    assert comes_true(lambda: nothing_occupied(client, name)), client.get_storage_stats()
    assert numbers(client, name)["samples"] == 4
    client.seal_partition(name)
    assert client.get_meta(["x"], 4, name, task_name="t", timeout_s=SERVED_S).size == 4
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["x"], 4, name, task_name="t", timeout_s=SERVED_S)


def lease_and_wait(conf: Any, partition: str) -> None:
    """Hold leased memory while the controller thinks: the put's own parser of values never ends."""
    client = client_of(conf, "leaser")
    client.session.send_with_frames = stuck
    client.put(rows(1, LARGE), partition_id=partition)


def stuck(*_: Any, **__: Any) -> Any:
    signal.pause()


def test_leased_memory_of_a_killed_client_is_free_again(client, queue, name, fork):
    leaser = fork(lease_and_wait, queue, name)
    assert comes_true(lambda: client.get_storage_stats()[0]["leased_nbytes"] > 0)
    killed(leaser)
    assert comes_true(lambda: client.get_storage_stats()[0]["leased_nbytes"] == 0)


@pytest.mark.parametrize("ends", ["closes", "is killed"])
def test_a_client_that_lives_keeps_what_it_holds_when_others_end(client, queue, name, fork, ends):
    client.put(rows(8, 100_000), partition_id=name)
    pinned = client.fetch_batch(fetch_large(name))
    if ends == "closes":
        other = client_of(queue, "other")
        other.fetch_batch(fetch_large(name, "u"))
        other.close()
    else:
        holder = fork(hold, queue, name)
        assert comes_true(lambda: len(client.get_stats()["waiting"]) == 4)
        killed(holder)
    assert comes_true(lambda: client.get_storage_stats()[0]["pins"] == 1), client.get_storage_stats()
    assert client.take(pinned)["x"].values().min() == 1


# ---- another PID namespace ----

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL"]
HOLDS = """
import os, sys
import numpy as np, torch
import transfer_queue as tq
from tests.integration.given_up import fetch_large
client = tq.get_client()
batch = client.fetch_batch(fetch_large(sys.argv[1]))
print(os.getpid(), flush=True)
client.get_meta(["never"], 1, sys.argv[1], task_name="waits", timeout_s=300.0)
"""


def may_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.programs
@pytest.mark.skipif(not may_unshare(), reason="no privilege to make a PID namespace")
def test_a_client_of_another_pid_namespace_is_noticed_when_it_is_killed(client, queue, name):
    import sys

    client.put(rows(4, 100_000), partition_id=name)
    command = [*UNSHARE, sys.executable, "-c", HOLDS, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert int(holder.stdout.readline()) < 10, "its PIDs are its own"
            until_parked(client, task="waits")
            assert client.get_storage_stats()[0]["pins"] == 1
        finally:
            holder.kill()
    assert comes_true(lambda: not client.get_stats()["waiting"])
    assert comes_true(lambda: nothing_occupied(client, name))
    assert client.get_meta(["x"], 4, name, task_name="t", timeout_s=SERVED_S).size == 4


# ---- producers ----


def produce(conf: Any, field: str, partitions: list[str], stays: bool) -> None:
    client = client_of(conf, "producer")
    for partition in partitions:
        client.put({field: rows(1)["x"]}, partition_id=partition)
    if stays:
        signal.pause()
    client.close()


def test_no_producer_is_missed_while_another_of_the_field_lives_in_any_partition(client, queue, name, fork):
    dies, lives = (fork(produce, queue, name, [f"{name} {n}"], True) for n in range(2))
    assert comes_true(lambda: {f"{name} 0", f"{name} 1"} <= set(client.get_partition_list()))
    killed(dies)
    for partition in (f"{name} 0", "never used"):
        with pytest.raises(tq.BatchTimeoutError):
            client.get_meta([name], 2, partition, task_name="t", timeout_s=GRACE_S + 1.0)
    killed(lives)
    with pytest.raises(tq.ProducersGoneError, match=name):
        client.get_meta([name], 2, "never used", task_name="t", timeout_s=SERVED_S)


def test_a_producer_that_was_replaced_is_missed_by_nobody_when_the_others_leave(client, queue, name, fork):
    dies = fork(produce, queue, name, [name], True)
    assert comes_true(lambda: name in client.get_partition_list())
    killed(dies)
    replacement = fork(produce, queue, name, [name, "next"], False)
    replacement.join(NOTICE_S)
    assert replacement.exitcode == 0
    assert client.get_meta([name], 2, name, task_name="t", timeout_s=SERVED_S).size == 2
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta([name], 1, name, task_name="t", timeout_s=GRACE_S + 1.0)


def test_a_producer_replaced_within_the_grace_time_is_missed_by_nobody(client, queue, name, fork):
    dies = fork(produce, queue, name, [name], True)
    assert comes_true(lambda: name in client.get_partition_list())
    killed(dies)
    client.put({name: torch.ones(1)}, partition_id=name)
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta([name], 3, name, task_name="t", timeout_s=GRACE_S + 1.0)


def test_producers_that_died_before_the_first_put_into_the_next_partition_are_missed(client, queue, name, fork):
    producers = [fork(produce, queue, name, [f"{name} {n}"], True) for n in range(2)]
    assert comes_true(lambda: {f"{name} 0", f"{name} 1"} <= set(client.get_partition_list()))
    for partition in (f"{name} 0", f"{name} 1"):
        client.clear_partition(partition)
    for producer in producers:
        killed(producer)
    with pytest.raises(tq.ProducersGoneError, match=name):
        client.get_meta([name], 1, "the next", task_name="t", timeout_s=SERVED_S)


def test_a_producer_that_died_before_its_first_put_was_visible_is_missed(client, queue, name, fork):
    """Its put waits for room, and has said which field it is about to write."""
    full = client.put(rows(1000), partition_id="full")
    dies = fork(produce, queue, name, [name], True)
    until_parked(client, partition=name)
    killed(dies)
    client.clear_samples(full)
    with pytest.raises((tq.ProducersGoneError, tq.BatchTimeoutError)):
        client.get_meta([name], 1, name, task_name="t", timeout_s=GRACE_S + 1.0)
    check_served(queue)


# ---- workers on groups ----


def end_session(client, name):
    (own,) = [each for each in client.get_stats()["clients"] if each.startswith(name)]
    assert client.evict_client(own)


def test_whoever_holds_a_lease_is_a_living_producer_and_groups_that_are_left_are_named(queue, client, name):
    client.register_task(f"actor-{name}", tq.GroupSampler(groups=2))
    client.add_groups({"number": torch.arange(3)}, name, worker_attempts=9, tasks=[f"actor-{name}"])
    workers = [client_of(queue, f"{name}-{number}") for number in range(3)]
    workers[0].lease(name)[0].close({name: torch.arange(2)})
    leases = workers[1].lease(name)  # it works on it, and has put nothing yet
    fetch = partial(client.get_meta, [name], None, name, task_name=f"actor-{name}")
    end_session(client, f"{name}-0")
    with pytest.raises(tq.BatchTimeoutError):
        fetch(timeout_s=GRACE_S + 1.0)
    end_session(client, f"{name}-1")
    text = rf"2 groups wait for a worker and will not be lost: new workers may lease from '{name}' .*producer_grace_s"
    with pytest.raises(tq.ProducersGoneError, match=text):
        fetch(timeout_s=SERVED_S)
    assert leases
    assert workers[2].lease(name)[0].close({name: torch.arange(2)}).size == 2
    assert fetch(timeout_s=SERVED_S).size == 4
    for worker in workers:
        worker.close()
