# SPDX-License-Identifier: Apache-2.0
"""A batch that was fetched and not read yet keeps its samples; reading it, or dropping its metadata, frees them."""

from __future__ import annotations

import torch

import transfer_queue as tq
from tests.integration.faults import SERVED_S, client_of


def test_a_reader_may_fetch_the_next_batch_before_it_reads_the_one_before(queue, name):
    client, reader = tq.get_client(), client_of(queue, "reads")
    client.put({"x": torch.arange(4)}, partition_id=name)
    metas = [reader.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S) for _ in range(2)]
    client.clear_consumed(name)
    assert [reader.get_data(meta)["x"].tolist() for meta in metas] == [[0, 1], [2, 3]]
    reader.get_partition_list()  # says what has been read
    assert client.clear_consumed(name) == 4
    reader.close()


def test_metadata_that_is_dropped_unread_keeps_no_samples(queue, name):
    client, reader = tq.get_client(), client_of(queue, "drops")
    client.put({"x": torch.arange(2)}, partition_id=name)
    reader.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S)
    reader.get_partition_list()
    assert client.clear_consumed(name) == 2
    reader.close()


def test_what_a_client_fetched_stays_fetched_when_it_leaves_with_a_goodbye(queue, name):
    client, reader = tq.get_client(), client_of(queue, "leaves")
    client.put({"x": torch.arange(2)}, partition_id=name)
    meta = reader.get_meta(["x"], 2, name, task_name="t", timeout_s=SERVED_S)
    reader.close()
    assert client.get_consumption_status("t", name)[1].tolist() == [1, 1]
    assert client.get_data(meta)["x"].tolist() == [0, 1]
