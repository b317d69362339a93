# SPDX-License-Identifier: Apache-2.0
"""How long after a put returned does a waiting consumer in another process hold the batch? Prints one JSON line."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import report

WIDTH = 256  # one sample is 1 KiB
PAUSE_S = 0.002  # the consumer is back in its next() long before the next put


def consume(conf: Any, workers: int, batch_size: int, line: Connection) -> None:
    """Tells when it was handed each batch; the monotonic clock is the same in all processes."""
    torch.set_num_threads(1)
    dataset = tq.StreamingDataset(conf, batch_size, batch_size, ["x"], f"p{workers}", "train", 0, layout="dense")
    loader = tq.StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    line.send(None)
    for data, _ in loader:
        at = time.monotonic()
        data["x"].sum()  # what was got is touched, so that a lazy get couldn't look fast
        line.send(at)


def latencies_ms(conf: Any, workers: int, batch_size: int, puts: int) -> list[float]:
    """Sorted; below zero where the consumer had the batch before the put returned."""
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    consumer = context.Process(target=consume, args=(conf, workers, batch_size, other))
    consumer.start()
    line.recv()
    data = TensorDict({"x": torch.zeros(batch_size, WIDTH)}, batch_size=[batch_size])
    client, found = tq.get_client(), []
    for _ in range(puts):
        time.sleep(PAUSE_S)
        client.put(data, partition_id=f"p{workers}")
        returned = time.monotonic()
        found.append((line.recv() - returned) * 1e3)
    client.seal_partition(f"p{workers}")
    consumer.join()
    return sorted(found[puts // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--puts", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1)
    args = parser.parse_args()
    conf = tq.init()
    figures = {}
    for workers in (0, 2):
        found = latencies_ms(conf, workers, args.batch_size, args.puts)
        figures[f"workers_{workers}"] = {"p50_ms": statistics.median(found), "p99_ms": found[len(found) * 99 // 100]}
    report("put returned until batch yielded", puts=args.puts, batch_size=args.batch_size, **figures)
    tq.close()


if __name__ == "__main__":
    main()
