# SPDX-License-Identifier: Apache-2.0
"""How long after a put returned does a waiting consumer in another process hold the batch? Prints one JSON line."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import arguments, end, received, report

WIDTH = 256  # one sample is 1 KiB
PAUSE_S = (0.002, 0.002)  # the consumer is back in its next() long before the next put


def consume(conf: Any, partition: str, workers: int, batch_size: int, line: Connection) -> None:
    """Tells when it was handed each batch; the monotonic clock is the same in all processes."""
    torch.set_num_threads(1)
    dataset = tq.StreamingDataset(conf, batch_size, batch_size, ["x"], partition, "train", 0)
    loader = tq.StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for data, _ in loader:
        at = time.monotonic()
        data["x"].values().sum()  # what was got is touched, so that a lazy get couldn't look fast
        line.send(at)


def latencies_ms(
    conf: Any, workers: int, batch_size: int, puts: int, pause_s: tuple[float, float] = PAUSE_S
) -> list[float]:
    """Sorted; below zero where the consumer had the batch before the put returned.

    Each put comes a random pause after the last batch was taken; a consumer that polls is met at any time of its sleep
    when the pause spans it.
    """
    context, partition = multiprocessing.get_context("spawn"), f"latency-{workers}"
    line, other = context.Pipe(duplex=False)
    data = TensorDict({"x": torch.zeros(batch_size, WIDTH)}, batch_size=[batch_size])
    client, pauses, found = tq.get_client(), random.Random(0), []
    client.put(data, partition_id=partition)
    consumer = context.Process(target=consume, args=(conf, partition, workers, batch_size, other))
    consumer.start()
    other.close()
    try:
        received(line)
        for _ in range(puts):
            time.sleep(pauses.uniform(*pause_s))
            client.put(data, partition_id=partition)
            returned = time.monotonic()
            found.append((received(line) - returned) * 1e3)
        end_stream(client, partition, consumer)
    finally:
        end(consumer)
        line.close()
    client.clear_partition(partition)
    return sorted(found[puts // 10 :])


def end_stream(client: Any, partition: str, consumer: Any) -> None:
    """Where partitions can be sealed the loop over the loader ends by itself; elsewhere it never would."""
    if hasattr(client, "seal_partition"):
        client.seal_partition(partition)
    else:
        consumer.terminate()


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--puts", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1)
    args = parser.parse_args(argv)
    puts, all_workers = (20, (0,)) if args.quick else (args.puts, (0, 2))
    conf = tq.init()
    figures = {}
    for workers in all_workers:
        found = latencies_ms(conf, workers, args.batch_size, puts)
        figures[f"workers_{workers}"] = {"p50_ms": statistics.median(found), "p99_ms": found[len(found) * 99 // 100]}
    report("put returned until batch yielded", puts=puts, batch_size=args.batch_size, **figures)
    tq.close()


if __name__ == "__main__":
    main()
