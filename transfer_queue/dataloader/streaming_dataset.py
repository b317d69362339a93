# SPDX-License-Identifier: Apache-2.0
"""StreamingDataset: a stream of batches as a torch IterableDataset, and its position."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cache, partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.client import TransferQueueClient
from transfer_queue.dataloader.batch_stream import batch_stream
from transfer_queue.dataloader.bundle import Bundle
from transfer_queue.dataloader.cursor import Cursor, Start
from transfer_queue.dataloader.fetching import BatchFetcher, Starved, as_fetch, default_fetch_batch_fn
from transfer_queue.dataloader.segments import take_all_from_segments
from transfer_queue.dataloader.splitting import chunk_batch_fn, chunk_groups, with_heads
from transfer_queue.errors import InvalidRequestError
from transfer_queue.interface import connect, get_client, init, seen_from_here
from transfer_queue.utils.logging_utils import get_logger

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

logger = get_logger(__name__)

ProcessBatchFn = Callable[..., Iterable[Any]]
_LOOK_EVERY_S = 1.0


class Origin(NamedTuple):
    """Where an iterator starts, and how often the dataset had been moved by then."""

    start: Start
    moves: int


class StreamingDataset(IterableDataset[Any]):
    """Yields the results of ``process_batch_fn`` for each batch: by default (TensorDict, BatchMeta) micro-batches.

    An iterator continues where the previous one stopped and never changes its partition: ``step``, ``reset`` and
    ``load_state_dict`` affect the next iterator.
    Batches are read from storage each time; none are kept.
    With workers use a StreamingDataLoader: worker w of W takes batches w, w + W, …

    Raises:
        BatchTimeoutError: while iterating, no batch came for ``timeout_s`` seconds.
        ProducersGoneError: while iterating, all producers of a field have died.
    Examples:
        >>> meta = client.put({"x": torch.arange(8)}, partition_id="train")
        >>> client.seal_partition("train")
        >>> dataset = tq.StreamingDataset(None, 4, 2, ["x"], "train", "update_actor", dp_rank=0)
        >>> [data["x"].tolist() for data, meta in dataset]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> dataset.close()
    """

    def __init__(
        self,
        config: DictConfig | Mapping[str, Any] | None,
        batch_size: int | None,
        micro_batch_size: int | None,
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
        prefetch: bool = True,
        layout: str | None = None,
        timeout_s: float | None = None,
        report_every_s: float = 30.0,
        should_stop: Callable[[], bool] | None = None,
        where: str | None = None,
        head_fields: list[str] | None = None,
    ) -> None:
        """Args:
            config: What ``init`` returned; None: the queue of this process, or of TQ_ADDRESS.
            batch_size: Samples per data-parallel rank and batch. None: as the task's GroupSampler draws.
            micro_batch_size: Rows of one micro-batch. None: a whole batch of groups.
            dp_rank: Data-parallel rank; ranks of one group get the same batches.
            should_check_consumption_status: Also end when every sample of the partition is consumed.
            fetch_batch_fn: Replaces the fetch; see ``default_fetch_batch_fn``.
            process_batch_fn: Called as f(data, meta, micro_batch_size=…); replaces ``chunk_batch_fn``.
            dp_size: Number of data-parallel ranks; with it every rank gets batch b or none does.
            sampling_config: More keywords for the sampler. In the older form, ``data_replica_group`` is the dp_rank.
            prefetch: Request the next batch while the reader is busy with this one.
            layout: "jagged" or "dense" values; None: as the queue is configured.
            timeout_s: Longest wait for one batch, then BatchTimeoutError; None: wait and report.
            report_every_s: Interval of the log message that says what a waiting stream waits for.
            should_stop: Called several times per second while waiting, without a request; True ends the stream.
            where: Read only samples whose tags match, such as ``"policy_version >= 7"``; see ``get_meta``. Part of
                ``sampling_config``, as ``fetch_batch_fn`` gets it.
            head_fields: Fields of the groups' heads. They are read once per batch, and micro-batches are triples
                (data, meta, heads): a row of heads per group, by ``meta.group_index``.
        Raises:
            ValueError: an invalid size, rank or list of fields.
        """
        super().__init__()
        numbers = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "dp_size": dp_size}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {number}.")
        _check_sizes(batch_size, micro_batch_size)
        _check_values(dp_rank, dp_size, data_fields, layout)
        self.config = seen_from_here(config) if config is not None else _config_of_this_process()
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = [data_fields] if isinstance(data_fields, str) else list(data_fields)
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn
        self.process_batch_fn = process_batch_fn
        self.prefetch = prefetch
        self.layout = layout
        self.timeout_s = timeout_s
        self.report_every_s = report_every_s
        self.should_stop = should_stop
        self._starved = Starved()
        self._jagged: dict[str, bool] | None = {}
        """By field, whether it was in the first batch. None: a field that changed was warned of."""
        self.head_fields = head_fields
        if fetch_batch_fn is not None:
            as_fetch(fetch_batch_fn)  # raises now rather than at the first batch
        own = _with_dp_rank(sampling_config or {})
        self.sampling_config: dict[str, Any] = {"dp_rank": dp_rank, "task_name": task_name, **own}
        if dp_size is not None:
            self.sampling_config["dp_size"] = dp_size
        if where is not None:
            self.sampling_config["where"] = where
        self.position = Start(partition_id)
        self.worker_cursor: Cursor | None = None
        """Set while a StreamingDataLoader starts its workers, which keep it."""
        self._moves = 0
        self._client: tuple[int, TransferQueueClient, Callable[[], Any]] | None = None

    # ---- position ----

    @property
    def partition_id(self) -> str:
        """The partition where the next iterator starts."""
        return self.position.partition_id

    @property
    def batch_index(self) -> int:
        """The next batch."""
        return self.position.batch_index

    @property
    def buffer(self) -> list[tuple[Any, Any]]:
        """Always empty: batches stay in the queue until they are taken, also those requested ahead."""
        return []

    def origin(self) -> Origin:
        """The position where an iterator that begins now starts."""
        return Origin(self.position, self._moves)

    def move(self, start: Start) -> None:
        """Start the next iterator there. Items taken from a live iterator no longer change the position."""
        self.position = start
        self._moves += 1

    def step(self, partition_id: str) -> None:
        """Start the next iterator at the first batch of this partition."""
        self.move(Start(partition_id))

    def reset(self) -> None:
        """Start the next iterator at batch 0, with the same batches."""
        self.move(Start(self.partition_id))

    def state_dict(self) -> dict[str, Any]:
        """The position after the items taken so far, without prefetched ones, as plain data."""
        return asdict(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after this position with the next iterator.

        Raises:
            ValueError: this is not a ``state_dict`` of a stream.
        """
        try:
            self.move(Start(str(state["partition_id"]), int(state["batch_index"]), int(state["micro_batch"])))
        except KeyError as error:
            raise InvalidRequestError(f"no state of a stream, it lacks {error}: {dict(state)!r}.") from None

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._items(self.origin())
        _end_with_loader()
        if self.worker_cursor is not None:
            take_all_from_segments(worker.num_workers)
            return self._bundles_for(self.worker_cursor, self.worker_cursor.join())
        return self._items(Origin(self.position, -1))  # workers of a plain DataLoader would each track another position

    def _items(self, origin: Origin) -> Iterator[Any]:
        with closing(self.bundles(origin.start)) as bundles:
            for bundle in bundles:
                yield from self.take(bundle, origin)

    def _bundles_for(self, cursor: Cursor, iteration: int) -> Iterator[Bundle]:
        start = cursor.start_of(iteration)
        if start is not None:
            yield from self.bundles(start, lambda: cursor.is_over(iteration))

    def take(self, bundle: Bundle, origin: Origin) -> Iterator[Any]:
        """Yield the items of a bundle, and count each as taken when it is yielded."""
        start = origin.start
        taken = start.micro_batch if bundle.batch_index == start.batch_index else 0
        for number, item in zip(bundle.numbers, bundle.items, strict=True):
            if number <= taken:
                continue
            done = number == bundle.numbers[-1]
            if origin.moves == self._moves:
                self.position = Start(start.partition_id, bundle.batch_index + done, 0 if done else number)
            yield item
        if bundle.has_groups:
            self.trained(start.partition_id, bundle.batch_index)

    def trained(self, partition_id: str, batch_index: int) -> None:
        """The reader asks for more than this batch of groups, so it has trained it: its slots are free."""
        self._own_client().note_trained(partition_id, self.task_name, batch_index + 1, self.dp_rank)

    def bundles(self, start: Start, is_over: Callable[[], bool] | None = None) -> Generator[Bundle, None, None]:
        """Yield this worker's share of the batches from ``start`` on, until the stream or the iteration ends."""
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        client, should_stop = self._own_client(), self.should_stop if worker is None else is_over
        config = self.sampling_config
        if stride > 1:  # a fast worker must not take the samples of a batch that another worker waits for
            config = {**config, "first_index": start.batch_index}
        fetch = BatchFetcher(
            client, start.partition_id, self.data_fields, self.batch_size, self.task_name, config, should_stop,
            self.should_check_consumption_status, self.timeout_s, self.report_every_s, self.fetch_batch_fn,
            start.batch_index, self._taken_rows(start), starved=self._starved if worker is None else None,
        )  # fmt: skip
        with closing(batch_stream(fetch, start.batch_index + first, stride, self.prefetch)) as batches:
            for batch_index, data, meta in batches:
                if self.fetch_batch_fn is None:
                    self._warn_of_kinds(data)
                taken = start.micro_batch if batch_index == start.batch_index else 0
                items, numbers = self._cut(data, meta, taken, bool(fetch.taken_rows))
                of_record = getattr(self.fetch_batch_fn, "get_heads", None)
                if self.head_fields is not None and items:
                    read = partial(of_record or client.get_heads, meta, self.head_fields, client.storage_manager.layout)
                    items = with_heads(items, meta, fetch.heads(read))
                # A user's function may give something else. Groups of a record hold no slots.
                has_groups = getattr(meta, "heads", None) is not None and of_record is None
                yield Bundle(batch_index, items, numbers, has_groups)
                del data, meta, items  # otherwise they would stay alive while waiting for the next batch

    def _warn_of_kinds(self, data: Any) -> None:
        """Warn once of a field that is jagged in one batch and a plain tensor in another."""
        if self._jagged is None or not isinstance(data, TensorDict):
            return
        tensors = {name: column for name, column in data.items() if isinstance(column, torch.Tensor)}
        for name, column in tensors.items():
            if self._jagged.setdefault(name, column.is_nested) != column.is_nested:
                self._jagged = None
                logger.warning(
                    "field %r is a jagged tensor in some batches, and a plain one where all rows happen to have one "
                    "length: layout='jagged' makes it jagged in all of them.", name,
                )  # fmt: skip
                return

    def _taken_rows(self, start: Start) -> int:
        """Rows of the first batch that were already taken, if it was cut into equal micro-batches; else 0."""
        if self.fetch_batch_fn is not None or self.process_batch_fn is not None or self.micro_batch_size is None:
            return 0
        # A batch of groups is cut by the rows that it had when it was drawn.
        return 0 if self.batch_size is None else start.micro_batch * self.micro_batch_size

    def _cut(self, data: Any, meta: Any, taken: int, skips: bool) -> tuple[list[Any], Sequence[int]]:
        """The micro-batches of a batch, and their numbers. ``taken``: those that were; some of them may be missing."""
        if getattr(meta, "remains", None) and not meta.size:  # all its groups have left
            return [], ()
        if self.process_batch_fn is None and self.batch_size is None:
            return chunk_groups(data, meta, self.micro_batch_size, taken)
        items = list(self._process(data, meta))
        first = 1 + taken * (skips and meta.size < (self.batch_size or 0))
        return items, range(first, first + len(items))

    def _process(self, data: Any, meta: Any) -> Iterable[Any]:
        if self.process_batch_fn is not None:
            return self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
        assert self.micro_batch_size is not None, "checked"
        return chunk_batch_fn(data, meta, min(self.micro_batch_size, meta.size))  # a tail may be short

    # ---- the client ----

    def _own_client(self) -> TransferQueueClient:
        if self._client is None or self._client[0] != os.getpid():
            client = connect(f"StreamingDataset_{self.task_name}_{self.dp_rank}", self.config, layout=self.layout)
            self._client = (os.getpid(), client, Finalize(self, client.close))  # which a fork's copy ignores
        return self._client[1]

    def close(self) -> None:
        """Close this process's connection; iterating opens it again."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[2]()
        self._client = None

    def __getstate__(self) -> dict[str, Any]:
        # Sockets can't be pickled, and ``should_stop`` is asked in the loader's process.
        return {**self.__dict__, "_client": None, "should_stop": None}


@cache
def _end_with_loader() -> None:
    """End this worker soon after its loader's process ends.

    torch looks at the parent process only, while it waits for a request. With "forkserver" that is another process.
    """
    loader, parent = multiprocessing.parent_process(), os.getppid()
    if loader is None:
        return

    def watch() -> None:
        # A process that the loader's has forked can keep the sentinel open, so the parent counts as well.
        while loader.is_alive() and os.getppid() == parent:
            loader.join(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="transfer-queue-loader-watch", daemon=True).start()


def _config_of_this_process() -> DictConfig:
    get_client()  # raises if there is neither a queue nor TQ_ADDRESS; init() would start a queue
    return init()


def _check_sizes(batch_size: int | None, micro_batch_size: int | None) -> None:
    if batch_size is not None and micro_batch_size is None:
        raise InvalidRequestError("micro_batch_size can only be left to a GroupSampler, together with batch_size.")
    if (micro_batch_size or 0) > (batch_size or math.inf):
        raise InvalidRequestError(f"micro_batch_size {micro_batch_size} is larger than batch_size {batch_size}.")


def _check_values(dp_rank: int, dp_size: int | None, data_fields: Sequence[str] | str, layout: str | None) -> None:
    if dp_rank < 0:
        raise InvalidRequestError(f"dp_rank must be at least 0, got {dp_rank}.")
    if dp_size is not None and dp_rank >= dp_size:
        raise InvalidRequestError(f"dp_rank {dp_rank} with dp_size {dp_size}: ranks go from 0 to {dp_size - 1}.")
    if not data_fields:
        raise InvalidRequestError("data_fields must name at least one field.")
    if layout not in (None, "jagged", "dense"):
        raise InvalidRequestError(f"layout must be 'jagged', 'dense' or None, got {layout!r}.")


def _with_dp_rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form of the sampling config, which named a rank of a replica group, to a ``dp_rank``."""
    rest = dict(config)
    replica = [rest.pop(f"data_replica_{name}", None) for name in ("group", "rank", "world_size")]
    group, rank, size = replica
    if replica == [None, None, None]:
        return rest
    if None in replica or size < 1 or not 0 <= rank < size:
        raise InvalidRequestError(
            f"data_replica_group, data_replica_rank and data_replica_world_size are {group}, {rank} and {size}: give "
            f"all three, with a rank from 0 to world size - 1."
        )
    return {"dp_rank": group, **rest}
