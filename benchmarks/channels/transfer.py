# SPDX-License-Identifier: Apache-2.0
"""Through the data queue, ours or the peer's: as a loader reads it, or by plain calls that both packages have."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import Any

from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.channels.batches import AHEAD, DEADLINE_S, SIZE, Channel, Fields, produce, rl_batch
from benchmarks.common import end, joined_client, received

PARTITION, TASK = "live", "train"
Read = Callable[[Any, list[str]], Iterator[tuple[Any, Any]]]
"""read(configuration, fields): the (values, metadata) of each batch."""


@contextlib.contextmanager
def by_loader(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    with contextlib.closing(_Queue()) as queue:
        yield from queue.opened(_loaded, batches, threads, cleared)


@contextlib.contextmanager
def by_loader_dense(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    """Rows of equal length come as a plain tensor, as they do from the other channels."""
    with contextlib.closing(_Queue({"client": {"layout": "dense"}})) as queue:
        yield from queue.opened(_loaded, batches, threads, cleared)


@contextlib.contextmanager
def by_calls(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    with contextlib.closing(_Queue()) as queue:
        yield from queue.opened(_fetched, batches, threads, cleared)


@contextlib.contextmanager
def by_calls_of_peer(batches: int, threads: int, cleared: bool, folder: str) -> Iterator[Channel]:
    import ray

    from benchmarks.versus.worker import RAY

    ray.init(_temp_dir=folder, **RAY)
    try:
        with contextlib.closing(_Queue()) as queue:
            yield from queue.opened(_fetched, batches, threads, cleared)
    finally:
        ray.shutdown()


class _Queue:
    def __init__(self, conf: dict[str, Any] | None = None) -> None:
        self._conf: Any = tq.init(conf)

    def close(self) -> None:
        tq.close()

    def opened(self, read: Read, batches: int, threads: int, cleared: bool) -> Iterator[Channel]:
        """The channel, once; its producer ends with it."""
        context = multiprocessing.get_context("spawn")
        room = context.Semaphore(AHEAD)
        line, other = context.Pipe(duplex=False)
        producer = context.Process(target=_put, args=(self._conf, batches, threads, room, other))
        producer.start()
        other.close()
        taken = self._taken(read(self._conf, list(rl_batch())), room, cleared)
        try:
            received(line)  # the first batch is there: both packages wait only a second for one, and then fail
            yield Channel(taken, lambda: received(line, DEADLINE_S))
        finally:
            taken.close()
            end(producer)
            line.close()

    def _taken(self, batches: Iterator[tuple[Any, Any]], room: Semaphore, cleared: bool) -> Any:
        for data, meta in batches:
            room.release()
            yield data
            if cleared:
                tq.get_client().clear_samples(meta)


def _loaded(conf: Any, fields: list[str]) -> Iterator[tuple[Any, Any]]:
    dataset = tq.StreamingDataset(conf, SIZE, SIZE, fields, PARTITION, TASK, 0)
    return iter(tq.StreamingDataLoader(dataset, num_workers=0))


def _fetched(conf: Any, fields: list[str]) -> Iterator[tuple[Any, Any]]:
    client = tq.get_client()
    while True:
        meta = client.get_meta(fields, SIZE, PARTITION, "fetch", TASK)
        yield client.get_data(meta), meta


def _put(conf: Any, batches: int, threads: int, room: Semaphore, line: Connection) -> None:
    client = joined_client(conf)

    puts = itertools.count()

    def put(fields: Fields) -> None:
        client.put(TensorDict(fields, batch_size=[SIZE]), partition_id=PARTITION)
        if next(puts) == 0:
            line.send("the first batch is there")

    line.send(produce(put, batches, threads, lambda: room.acquire(timeout=DEADLINE_S)))
    client.close()
