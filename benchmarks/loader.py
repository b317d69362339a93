# SPDX-License-Identifier: Apache-2.0
"""How many samples per second does a loader stream, each once, and does its memory grow? Prints one JSON line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

import transfer_queue as tq
from benchmarks import cases
from benchmarks.common import arguments, in_fresh_process, joined_client, memcpy, report, timed_ms

SIZE = 32
BATCH = cases.rl_batch(SIZE)  # five fields, 1.75 MiB
FIELDS = list(BATCH.keys())
EARLY, LATE = 20, 8  # batches from the start and from the end where memory is looked at
# A worker that has read all ends and can't be looked at. Two workers are asked for four batches ahead, fewer than LATE.
DEADLINE_S = 240.0
ARENA = "/memfd:transfer-queue-arena"


def produce(client: tq.TransferQueueClient, partition: str, batches: int) -> None:
    for _ in range(batches):
        client.put(BATCH, partition_id=partition)
    if hasattr(client, "seal_partition"):
        client.seal_partition(partition)


def held_mib() -> float:
    """Memory of this process and its loader's workers, without the storage's that they have mapped."""
    me = psutil.Process()
    # Forks share the command line; torch gives its workers another name.
    workers = [child for child in me.children() if child.cmdline() == me.cmdline()]
    return sum(_own_bytes(process) for process in [me, *workers]) / 2**20


def _own_bytes(process: psutil.Process) -> int:
    # A page of a storage unit's arena counts as resident once a reader has looked at it, but the stored samples are the
    # unit's to hold; torch's own shared memory, in which workers hand over batches, has other names.
    return sum(part.rss for part in process.memory_maps() if not part.path.startswith(ARENA))


def read(conf: Any, partition: str, workers: int, batches: int, clear: bool, add_up: bool) -> dict[str, Any]:
    """Reads until every sample came once, touches all; the time starts with the first batch.

    Args:
        clear: Forget each batch behind itself. Where workers hand out the same samples twice that can't be done.
        add_up: Every value, with all of torch's threads; else a byte of every page is looked at, with one.
    """
    look = cases.total if add_up else cases.touch
    if not add_up:
        torch.set_num_threads(1)
    dataset = tq.StreamingDataset(conf, SIZE, SIZE, FIELDS, partition, "train", 0)
    loader = tq.StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    client, seen, unique = joined_client(conf), [], set[int]()
    started, aside, sizes = 0.0, 0.0, list[float]()
    marks = [EARLY * SIZE, (batches - LATE) * SIZE]
    gives_up = time.monotonic() + DEADLINE_S / 2
    for data, meta in loader:
        started = started or time.perf_counter()
        look(data)
        seen += meta.global_indexes
        unique.update(meta.global_indexes)
        if clear:
            client.clear_samples(meta)
        if marks and len(unique) >= marks[0]:
            aside += timed_ms(lambda: sizes.append(held_mib())) / 1e3
            del marks[0]
        if len(unique) == batches * SIZE or time.monotonic() > gives_up:
            break
    elapsed = time.perf_counter() - started - aside
    client.close()
    return {
        "unique_samples_per_s": (len(unique) - SIZE) / elapsed,
        "missing": batches * SIZE - len(unique),
        "times_delivered": len(seen) / len(unique),
        "in_order": seen == sorted(seen),
        "growth_mib": sizes[-1] - sizes[0],
    }


def stream(conf: Any, workers: int, batches: int, clear: bool = True, add_up: bool = False) -> dict[str, Any]:
    """This process fills a partition, then a fresh one reads it: the producer is no part of its memory."""
    partition, client = f"loader-{workers}", tq.get_client()
    produce(client, partition, batches)
    found: dict[str, Any] = in_fresh_process(
        read, conf, partition, workers, batches, clear, add_up, deadline_s=DEADLINE_S
    )
    client.clear_partition(partition)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--sum", action="store_true", help="add up every value, with all of torch's threads")
    args = parser.parse_args(argv)
    batches, all_workers = (32, (2,)) if args.quick else (args.batches, (0, 2))
    conf = tq.init()
    figures = {f"workers_{workers}": stream(conf, workers, batches, add_up=args.sum) for workers in all_workers}
    copy_ms = memcpy(cases.nbytes(BATCH)).torch_ms
    for found in figures.values():
        found["batch_time_per_memcpy"] = SIZE / found["unique_samples_per_s"] * 1e3 / copy_ms
    report("streaming loader", batches=batches, batch_mib=1.75, memcpy_ms=copy_ms, **figures)
    tq.close()


if __name__ == "__main__":
    main()
