# SPDX-License-Identifier: Apache-2.0
"""A program that joins the queue of its environment, evaluates the lines it is given, and prints the results."""

from __future__ import annotations

import sys
from typing import Any

import torch

import transfer_queue as tq


def put(partition: str, count: int, start: int = 0, field: str = "x", metadata: Any = None) -> list[int]:
    """Rows of 64 KiB that are told apart by their number."""
    rows = torch.arange(start, start + count).view(count, 1).expand(count, 8192).contiguous()
    meta = client.put({field: rows}, metadata, None if metadata is not None else partition)
    return list(meta.global_indexes)


def get(partition: str, count: int, task: str = "t", field: str = "x", timeout_s: float = 60.0) -> list[int]:
    """The numbers of the next rows."""
    meta = client.get_meta([field], count, partition, task_name=task, timeout_s=timeout_s)
    values = torch.stack(list(client.get_data(meta)[field].unbind()))
    assert (values == values[:, :1]).all(), "a row came back mixed"
    return sorted(values[:, 0].tolist())


def units() -> dict[str, tuple[int, str]]:
    """By unit: the samples that it holds, and the way of this program's values there."""
    return {unit["unit"]: (unit["samples"], unit["path"]) for unit in client.get_storage_stats()}


def stream(partition: str, batch_size: int) -> list[int]:
    """The numbers of the rows of the stream's next batch."""
    if partition not in streams:
        dataset = tq.StreamingDataset(conf, batch_size, batch_size, ["x"], partition, "stream", 0)
        streams[partition] = iter(dataset)
    data, _ = next(streams[partition])
    return [int(row[0]) for row in data["x"].unbind()]


streams: dict[str, Any] = {}
conf = tq.init()
client = tq.get_client()
print("joined", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(repr((type(error).__name__, str(error))), flush=True)
