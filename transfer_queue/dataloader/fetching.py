# SPDX-License-Identifier: Apache-2.0
"""Fetches one batch of a stream: waits in the controller, or polls a user's fetch function."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.get import FetchedBatch, fetch_request
from transfer_queue.config import environment_number
from transfer_queue.dataloader.batch_stream import Requested
from transfer_queue.diagnosis import not_ready
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError, InvalidRequestError, QueueUnreachableError
from transfer_queue.finding import Finding
from transfer_queue.metadata import BatchMeta
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

_LOST_S = 1.0
"""Between two requests of a batch that can't be read: the controller may not know yet that a unit is lost."""

_ARGUMENTS = ("tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index")


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int | None,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[Any, BatchMeta]:
    """Fetch (values, metadata) of one batch; (None, empty metadata) means that nothing is ready yet.

    Raises:
        EndOfPartitionError: the stream has ended before this batch.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> data, meta = tq.default_fetch_batch_fn(client, ["x"], 2, "train", "sft", {"dp_rank": 0}, batch_index=0)
        >>> data["x"]
        tensor([0, 1])
    """
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    try:
        meta = tq_client.get_meta(data_fields, batch_size, partition_id, "fetch", task_name, config)
    except BatchTimeoutError:
        return None, BatchMeta.empty()
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


@dataclass
class Starved:
    """How long the reader of a stream has waited for batches so far."""

    seconds: float = 0.0


class _Stopped(Exception):
    """The stream is to stop while it waits."""


@dataclass
class BatchFetcher:
    """Requests batches of one partition by index."""

    client: TransferQueueClient
    partition: str
    data_fields: list[str]
    batch_size: int | None
    task_name: str
    sampling_config: Mapping[str, Any]
    should_stop: Callable[[], bool] | None = None
    """Asked now and then; True ends the stream."""
    finite: bool = False
    timeout_s: float | None = None
    report_every_s: float = 30.0
    fetch_batch_fn: Callable[..., Any] | None = None
    first: int | None = None
    """The first batch of this pass: those before it were trained. All readers of a pass get the same end of stream."""
    taken_rows: int = 0
    """Rows of the first batch that were already taken: only the remaining ones are requested."""
    last: str | None = None
    """Token of the previous batch: its partition may be cleared and created again."""
    starved: Starved | None = None
    """How long the stream's reader has waited; it may have had other fetchers before. None: nobody counts it."""

    def __post_init__(self) -> None:
        self.custom = None if self.fetch_batch_fn is None else as_fetch(self.fetch_batch_fn)

    def __call__(self, batch_index: int) -> Requested | None:
        """Request a batch, which must be received before the next request; None: stop."""
        if self.pause(0.0):
            return None
        return _FromQueue(self, batch_index) if self.custom is None else _FromFunction(self, batch_index)

    def pause(self, seconds: float) -> bool:
        """Wait. Returns True to stop."""
        if seconds:
            threading.Event().wait(seconds)
        return self.should_stop is not None and self.should_stop()

    def heads(self, read: Callable[[], TensorDict]) -> TensorDict:
        """Wait until heads that were lost with a storage unit have been put again.

        Raises:
            UnitLostError: they were not within ``timeout_s``, or the stream is to stop.
        """
        wait, reported = _Wait(self), -math.inf
        while True:
            try:
                return read()
            except QueueUnreachableError as error:
                self.client.get_lost_samples(self.partition)  # which says so if it is the queue that has ended
                waited_s = wait.waited_s()
                if waited_s >= reported + self.report_every_s:
                    reported = waited_s
                    logger.warning("waited %.1f s for heads of %r: %s", waited_s, self.partition, error)
                if self.pause(_LOST_S) or (self.timeout_s is not None and waited_s >= self.timeout_s):
                    raise

    def look(self) -> None:
        if self.pause(0.0):
            raise _Stopped


class _Wait:
    """How long a stream has waited for one batch, when to log this, and when to fail."""

    def __init__(self, fetcher: BatchFetcher) -> None:
        self._fetcher = fetcher
        self._began = self._reported = time.monotonic()

    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """The longest wait of the next request: up to the next report, which says what it waits for."""
        now, timeout_s = time.monotonic(), self._fetcher.timeout_s
        left = self._reported + self._fetcher.report_every_s - now
        return max(0.0, left if timeout_s is None else min(left, self._began + timeout_s - now))

    def goes_on(self, answer: p.NotReady | None) -> bool:
        """Handle an empty answer. Returns False to stop; raises BatchTimeoutError."""
        now, timeout_s = time.monotonic(), self._fetcher.timeout_s
        if timeout_s is not None and now >= self._began + timeout_s:
            raise BatchTimeoutError(str(self._found(answer, now - self._began)))
        if now >= self._reported + self._fetcher.report_every_s:
            self._reported = now
            logger.warning("%s", self._found(answer, now - self._began))
        return not self._fetcher.pause(0.0)

    def _found(self, answer: p.NotReady | None, waited_s: float) -> Finding:
        task, partition = self._fetcher.task_name, self._fetcher.partition
        if answer is not None:
            return not_ready(answer, task, partition, self._fetcher.data_fields, waited_s)
        return Finding(
            kind="fetch", what=f"task {task!r}", waits_for=f"a batch of {partition!r}", age_s=waited_s,
            held_up_by=("fetch_batch_fn has returned none so far",),
            to_do=("check the producers", "wait longer (timeout_s)"),
        )  # fmt: skip


class _FromQueue:
    """A batch requested from the queue. The waiting time counts from ``receive``."""

    def __init__(self, fetcher: BatchFetcher, batch_index: int) -> None:
        self._fetcher = fetcher
        self._index = batch_index
        self._batch: FetchedBatch | None = None
        self._request(_Wait(fetcher).left_s())

    def _request(self, wait_s: float, waited_s: float = 0.0) -> None:
        """Start the request, which may wait in the controller for ``wait_s`` seconds."""
        own = self._fetcher
        fetch = fetch_request(
            own.data_fields, own.batch_size or 0, own.partition, own.task_name, own.sampling_config, wait_s
        )
        self._parked_until = time.monotonic() + wait_s
        self._pending = own.client.start_fetch_batch(
            msgspec.structs.replace(
                fetch,
                batch_index=self._index,
                after=own.last,
                finite=own.finite,
                pass_start=own.first if own.finite else None,
                skip=own.taken_rows if self._index == own.first else 0,
                waited_s=waited_s,
                trained=own.first,
                starved_s=None if own.starved is None else own.starved.seconds,
            )
        )

    def receive(self) -> bool:
        wait = _Wait(self._fetcher)
        try:
            return self._receive(wait)
        finally:
            if self._fetcher.starved is not None:
                self._fetcher.starved.seconds += wait.waited_s()

    def _receive(self, wait: _Wait) -> bool:
        is_news = time.monotonic() < self._parked_until
        with contextlib.suppress(_Stopped):
            look = None if self._fetcher.should_stop is None else self._fetcher.look
            while isinstance(answer := self._pending.finish(look), p.NotReady):
                if is_news and not wait.goes_on(answer):
                    return False
                self._request(wait.left_s(), wait.waited_s())
                is_news = True
            self._batch, self._fetcher.last = answer, answer.meta.token
            return True
        return False

    def open(self) -> tuple[Any, BatchMeta]:
        """Values that were lost with a storage unit are waited for until their producers have put them again."""
        last_text = ""
        while True:
            assert self._batch is not None, "received"
            try:
                return self._fetcher.client.take(self._batch), self._batch.meta
            except QueueUnreachableError as error:
                if str(error) != last_text:  # it may take some tries until the controller misses the unit, too
                    last_text = str(error)
                    logger.warning("batch %d can't be read, and is requested again: %s", self._index, last_text)
                if self._fetcher.pause(_LOST_S) or not self._receive_again():
                    raise

    def _receive_again(self) -> bool:
        self._request(_Wait(self._fetcher).left_s())
        return self.receive()

    def close(self) -> None:
        self._pending.close()
        if self._batch is not None:
            run_blocking(self._batch.close())


class _FromFunction:
    """A batch that will be requested from a user's function."""

    def __init__(self, fetcher: BatchFetcher, batch_index: int) -> None:
        self._fetcher = fetcher
        self._index = batch_index
        self._found: tuple[Any, BatchMeta] | None = None

    def receive(self) -> bool:
        """Call the user's function again and again, with a pause after each time that it has nothing yet."""
        own, wait = self._fetcher, _Wait(self._fetcher)
        assert own.custom is not None
        while True:
            config = dict(own.sampling_config)
            asked = (own.client, own.data_fields, own.batch_size, own.partition, own.task_name, config, self._index)
            data, meta = own.custom(dict(zip(_ARGUMENTS, asked, strict=True)))
            if data is not None:
                self._found = data, meta
                return True
            if own.finite and own.client.check_consumption_status(own.task_name, own.partition):
                raise EndOfPartitionError(f"every sample of {own.partition!r} is consumed by {own.task_name!r}.")
            own.pause(environment_number("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 0.05))
            if not wait.goes_on(None):
                return False

    def open(self) -> tuple[Any, BatchMeta]:
        assert self._found is not None, "received"
        return self._found

    def close(self) -> None:
        """There is nothing to release."""


def as_fetch(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any] | None:
    """Adapt the user's function: it gets those of the arguments that it names. None: it is the default function.

    Raises:
        ValueError: it can't be called by these names.
    """
    if function is default_fetch_batch_fn:
        return None
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    names = [name for name in _ARGUMENTS if takes_any or name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(names or _ARGUMENTS))
    except TypeError as error:
        raise InvalidRequestError(
            f"fetch_batch_fn has the parameters {signature}, so it can't be called ({error}). It is called by name "
            f"with those of {', '.join(_ARGUMENTS)} that it has, or with all of them if it takes **kwargs."
        ) from None
    return lambda values: function(**{name: values[name] for name in names})
