# SPDX-License-Identifier: Apache-2.0
"""What the streaming tests put into a queue, and how they read it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from tests.own_processes import SLOW, own_processes
from transfer_queue import StreamingDataLoader, StreamingDataset

# The first spawned process starts it for good; started here, it isn't taken for a leak.
resource_tracker.ensure_running()

WAIT_S = 20.0 * SLOW
TASK = "train"


def rows(first: int, count: int, **columns: Any) -> TensorDict:
    """Samples that tell their number in "x"; and a ragged "y" of as many elements as the last digit plus one."""
    numbers = torch.arange(first, first + count)
    ragged = [torch.full((1 + number % 10,), number) for number in numbers.tolist()]
    return TensorDict(
        {
            "x": numbers.repeat_interleave(3).reshape(count, 3),
            "y": torch.nested.nested_tensor(ragged, layout=torch.jagged),
            **columns,
        },
        batch_size=[count],
    )


def produce(client: Any, partition: str, sizes: Iterable[int], seal: bool = True, first: int = 0) -> None:
    """Puts of these sizes, numbered on; ``seal``: no more will come."""
    for size in sizes:
        client.put(rows(first, size), partition_id=partition)
        first += size
    if seal:
        client.seal_partition(partition)


def dataset(
    conf: Any, partition: str, batch_size: int = 4, micro: int | None = None, rank: int = 0, **options: Any
) -> StreamingDataset:
    fields = options.pop("fields", ["x", "y"])
    task = options.pop("task", TASK)
    return StreamingDataset(conf, batch_size, micro or batch_size, fields, partition, task, rank, **options)


def loader(conf: Any, partition: str, workers: int = 0, method: str | None = None, **options: Any) -> Any:
    """A loader over ``dataset(...)``; options of either."""
    own = ("persistent_workers", "prefetch_factor", "num_batches", "collate_fn", "pin_memory")
    of_loader = {name: options.pop(name) for name in own if name in options}
    context = method or ("fork" if workers else None)
    made = dataset(conf, partition, **options)
    return StreamingDataLoader(made, num_workers=workers, multiprocessing_context=context, **of_loader)


def numbers(item: Any) -> list[int]:
    """The samples of an item; values and metadata must tell the same story."""
    data, meta = item
    told = data["x"]
    told = [int(row[0]) for row in (told.unbind() if told.is_nested else told)]
    if "y" in data.keys():  # noqa: SIM118  (iterating gives rows)
        assert [row.tolist() for row in data["y"].unbind()] == [[number] * (1 + number % 10) for number in told]
    first = meta.global_indexes[0] - told[0]
    assert meta.global_indexes == [first + number for number in told]
    return told


def read(items: Iterable[Any]) -> list[list[int]]:
    return [numbers(item) for item in items]


def take(items: Iterator[Any], count: int) -> list[list[int]]:
    return [numbers(next(items)) for _ in range(count)]


def cut(count: int, *sizes: int, first: int = 0) -> list[list[int]]:
    """``count`` numbers in batches of sizes[0], each of those in pieces of sizes[1], …"""
    whole = [list(range(first, first + count))]
    for size in sizes:
        whole = [part[start : start + size] for part in whole for start in range(0, len(part), size)]
    return whole


class InThread(threading.Thread):
    """Runs a function; ``result`` waits for what it returned or raises what it raised."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self._call = (function, args)
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        function, args = self._call
        try:
            self._outcome = function(*args)
        except BaseException as error:
            self._error = error
        self.ended_at = time.monotonic()

    def result(self) -> Any:
        self.join(WAIT_S)
        assert not self.is_alive(), "still running"
        if self._error is not None:
            raise self._error
        return self._outcome


def workers_now() -> list[psutil.Process]:
    """Children of this process that run and aren't the queue's servers."""
    return [child for child in own_processes() if "transfer_queue.server" not in " ".join(child.cmdline())]


def worker_pids() -> set[int]:
    return {worker.pid for worker in workers_now()}


def rss_mib() -> float:
    """This process and its workers, without the storage memory that they have mapped: that is the unit's to hold."""
    parts: list[Any] = []
    for process in [psutil.Process(), *workers_now()]:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            parts += process.memory_maps()
    return sum(part.rss for part in parts if not part.path.startswith("/memfd:transfer-queue-arena")) / 2**20


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-queue")]
