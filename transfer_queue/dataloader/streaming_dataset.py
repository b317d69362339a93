# SPDX-License-Identifier: Apache-2.0
"""StreamingDataset: a task's batches of a partition, in the order of their batch_index, as they become ready."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.client import TransferQueueClient
from transfer_queue.dataloader.batch_stream import BatchStream
from transfer_queue.dataloader.cursor import Cursor, Start
from transfer_queue.dataloader.fetching import BatchFetcher, StreamSpec, default_fetch_batch_fn
from transfer_queue.dataloader.splitting import chunk_batch_fn
from transfer_queue.errors import InvalidRequestError
from transfer_queue.interface import connect, plain_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

ProcessBatchFn = Callable[..., Iterable[Any]]


@dataclass(slots=True)
class Bundle:
    """All micro-batches of one batch: travels from worker to loader as one item, so that batches stay in order."""

    batch_index: int
    items: list[Any]

    def pin_memory(self) -> Bundle:
        from torch.utils.data._utils.pin_memory import pin_memory

        return Bundle(self.batch_index, [pin_memory(item) for item in self.items])


class StreamingDataset(IterableDataset[Any]):
    """Yields what ``process_batch_fn`` makes of each batch: by default (TensorDict, BatchMeta) micro-batches.

    An iterator starts where the cursor stands and never changes partition under its reader: ``step``, ``reset`` and
    ``load_state_dict`` move the cursor for the next iterator, in DataLoader workers too. Worker w of W takes batches
    w, w + W, … Batches are read from storage each time; the dataset keeps none but those fetched ahead.
    """

    def __init__(
        self,
        config: DictConfig | Mapping[str, Any] | None,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: ProcessBatchFn | None = None,
        *,
        dp_size: int | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        prefetch_batches: int = 2,
        layout: str | None = None,
        timeout_s: float | None = None,
        report_every_s: float = 30.0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Args:
            config: What ``init`` returned; None: the queue of this process, or of TQ_ADDRESS.
            batch_size: Samples per data-parallel rank and batch.
            micro_batch_size: Rows of one micro-batch.
            dp_rank: Data-parallel rank; ranks of one group get the same batches.
            should_check_consumption_status: End, too, when every sample of the partition is consumed.
            fetch_batch_fn: Replaces the fetch; see ``default_fetch_batch_fn``.
            process_batch_fn: Called as f(data, meta, micro_batch_size=…); replaces ``chunk_batch_fn``.
            dp_size: Data-parallel ranks; with it every rank gets batch b or none does.
            sampling_config: More keywords for the sampler.
            prefetch_batches: Batches fetched ahead by a thread; 0: none.
            layout: "jagged" or "dense" values; None: as the queue is configured.
            timeout_s: Longest wait for one batch, then BatchTimeoutError; None: wait and report.
            report_every_s: Interval of the log message that says what a waiting stream waits for.
            should_stop: Looked at while waiting; True ends the stream.
        Raises:
            ValueError: a size, rank or list of fields that can't be right.
        """
        super().__init__()
        _check(batch_size, micro_batch_size, data_fields, dp_rank, dp_size, prefetch_batches)
        self.config = config if config is not None else plain_config()
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = [data_fields] if isinstance(data_fields, str) else list(data_fields)
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn
        self.process_batch_fn = process_batch_fn
        self.prefetch_batches = prefetch_batches
        self.layout = layout
        self.timeout_s = timeout_s
        self.report_every_s = report_every_s
        self.should_stop = should_stop
        self.sampling_config: dict[str, Any] = {"dp_rank": dp_rank, "task_name": task_name, **(sampling_config or {})}
        if dp_size is not None:
            self.sampling_config["dp_size"] = dp_size
        self.cursor = Cursor(partition_id)
        self.position = self.cursor.read()
        self.bundle_in_workers = False
        self._client: tuple[int, TransferQueueClient] | None = None
        self._stream: weakref.ref[BatchStream] | None = None

    # ---- where it stands ----

    @property
    def partition_id(self) -> str:
        """Where the next iterator starts."""
        return self.cursor.read().partition_id

    @property
    def batch_index(self) -> int:
        """The batch that comes next."""
        return self.position.batch_index

    @property
    def buffer(self) -> list[tuple[Any, Any]]:
        """Batches of this process' live iterator that are fetched and not taken yet."""
        stream = None if self._stream is None else self._stream()
        return [] if stream is None else stream.ahead()

    def move(self, start: Start) -> None:
        """The next iterator starts there."""
        self.cursor.move(start)
        self.position = start

    def step(self, partition_id: str) -> None:
        """The next iterator starts at the first batch of this partition."""
        self.move(Start(partition_id))

    def reset(self) -> None:
        """The next iterator starts again at batch 0 and reads the same batches."""
        self.move(Start(self.partition_id))

    def state_dict(self) -> dict[str, Any]:
        """What the consumer took so far, not what was fetched ahead. Plain data."""
        where = self.position
        return {"partition_id": where.partition_id, "batch_index": where.batch_index, "micro_batch": where.micro_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator goes on behind what had been taken."""
        self.move(Start(str(state["partition_id"]), int(state["batch_index"]), int(state["micro_batch"])))

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        start = self.cursor.read()
        if get_worker_info() is not None and self.bundle_in_workers:
            yield from self.bundles(start, self.cursor.iteration())
            return
        for bundle in self.bundles(start, self.cursor.begin_iteration()):
            yield from self.take(bundle, start)

    def take(self, bundle: Bundle, start: Start) -> Iterator[Any]:
        """The items of a bundle, each noted as taken when it is handed out."""
        skip = start.micro_batch if bundle.batch_index == start.batch_index else 0
        for number, item in enumerate(bundle.items[skip:], start=skip + 1):
            done = number == len(bundle.items)
            self.position = Start(start.partition_id, bundle.batch_index + done, 0 if done else number)
            yield item

    def bundles(self, start: Start, iteration: int) -> Iterator[Bundle]:
        """This worker's share of the batches from ``start`` on."""
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        client, spec = self._own_client(), self._spec()
        stream = BatchStream(
            lambda pause: BatchFetcher(client, spec, start.partition_id, pause),
            start.batch_index + first,
            stride,
            self.prefetch_batches,
            self._give_up_check(iteration),
        )
        self._stream = weakref.ref(stream)
        for batch_index, data, meta in stream:
            yield Bundle(batch_index, list(self._process(data, meta)))

    def _spec(self) -> StreamSpec:
        return StreamSpec(
            self.data_fields, self.batch_size, self.task_name, self.sampling_config,
            self.should_check_consumption_status, self.timeout_s, self.report_every_s, self.fetch_batch_fn,
        )  # fmt: skip

    def _process(self, data: Any, meta: Any) -> Iterable[Any]:
        if self.process_batch_fn is not None:
            return self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
        return chunk_batch_fn(data, meta, min(self.micro_batch_size, meta.size))  # a tail may be short

    def _give_up_check(self, iteration: int) -> Callable[[], bool]:
        worker = get_worker_info()
        parent = os.getppid()

        def given_up() -> bool:
            if worker is not None and os.getppid() != parent:
                return True  # the loader's process is gone
            if self.should_stop is not None and self.should_stop():
                return True
            return worker is not None and self.cursor.is_given_up(iteration)

        return given_up

    # ---- the client ----

    def _own_client(self) -> TransferQueueClient:
        if self._client is None or self._client[0] != os.getpid():
            client = connect(f"StreamingDataset_{self.task_name}_{self.dp_rank}", self.config, layout=self.layout)
            self._client = (os.getpid(), client)
            weakref.finalize(self, _close_in_process, client, os.getpid())
        return self._client[1]

    def close(self) -> None:
        """Close this process' connection; iterating opens it again."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[1].close()
        self._client = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_stream": None}  # sockets don't travel


def _close_in_process(client: TransferQueueClient, pid: int) -> None:
    if os.getpid() == pid:
        client.close()


def _check(
    batch_size: int, micro_batch_size: int, fields: list[str], dp_rank: int, dp_size: int | None, ahead: int
) -> None:
    if batch_size < 1:
        raise InvalidRequestError(f"batch_size must be at least 1, got {batch_size}.")
    if micro_batch_size < 1:
        raise InvalidRequestError(f"micro_batch_size must be at least 1, got {micro_batch_size}.")
    if micro_batch_size > batch_size:
        raise InvalidRequestError(f"micro_batch_size {micro_batch_size} is larger than batch_size {batch_size}.")
    if not fields:
        raise InvalidRequestError("data_fields must name at least one field.")
    if dp_rank < 0:
        raise InvalidRequestError(f"dp_rank must be at least 0, got {dp_rank}.")
    if dp_size is not None and dp_rank >= dp_size:
        raise InvalidRequestError(f"dp_rank {dp_rank} with dp_size {dp_size}: ranks go from 0 to {dp_size - 1}.")
    if ahead < 0:
        raise InvalidRequestError(f"prefetch_batches must be at least 0, got {ahead}.")
