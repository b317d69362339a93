# SPDX-License-Identifier: Apache-2.0
"""A stream whose server stands still for longer than its deadline: its user goes on, and no sample is gone or twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.faults import SLOW, server_pids, stopped

DEADLINE_S = 0.6 * SLOW
CONF = {"client": {"timeout_s": DEADLINE_S}, "backend": {"SimpleStorage": {"put_timeout_s": 0.3 * SLOW}}}
ROWS, BATCH = 60, 3


def stream(conf: Any, partition: str) -> tq.StreamingDataset:
    return tq.StreamingDataset(conf, BATCH, BATCH, ["x"], partition, "t", 0)


@pytest.mark.programs
@pytest.mark.parametrize("width", [1, 100_000], ids=["small", "large"])
def test_a_stream_goes_on_after_a_server_that_stood_still_for_longer_than_its_deadline(client, queue, name, width):
    for at in range(0, ROWS, BATCH):
        client.put({"x": torch.arange(at, at + BATCH).reshape(-1, 1).expand(-1, width).clone()}, partition_id=name)
    client.seal_partition(name)
    (pid,), found, times = server_pids(queue), list[int](), 0
    dataset = stream(queue, name)
    while len(found) < ROWS and times < 20:
        batches = iter(dataset)
        try:
            for batch, _ in batches:
                found += batch["x"].values().reshape(-1, width)[:, 0].tolist()
                if len(found) % 15 == 0 and times < 2:
                    times += 1
                    with stopped(pid):
                        threading.Event().wait(2 * DEADLINE_S)
        except tq.QueueUnreachableError:
            times += 1
        finally:
            batches.close()
    assert sorted(found) == list(range(ROWS))
