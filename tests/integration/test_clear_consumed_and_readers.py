# SPDX-License-Identifier: Apache-2.0
"""``clear_consumed`` never deletes values between a reader's get_meta and its get_data."""

from __future__ import annotations

import os
import signal
import threading
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


@pytest.mark.parametrize("tasks", [["one"], ["one", "two"]], ids=["a task", "two tasks"])
@pytest.mark.parametrize("processes", ["one", "each"])
def test_what_an_anonymous_reader_was_given_stays_until_it_has_read_it(start, fork, name, tasks, processes):
    import multiprocessing

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


def test_a_batch_that_was_given_and_not_read_stays_however_often_one_clears(queue, name):
    conf = queue
    client, reader = tq.get_client(), client_of(conf, "reads")
    client.put({"x": torch.arange(4)}, partition_id=name)
    meta = reader.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S)
    for _ in range(20):
        client.clear_consumed(name)
    assert reader.get_data(meta)["x"].tolist() == [0, 1]
    reader.get_partition_list()
    assert comes_true(lambda: client.clear_consumed(name) == 2 or left(client, name) == 2)
    reader.close()


def take_and_die(conf: Any, partition: str) -> None:
    client = client_of(conf, "dies")
    client.get_meta(["x"], 2, partition, task_name="t", timeout_s=SERVED_S)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_reader_had_not_read_is_given_out_again(queue, name, fork):
    client = tq.get_client()
    client.put({"x": torch.arange(2)}, partition_id=name)
    fork(take_and_die, queue, name).join(NOTICE_S)
    assert client.clear_consumed(name) == 0
    meta = client.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S)
    assert client.get_data(meta)["x"].tolist() == [0, 1]
