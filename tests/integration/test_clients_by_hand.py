# SPDX-License-Identifier: Apache-2.0
"""Clients made by hand, and names from before: whoever knows where the units are finds every sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.calls import fetch_of


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count * 2).view(count, 2)}, batch_size=[count])


def by_hand(queue: Any, **storage: Any) -> tq.TransferQueueClient:
    client = tq.TransferQueueClient("by hand", queue.controller.zmq_info)
    client.initialize_storage_manager("SimpleStorage", storage)
    return client


@pytest.mark.parametrize("processes", ["one", "each"])
@pytest.mark.parametrize("capacity", [None, 1 << 30])
def test_a_client_that_knows_only_where_the_units_are_finds_every_sample(start, processes, capacity):
    conf = start({"server_processes": processes, "backend": {"SimpleStorage": {"capacity_bytes": capacity}}})
    other = by_hand(conf, zmq_info=conf.backend.SimpleStorage.zmq_info)
    try:
        written = other.put(rows(3000), partition_id="p")
        assert tq.get_client().get_data(written)["x"].values().tolist() == list(range(6000))
        batch = other.fetch_batch(fetch_of(["x"], 3000, "p", "t"))
        assert other.take(batch)["x"].values().tolist() == list(range(6000))
    finally:
        other.close()


def test_the_storage_has_its_older_name_too(start):
    start({"backend": {"storage_backend": "AsyncSimpleStorageManager"}})
    meta = tq.get_client().put(rows(2), partition_id="p")
    assert tq.get_client().get_data(meta)["x"].values().tolist() == list(range(4))
