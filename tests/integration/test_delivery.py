# SPDX-License-Identifier: Apache-2.0
"""Delivery between processes: exactly once per task, whole or not at all, waiting without polling, and its ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calls import answered, blocking
from plain_rows import rows

import transfer_queue as tq
from tests.integration.noticing import until, until_parked
from transfer_queue import protocol as p

CONF = {"controller": {"producer_grace_s": 0.2}}
WAIT_S = 20.0


def joined(*processes: Any) -> None:
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)


# ---- exactly once ----


def produce(partition: str, first: int, count: int) -> None:
    client = tq.get_client()
    values = iter(range(first, first + count))
    for size in itertools.cycle((1, 7, 3)):
        part = list(itertools.islice(values, size))
        if not part:
            return
        client.put(rows(a=torch.tensor(part), b=torch.tensor(part)[:, None].expand(-1, 3)), partition_id=partition)


def consume(partition: str, task: str, batch_size: int) -> None:
    """Takes batches to the end of the stream and puts what it saw as samples of another partition."""
    client, seen = tq.get_client(), []
    while True:
        try:
            meta = client.get_meta(["a", "b"], batch_size, partition, task_name=task, timeout_s=WAIT_S)
        except tq.EndOfPartitionError:
            break
        data = client.get_data(meta)
        assert all(row.tolist() == [value] * 3 for row, value in zip(data["b"].unbind(), data["a"], strict=True))
        seen += data["a"].tolist()
    if seen:
        client.put(rows(seen=torch.tensor(seen)), partition_id=f"{partition}/{task}")
    client.create_partition(f"{partition}/{task}/{os.getpid()}")


def test_each_sample_reaches_each_task_once_whatever_the_processes(client, name, fork):
    consumers = [fork(consume, name, task, size) for task, size in (("one", 5), ("one", 8), ("two", 6), ("two", 6))]
    producers = [fork(produce, name, n * 100, 100) for n in range(3)]
    joined(*producers)
    client.seal_partition(name)
    joined(*consumers)
    for task in ("one", "two"):
        seen = client.get_data(client.get_meta(partition_id=f"{name}/{task}", mode="force_fetch"))["seen"]
        assert sorted(seen.tolist()) == list(range(300))
        assert client.check_consumption_status(task, name)


def rank(partition: str, dp_rank: int) -> None:
    client, config = tq.get_client(), {"dp_rank": dp_rank, "dp_size": 2}
    seen: list[list[int]] = []
    while True:
        try:
            asked = {**config, "batch_index": len(seen)}
            meta = client.get_meta(["a"], 4, partition, task_name="t", sampling_config=asked, timeout_s=WAIT_S)
        except tq.EndOfPartitionError:
            break
        seen.append(meta.global_indexes)
    client.put({"seen": [json.dumps(seen)]}, partition_id=f"{partition}/{dp_rank}")


def test_ranks_of_a_group_get_disjoint_batches_in_lockstep_and_peers_the_same(client, name, fork):
    ranks = [fork(rank, name, dp_rank) for dp_rank in (0, 0, 1)]
    joined(fork(produce, name, 0, 43))
    client.seal_partition(name)
    joined(*ranks)

    def seen(dp_rank: int) -> list[list[list[int]]]:
        told = client.get_data(client.get_meta(partition_id=f"{name}/{dp_rank}", mode="force_fetch"))["seen"]
        return [json.loads(text) for text in told]

    (mine, peer), (theirs,) = seen(0), seen(1)
    assert mine == peer
    assert (len(mine), len(theirs)) == (5, 5)  # 43 samples in rounds of 2 x 4: 3 are left over, for nobody
    assert len({index for batch in mine + theirs for index in batch}) == 40


# ---- whole or not at all ----


@contextmanager
def written(client: tq.TransferQueueClient, partition: str, field: str) -> Iterator[p.Publish]:
    """Three samples, reserved and stored in steps, and the request that would publish them."""
    session, storage = client.session, client.storage_manager
    schema = {field: p.FieldSpec("int64", ())}
    reserve = p.Reserve(session.number(), partition, 3, schema)
    reserved = answered(client, reserve, p.Reserved, keep=True)
    indexes = p.unpack_indexes(reserved.indexes).tolist()
    units = blocking(storage.write(reserve.id, indexes, storage.prepare(rows(**{field: torch.arange(3)}))))
    yield p.Publish(session.number(), partition, reserved.indexes, schema, completes=reserve.id)
    blocking(storage.commit(reserve.id, units))


def die_between_write_and_publish(partition: str) -> None:
    with written(tq.get_client(), partition, "a"):
        os.kill(os.getpid(), signal.SIGKILL)


def stored(client: tq.TransferQueueClient) -> tuple[int, int]:
    """(values, bytes of uncommitted writes) of all units."""
    units = client.get_storage_stats()
    return sum(unit["values"] for unit in units), sum(unit["uncommitted_nbytes"] for unit in units)


def test_a_producer_killed_before_publish_leaves_nothing_visible_and_no_value(client, name, fork):
    before = stored(client)
    process = fork(die_between_write_and_publish, name)
    process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL
    client.seal_partition(name)  # its end waits for samples under way, so it comes when those were given back
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S)
    assert until(lambda: stored(client) == before)
    assert client.get_stats()["partitions"][name]["held"] == 0


def test_the_end_of_a_sealed_partition_waits_for_puts_under_way(client, name):
    with written(client, name, "a") as publish:
        client.seal_partition(name)
        with pytest.raises(tq.BatchTimeoutError):
            client.get_meta(["a"], 3, name, task_name="t", timeout_s=0)
        answered(client, publish, p.Published)
    meta = client.get_meta(["a"], 3, name, task_name="t", timeout_s=WAIT_S)
    assert client.get_data(meta)["a"].tolist() == [0, 1, 2]
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["a"], 3, name, task_name="t", timeout_s=WAIT_S)


# ---- waiting ----


def put_when_waited_for(partition: str) -> None:
    client = tq.get_client()
    until_parked(client, partition=partition)
    client.put(rows(a=torch.tensor([7])), partition_id=partition)


def test_a_parked_fetch_is_answered_by_a_put_of_another_process(client, name, fork):
    putting = fork(put_when_waited_for, name)
    meta = client.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S)
    assert client.get_data(meta)["a"].tolist() == [7]
    joined(putting)


def test_a_parked_fetch_delays_nobody(client, name, fork):
    waiting = fork(take_one, name)
    until_parked(client, partition=name)
    begin = time.monotonic()
    for _ in range(50):
        client.put(rows(b=torch.zeros(1)), partition_id=f"{name}/other")
    assert time.monotonic() - begin < 2.0
    client.put(rows(a=torch.zeros(1)), partition_id=name)
    joined(waiting)


def take_one(partition: str) -> None:
    assert tq.get_client().get_meta(["a"], 1, partition, task_name="t", timeout_s=WAIT_S).size == 1


def test_a_fetch_ends_at_its_deadline_and_says_what_is_missing(client, name):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    client.put(rows(b=torch.arange(1)), metadata=meta[0])
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"3 samples of .*: 1 ready, 2 lack field 'b', last published 0 s ago"):
        client.get_meta(["a", "b"], 3, name, task_name="t", timeout_s=0.3)
    assert 0.25 < time.monotonic() - begin < 2.0


def test_clearing_a_partition_ends_the_fetches_that_wait_for_it(client, name, fork):
    client.put(rows(a=torch.arange(1)), partition_id=name)
    ended = fork(take_until_cleared, name)
    until_parked(client, partition=name)
    client.clear_partition(name)
    joined(ended)


def take_until_cleared(partition: str) -> None:
    with pytest.raises(tq.EndOfPartitionError, match="cleared"):
        tq.get_client().get_meta(["a"], 2, partition, task_name="t", timeout_s=WAIT_S)


# ---- producers that die ----
# Who produces a field is known over all partitions, so each of these tests has a field of its own.


def put_and_die(partition: str, field: str) -> None:
    tq.get_client().put(rows(**{field: torch.arange(2)}), partition_id=partition)
    os.kill(os.getpid(), signal.SIGKILL)


def test_when_all_producers_died_the_rest_is_delivered_and_then_an_error_comes(client, name, fork):
    fork(put_and_die, name, "lost").join(WAIT_S)
    assert client.get_meta(["lost"], 2, name, task_name="t", timeout_s=WAIT_S).size == 2
    with pytest.raises(tq.ProducersGoneError, match="all producers of 'lost' have died"):
        client.get_meta(["lost"], 1, name, task_name="t", timeout_s=WAIT_S)


def test_a_producer_that_lives_on_in_another_partition_may_still_come(client, name, fork):
    client.put(rows(elsewhere=torch.arange(1)), partition_id=f"{name}/other")
    fork(put_and_die, name, "elsewhere").join(WAIT_S)
    assert client.get_meta(["elsewhere"], 2, name, task_name="t", timeout_s=WAIT_S).size == 2
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["elsewhere"], 1, name, task_name="t", timeout_s=0.5)


def test_a_death_among_producers_that_live_on_is_nobodys_end(client, name, fork):
    client.put(rows(shared=torch.arange(1)), partition_id=name)
    fork(put_and_die, name, "shared").join(WAIT_S)
    assert client.get_meta(["shared"], 3, name, task_name="t", timeout_s=WAIT_S).size == 3
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["shared"], 1, name, task_name="t", timeout_s=0.5)


def test_a_consumer_killed_while_it_waits_takes_nothing(client, name, fork):
    waiting = fork(take_one, name)
    until_parked(client, partition=name)
    waiting.kill()
    waiting.join(WAIT_S)
    assert until(lambda: not client.get_stats()["waiting"])
    client.put(rows(a=torch.arange(1)), partition_id=name)
    assert client.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S).size == 1


# ---- declared size ----


def test_a_partition_of_declared_size_ends_by_itself(client, name):
    client.create_partition(name, num_samples=3)
    threads = [threading.Thread(target=produce, args=(name, n, 1)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert client.get_meta(["a"], 3, name, task_name="t", timeout_s=WAIT_S).size == 3
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="sealed after 3 samples"):
        client.put(rows(a=torch.arange(1)), partition_id=name)
