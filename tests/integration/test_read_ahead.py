# SPDX-License-Identifier: Apache-2.0
"""Values that travel beside their metadata: a read finds what is stored when it reads, as any other read does."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transfer_queue.verbs.read_ahead import FetchedBatch

import transfer_queue as tq
from tests.integration.frames import Frames

WAIT_S = 30.0


@pytest.fixture(scope="module")
def other(queue: Any) -> Iterator[tq.TransferQueueClient]:
    """Another client, as another process would have it."""
    client = tq.TransferQueueClient("other", queue.controller.zmq_info)
    client.initialize_storage_manager("SimpleStorage", queue.backend.SimpleStorage)
    yield client
    client.close()


def column(values: list[int], name: str = "x") -> TensorDict:
    return TensorDict({name: torch.tensor(values)}, batch_size=[len(values)])


def read(client: tq.TransferQueueClient, meta: tq.BatchMeta, name: str = "x") -> list[int]:
    return client.get_data(meta)[name].tolist()


def fetched(client: tq.TransferQueueClient, name: str, values: list[int], task: str = "t") -> tq.BatchMeta:
    """The metadata of what was just put, by a client that reads what it fetches."""
    client.put(column(values), partition_id=name)
    return client.get_meta(["x"], len(values), name, task_name=task)


@pytest.fixture
def reading(client: tq.TransferQueueClient, name: str) -> tq.TransferQueueClient:
    """A client that reads what it fetches."""
    assert read(client, fetched(client, f"{name} before", [1, 2])) == [1, 2]
    return client


def test_a_client_asks_for_values_as_long_as_it_reads_what_it_fetches(reading, name, monkeypatch):
    reading.put(column(list(range(8))), partition_id=name)
    frames = Frames(reading, monkeypatch)
    first, second, third = (reading.get_meta(["x"], 1, name, task_name="t") for _ in range(3))
    assert frames.sent == [1, 0, 0]  # the first one is not read before the second is fetched
    assert read(reading, third) == [2]
    assert frames.sent == [1, 0, 0, 0]
    fourth = reading.get_meta(["x"], 1, name, task_name="t")
    assert (frames.sent, read(reading, fourth)) == ([1, 0, 0, 0, 1], [3])
    assert frames.sent == [1, 0, 0, 0, 1]
    assert [read(reading, meta) for meta in (first, second, third, fourth)] == [[0], [1], [2], [3]]


def test_large_values_of_the_same_field_don_t_keep_small_ones_from_travelling_with_their_metadata(
    reading, name, monkeypatch
):
    reading.put(TensorDict({"x": torch.zeros(4, 1 << 18)}, batch_size=[4]), partition_id=f"{name} large")
    reading.put(column([1, 2]), partition_id=name)
    frames = Frames(reading, monkeypatch)
    assert read(reading, reading.get_meta(["x"], 2, name, task_name="t")) == [1, 2]
    assert frames.sent == [1]
    large = reading.get_data(reading.get_meta(["x"], 4, f"{name} large", task_name="t"))
    assert (len(large), frames.sent) == (4, [1, 1, 0])


def test_large_values_between_small_ones_stay_where_they_are_until_they_are_read(reading, name, monkeypatch):
    sizes = [2, 1 << 18, 1 << 18, 2]
    for size in sizes:
        reading.put(TensorDict({"x": torch.full((1, size), size)}, batch_size=[1]), partition_id=name)
    frames = Frames(reading, monkeypatch)
    meta = reading.get_meta(["x"], 4, name, task_name="t")
    assert (frames.sent, frames.came_nbytes < 1 << 16) == ([1], True)
    assert [(len(row), set(row.tolist())) for row in reading.get_data(meta)["x"].unbind()] == [(n, {n}) for n in sizes]


def test_who_only_asks_for_metadata_has_nothing_to_do_with_the_units(queue, client, name, monkeypatch):
    client.put(column([1, 2, 3]), partition_id=name)
    newcomer = tq.TransferQueueClient("newcomer", queue.controller.zmq_info)
    newcomer.initialize_storage_manager("SimpleStorage", queue.backend.SimpleStorage)
    before = [unit["attached"] for unit in client.get_storage_stats()]
    first = newcomer.get_meta(["x"], 1, name, task_name="t")
    assert [unit["attached"] for unit in client.get_storage_stats()] == before
    assert read(newcomer, first) == [1]
    frames = Frames(newcomer, monkeypatch)
    assert read(newcomer, newcomer.get_meta(["x"], 1, name, task_name="t")) == [2]
    assert frames.sent == [1]
    newcomer.close()


def test_the_client_keeps_metadata_only_while_it_keeps_its_values(reading, name):
    def kept(meta: tq.BatchMeta) -> bool:
        return any(isinstance(holder, FetchedBatch) for holder in gc.get_referrers(meta))

    reading.put(column(list(range(40_000))), partition_id=name)
    small = reading.get_meta(["x"], 2, name, task_name="t")
    assert (kept(small), read(reading, small), kept(small)) == (True, [0, 1], False)
    large = reading.get_meta(["x"], 30_000, name, task_name="t")
    assert (kept(large), len(read(reading, large))) == (False, 30_000)


def test_what_was_replaced_after_the_fetch_is_read_as_it_is_now(reading, other, name):
    for writer, new in ((reading, [7, 8]), (other, [9, 10])):
        meta = fetched(reading, name, [1, 2])
        writer.put(column(new), metadata=meta)
        assert read(reading, meta) == new


def test_what_was_cleared_after_the_fetch_is_gone(reading, other, name):
    for clearing in (reading, other):
        meta = fetched(reading, name, [1, 2])
        clearing.clear_samples(meta[1])
        with pytest.raises(KeyError, match="no value of field 'x' for sample"):
            reading.get_data(meta)


def test_each_read_has_memory_of_its_own(reading, name):
    meta = fetched(reading, name, [1, 2])
    data = reading.get_data(meta)["x"]
    data += 5
    assert (read(reading, meta), read(reading, meta)) == ([1, 2], [1, 2])


def test_views_and_copies_are_the_same(reading, name):
    meta = fetched(reading, name, [1, 2])
    assert reading.get_data(meta, copy=False)["x"].tolist() == [1, 2]
    assert read(reading, meta) == [1, 2]


def test_metadata_that_was_changed_says_what_is_read(reading, other, name):
    meta = fetched(reading, name, [1, 2, 3])
    meta.reorder([2, 0, 1])
    assert read(reading, meta) == [3, 1, 2]
    meta = fetched(reading, name, [4, 5])
    meta.global_indexes.reverse()
    assert read(reading, meta) == [5, 4]
    meta = fetched(reading, name, [10, 11])
    meta.global_indexes = np.array(meta.global_indexes)
    assert read(reading, meta) == [10, 11]
    meta = fetched(reading, name, [6, 7])
    meta.add_fields(column([60, 70], "y"))
    other.put(column([60, 70], "y"), metadata=meta)
    assert (read(reading, meta), read(reading, meta, "y")) == ([6, 7], [60, 70])
    meta = fetched(reading, name, [8, 9])
    assert (read(reading, meta.select_samples([1])), read(reading, meta)) == ([9], [8, 9])


def test_rows_that_only_fill_the_batch_are_read_too(reading, name):
    reading.register_task("padding", tail="pad")
    reading.put(column([1, 2, 3]), partition_id=name)
    reading.seal_partition(name)
    meta = reading.get_meta(["x"], 4, name, task_name="padding")
    assert (meta.padding_mask, read(reading, meta)[:3]) == ([False, False, False, True], [1, 2, 3])


def test_threads_of_one_client_read_their_own(reading, name):
    """Each fetches and reads; what one fetched last may be what another one has just read."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        for value in range(50):
            found = read(reading, fetched(reading, f"{name} {number}", [100 * number + value]))
            if found != [100 * number + value]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (wrong, [thread for thread in threads if thread.is_alive()]) == ([], [])


def read_in_a_fork(client: tq.TransferQueueClient, meta: tq.BatchMeta, found: Any) -> None:
    found.send(read(client, meta))


def test_a_fork_reads_what_its_parent_fetched(reading, name, fork):
    meta = fetched(reading, name, [1, 2])
    reading.put(column([3, 4]), metadata=meta)
    ours, theirs = multiprocessing.Pipe()
    fork(read_in_a_fork, reading, meta, theirs)
    assert ours.poll(WAIT_S)
    assert ours.recv() == [3, 4]
    assert read(reading, meta) == [3, 4]


STEP = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 4)),
    st.tuples(st.just("fetch"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["read", "replace", "clear"]), st.integers(0, 50)),
)
_partitions = (f"random {number}" for number in range(1 << 30))


@given(st.lists(STEP, min_size=5, max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_read_finds_what_was_written_last(client, other, steps):
    """One client fetches and reads, old metadata or the newest; another one replaces and clears meanwhile."""
    partition, metas, now, written = next(_partitions), [], dict[int, int](), 0
    for what, number in steps:
        if what == "put":
            values = list(range(written, written + number))
            written += number
            now.update(zip(other.put(column(values), partition_id=partition).global_indexes, values, strict=True))
        elif what == "fetch":
            with contextlib.suppress(tq.BatchTimeoutError):
                metas.append(client.get_meta(["x"], number, partition, task_name="t", timeout_s=0))
        elif metas:
            meta = metas[max(0, len(metas) - 1 - number // 8)]
            live = [position for position, index in enumerate(meta.global_indexes) if index in now]
            if what == "read" and len(live) < meta.size:
                with pytest.raises(KeyError):
                    client.get_data(meta)
            elif what == "read":
                assert read(client, meta) == [now[index] for index in meta.global_indexes]
            elif live:
                one = meta[live[number % len(live)]]
                index = one.global_indexes[0]
                if what == "clear":
                    other.clear_samples(one)
                    del now[index]
                else:
                    other.put(column([written]), metadata=one)
                    now[index], written = written, written + 1
    client.clear_partition(partition)
