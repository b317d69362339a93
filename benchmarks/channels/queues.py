# SPDX-License-Identifier: Apache-2.0
"""What a user would write instead of a data queue: torch's queue between processes, and Ray's."""

# Ray is imported where it is used: it is installed in an environment of its own, and nothing else of this is.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing

from benchmarks.channels.batches import AHEAD, DEADLINE_S, Channel, produce

ROOT = Path(__file__).resolve().parents[2]
END_S = 10.0


@contextlib.contextmanager
def torch_queue(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    """Each tensor travels as a descriptor of shared memory; ``put`` returns before another thread has copied it."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue(AHEAD)
    line, other = context.Pipe()
    producer = context.Process(target=_put_to_torch, args=(queue, batches, threads, other))
    producer.start()
    other.close()
    try:
        yield Channel(iter(lambda: queue.get(timeout=DEADLINE_S), None), line.recv)
        line.send("end")
    finally:
        line.close()
        producer.join(END_S)
        producer.kill()
        producer.join()
        queue.close()


def _put_to_torch(queue: Any, batches: int, threads: int, line: Connection) -> None:
    line.send(produce(queue.put, batches, threads))
    with contextlib.suppress(EOFError):
        line.recv()  # the reader takes descriptors from this process until it has all


@contextlib.contextmanager
def ray_queue(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    import ray
    from ray.util.queue import Queue

    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, _temp_dir=folder,
    )  # fmt: skip
    try:
        queue = Queue(maxsize=AHEAD)
        times = ray.remote(_put_to_ray).remote(queue, batches, threads)
        yield Channel(iter(lambda: queue.get(timeout=DEADLINE_S), None), lambda: ray.get(times, timeout=DEADLINE_S))
    finally:
        ray.shutdown()


def _put_to_ray(queue: Any, batches: int, threads: int) -> list[float]:
    return produce(queue.put, batches, threads)
