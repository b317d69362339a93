# SPDX-License-Identifier: Apache-2.0
"""A server that gets no more memory from the system refuses what it can't take, loses nothing, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import transfer_queue as tq
from tests.chaos.stage import limit_memory
from transfer_queue.errors import QueueUnreachableError, UnitLostError

MANY = 4_000_000


@pytest.fixture(params=["one", "each"])
def pids(request: pytest.FixtureRequest) -> Iterator[set[int]]:
    storage = {"num_data_storage_units": 2, "arena": False}
    running: Any = tq.init({"backend": {"SimpleStorage": storage}, "server_processes": request.param})
    servers = [running.controller.zmq_info, *running.backend.SimpleStorage.zmq_info.values()]
    yield {int(server.pid) for server in servers}
    tq.close()


def test_a_put_for_which_a_server_has_no_memory_is_not_there_and_others_are(pids, name):
    client = tq.get_client()
    meta = client.put({"x": torch.arange(4)}, partition_id=name)
    for pid in pids:
        limit_memory(pid, psutil.Process(pid).memory_info().vms)
    refused = 0
    for _ in range(4):  # memory that was freed before may still do for one
        try:
            client.put({"x": torch.ones(1, MANY, dtype=torch.int64)}, partition_id=name)
        except (QueueUnreachableError, UnitLostError):
            refused += 1
    assert refused
    for pid in pids:
        limit_memory(pid, None)
    assert client.get_stats()["partitions"][name]["samples"] == 8 - refused
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
    client.put({"x": torch.ones(1, MANY, dtype=torch.int64)}, partition_id=name)
    client.clear_partition(name)
    assert sum(unit["values"] for unit in client.get_storage_stats()) == 0
