# SPDX-License-Identifier: Apache-2.0
"""``clear_consumed`` all the time: it never deletes values between a reader's get_meta and its get_data."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.faults import NOTICE_S, SERVED_S, client_of, comes_true

CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
ROWS, BATCH, READERS = 1200, 3, 3


def read_all(conf: Any, partition: str, task: str, results: Any) -> None:
    """Read until the end, each batch in two steps. Reports what it read, or what went wrong."""
    client, found = client_of(conf, "reader"), list[int]()
    try:
        while True:
            meta = client.get_meta(["x"], BATCH, partition, task_name=task, timeout_s=SERVED_S)
            found += client.get_data(meta)["x"].tolist()
    except tq.EndOfPartitionError:
        results.put(found)
    except tq.TransferQueueError as error:
        results.put(repr(error))
    client.close()


@pytest.mark.programs
@pytest.mark.parametrize("tasks", [["one"], ["one", "two"]], ids=["a task", "two tasks"])
@pytest.mark.parametrize("processes", ["one", "each"])
def test_what_an_anonymous_reader_was_given_stays_until_it_has_read_it(start, fork, name, tasks, processes):
    conf = start({**CONF, "server_processes": processes})
    client, results = tq.get_client(), multiprocessing.get_context("fork").SimpleQueue()
    readers = [fork(read_all, conf, name, tasks[n % len(tasks)], results) for n in range(READERS)]
    over = threading.Event()
    cleared = list[int]()

    def clear() -> None:
        own = client_of(conf, "clears")
        while not over.is_set():
            cleared.append(own.clear_consumed(name, tasks))
        own.close()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for at in range(0, ROWS, BATCH):
            client.put({"x": torch.arange(at, at + BATCH)}, partition_id=name)
        client.seal_partition(name)
        found = [results.get() for _ in readers]
    finally:
        over.set()
        thread.join()
    assert not [each for each in found if isinstance(each, str)]
    assert sorted(value for each in found for value in each) == sorted(list(range(ROWS)) * len(tasks))
    assert sum(cleared) > 0, "it was cleared while they read"
    assert comes_true(lambda: client.clear_consumed(name, tasks) >= 0 and left(client, name) == 0), NOTICE_S
    results.close()


def left(client: tq.TransferQueueClient, partition: str) -> int:
    return int(client.get_stats()["partitions"].get(partition, {"samples": 0})["samples"])


def read_in_threads(client: tq.TransferQueueClient, partition: str, act: Callable[[tq.BatchMeta], Any]) -> list[Any]:
    """Threads of one client fetch at the same time; what ``act`` returned for each batch, or what went wrong."""
    found = list[Any]()

    def read() -> None:
        try:
            while True:
                found.append(act(client.get_meta(["x"], BATCH, partition, task_name="t", timeout_s=SERVED_S)))
        except tq.EndOfPartitionError:
            pass
        except tq.TransferQueueError as error:
            found.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def cleared_all_the_time(client: tq.TransferQueueClient, partition: str) -> Iterator[list[int]]:
    """Inside, a thread clears what is consumed again and again. Yields how many samples each time."""
    over, counts = threading.Event(), list[int]()

    def clear() -> None:
        while not over.is_set():
            counts.append(client.clear_consumed(partition))

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


@pytest.mark.programs
@pytest.mark.parametrize("own_clear", [True, False], ids=["the client itself", "another client"])
@pytest.mark.parametrize("processes", ["one", "each"])
def test_threads_of_one_client_read_what_they_were_given_although_it_is_cleared_all_the_time(
    start, name, processes, own_clear
):
    """Each thread's next message confirms the receipt of what the other one has yet to read."""
    conf = start({**CONF, "server_processes": processes})
    client, other = tq.get_client(), client_of(conf, "clears")
    client.put({"x": torch.arange(ROWS)}, partition_id=name)
    client.seal_partition(name)
    with cleared_all_the_time(client if own_clear else other, name) as cleared:
        found = read_in_threads(client, name, lambda meta: client.get_data(meta)["x"].tolist())
    assert not [each for each in found if isinstance(each, Exception)]
    assert sorted(value for each in found for value in each) == list(range(ROWS))
    assert sum(cleared) > 0, "it was cleared while they read"
    client.get_partition_list()
    assert (other.clear_consumed(name) >= 0, left(client, name)) == (True, 0)
    other.close()


def test_what_a_client_fetches_and_never_reads_is_cleared_once_it_has_no_metadata_of_it(start, name):
    start(CONF)
    client = tq.get_client()
    client.put({"x": torch.arange(ROWS)}, partition_id=name)
    client.seal_partition(name)
    with cleared_all_the_time(client, name) as cleared:
        assert len(read_in_threads(client, name, lambda meta: meta.size)) == ROWS // BATCH
    assert (sum(cleared) + client.clear_consumed(name), left(client, name)) == (ROWS, 0)
