# SPDX-License-Identifier: Apache-2.0
"""A batch without ledger entry stays until its client has read it, or has no metadata of it any more."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from typing import Any

import torch

import transfer_queue as tq
from tests.integration.calls import fetch_of
from tests.integration.faults import NOTICE_S, SERVED_S, client_of

CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}


def test_a_batch_that_was_given_and_not_read_stays_however_often_one_clears(queue, name):
    client, reader = tq.get_client(), client_of(queue, "reads")
    client.put({"x": torch.arange(4)}, partition_id=name)
    meta = reader.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S)
    for _ in range(20):
        client.clear_consumed(name)
    assert reader.get_data(meta)["x"].tolist() == [0, 1]
    reader.get_partition_list()
    assert client.clear_consumed(name) == 2
    reader.close()


def test_what_another_process_reads_stays_as_long_as_the_client_that_fetched_it_has_its_metadata(queue, name, fork):
    client, results = tq.get_client(), multiprocessing.get_context("fork").SimpleQueue()
    client.put({"x": torch.arange(4)}, partition_id=name)
    meta, client_name = client.get_meta(["x"], 4, name, task_name="t"), client.get_stats()["asked_by"]
    assert (client.clear_consumed(name), client.held_up_by(name)["readers"]) == (0, {client_name: 4})
    reader = fork(read_pickled, queue, pickle.dumps(meta), results)
    assert results.get() == [0, 1, 2, 3]
    reader.join(NOTICE_S)
    assert client.clear_consumed(name) == 0
    del meta
    assert client.clear_consumed(name) == 4
    results.close()


def read_pickled(conf: Any, pickled: bytes, results: Any) -> None:
    client = client_of(conf, "reads")
    results.put(client.get_data(pickle.loads(pickled))["x"].tolist())
    client.close()


def test_parts_of_a_batch_are_read_one_by_one(queue, name):
    client, other = tq.get_client(), client_of(queue, "clears")
    client.put({"x": torch.arange(4), "y": torch.arange(4)}, partition_id=name)
    meta = client.get_meta(["x", "y"], 4, name, task_name="t")
    parts = meta.chunk(2)
    client.get_data(meta.select_fields(["x"]))
    for part, cleared in zip(parts, [0, 4], strict=True):
        assert client.get_data(part).batch_size[0] == 2
        client.get_partition_list()
        assert other.clear_consumed(name) == cleared
    other.close()


def test_what_was_fetched_with_its_values_or_by_a_rank_costs_no_word(queue, name):
    client = tq.get_client()
    client.put({"x": torch.arange(6)}, partition_id=name)
    named = client.get_meta(["x"], 2, name, task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0})
    ranked = client.get_meta(["x"], 2, name, task_name="t", sampling_config={"dp_rank": 0})
    whole = client.fetch_batch(fetch_of(["x"], 2, name, "t"))
    assert client.take(whole)["x"].tolist() == [4, 5]
    assert client.get_data(named)["x"].tolist() == [0, 1]
    del named, ranked, whole
    assert client.session.done_reading == set()
    assert client.clear_consumed(name) == 2


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
