# SPDX-License-Identifier: Apache-2.0
"""How many samples per second does a loader stream, each once, and does its memory grow? Prints one JSON line."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

import psutil
import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import memcpy_ms, report

SIZE, WIDTH = 32, 14336  # 32 samples of 56 KiB: 1.75 MiB
EARLY = 20


def produce(partition: str, batches: int) -> None:
    torch.set_num_threads(1)
    client = tq.get_client()
    data = TensorDict({"x": torch.ones(SIZE, WIDTH)}, batch_size=[SIZE])
    for _ in range(batches):
        client.put(data, partition_id=partition)
    client.seal_partition(partition)
    tq.close()


def resident_mib() -> float:
    """This process and its loader's workers; servers and producer hold the samples and aren't the loader's."""
    me = psutil.Process()
    workers = [child for child in me.children() if child.name() == me.name() and child.cmdline() == me.cmdline()]
    return sum(process.memory_info().rss for process in [me, *workers]) / 2**20


def stream(conf: Any, partition: str, workers: int, batches: int) -> dict[str, Any]:
    """Reads all, touches all, clears behind itself; the time starts with the first batch."""
    dataset = tq.StreamingDataset(conf, SIZE, SIZE, ["x"], partition, "train", 0, layout="dense")
    loader = tq.StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    seen: list[int] = []
    client, early, started = tq.get_client(), 0.0, 0.0
    for number, (data, meta) in enumerate(loader):
        started = started or time.perf_counter()
        assert int(data["x"].sum()) == SIZE * WIDTH
        seen += meta.global_indexes
        client.clear_samples(meta)
        if number == EARLY:
            early = resident_mib()
        if number == batches - 2:
            growth = resident_mib() - early
    elapsed = time.perf_counter() - started
    return {
        "samples_per_s": (len(seen) - SIZE) / elapsed,
        "unique_samples_per_s": (len(set(seen)) - SIZE) / elapsed,
        "in_order": seen == sorted(seen),
        "unique": len(set(seen)),
        "growth_mib": growth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    conf = tq.init()
    figures = {}
    for workers in (0, 2):
        partition = f"p{workers}"
        producer = multiprocessing.get_context("spawn").Process(target=produce, args=(partition, args.batches))
        producer.start()
        producer.join()  # the loader is measured, not who feeds it
        figures[f"workers_{workers}"] = stream(conf, partition, workers, args.batches)
    report("streaming loader", batches=args.batches, batch_mib=1.75, memcpy_ms=memcpy_ms(SIZE * WIDTH * 4), **figures)
    tq.close()


if __name__ == "__main__":
    main()
