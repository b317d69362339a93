# SPDX-License-Identifier: Apache-2.0
"""Getting one batch of a stream: waits in the controller, or asks a fetch function of the user's again and again."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transfer_queue import protocol as p
from transfer_queue.client import TransferQueueClient, explain
from transfer_queue.config import environment_number
from transfer_queue.dataloader.batch_stream import Fetched, nothing
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError, InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.verbs.fetches import FetchedBatch

logger = get_logger(__name__)

SLICE_S = 2.0
"""Longest time that one request is parked: between two, the stream looks whether it should stop or report."""
UNTHREADED_SLICE_S = 0.5
"""The same where the consumer's own thread waits, which nothing can wake."""

_ARGUMENTS = ("tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index")


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What a stream asks for, batch after batch."""

    data_fields: list[str]
    batch_size: int
    task_name: str
    sampling_config: Mapping[str, Any]
    finite: bool = False
    timeout_s: float | None = None
    report_every_s: float = 30.0
    fetch_batch_fn: Callable[..., Any] | None = None
    slice_s: float = SLICE_S
    begun: tuple[int, int] | None = None
    """A batch of which so many rows were taken already: only the others are asked for."""
    pass_start: int | None = None
    """The batch that this pass began with: all readers of a pass are told the same end."""


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[Any, BatchMeta]:
    """(values, metadata) of one batch, or (None, empty metadata) for "nothing yet".

    Raises:
        EndOfPartitionError: the stream has ended before this batch.
    """
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    try:
        meta = tq_client.get_meta(data_fields, batch_size, partition_id, "fetch", task_name, config)
    except BatchTimeoutError:
        return None, BatchMeta.empty()
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


class _Arrived:
    """A batch that the queue has answered."""

    def __init__(self, client: TransferQueueClient, batch: FetchedBatch) -> None:
        self._client = client
        self._batch = batch

    def open(self) -> tuple[Any, BatchMeta]:
        return self._client.take(self._batch), self._batch.meta

    def close(self) -> None:
        self._batch.close()


class _AtHand(NamedTuple):
    """A batch that a function of the user's gave."""

    data: Any
    meta: BatchMeta

    def open(self) -> tuple[Any, BatchMeta]:
        return self.data, self.meta

    def close(self) -> None:
        """There is nothing to let go of."""


class BatchFetcher:
    """Fetches batches by index for one partition. ``pause(seconds)`` waits, and returns True to stop."""

    def __init__(
        self, client: TransferQueueClient, spec: StreamSpec, partition_id: str, pause: Callable[[float], bool]
    ) -> None:
        self._client = client
        self._spec = spec
        self._partition = partition_id
        self._pause = pause
        self._custom = None if spec.fetch_batch_fn is None else as_fetch(spec.fetch_batch_fn)
        self._last: str | None = None  # token of the batch before: its partition may be cleared, and made anew

    def __call__(self, batch_index: int, meanwhile: Callable[[], None] = nothing) -> Fetched | None:
        """The batch, or None when told to stop. ``meanwhile`` is called while it is awaited, if there is time.

        Raises:
            EndOfPartitionError: the stream has ended before this batch.
            BatchTimeoutError: it did not come within the stream's ``timeout_s``.
        """
        spec = self._spec
        started = time.monotonic()
        deadline = None if spec.timeout_s is None else started + spec.timeout_s
        report_at = started + spec.report_every_s
        while not self._pause(0.0):
            wait_s = min(spec.slice_s, *(at - time.monotonic() for at in (deadline, report_at) if at is not None))
            answer = self._try(batch_index, max(0.0, wait_s), meanwhile)
            if answer is not None and not isinstance(answer, p.NotReady):
                return answer
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise BatchTimeoutError(self._explain(answer, now - started))
            if now >= report_at:
                report_at = now + spec.report_every_s
                logger.warning("%s", self._explain(answer, now - started))
        return None

    def _explain(self, answer: p.NotReady | None, waited: float) -> str:
        task = self._spec.task_name
        if answer is not None:
            return explain(answer, task, self._partition, self._spec.data_fields, waited)
        return (
            f"task {task!r} waited {waited:.1f} s for a batch of {self._partition!r}: fetch_batch_fn has returned none "
            f"so far. Check the producers, or wait longer (timeout_s)."
        )

    def _try(self, batch_index: int, wait_s: float, meanwhile: Callable[[], None]) -> Fetched | p.NotReady | None:
        if self._custom is not None:
            meanwhile()
            return self._try_custom(self._custom, batch_index)
        spec = self._spec
        config = {**spec.sampling_config, "batch_index": batch_index}
        if self._last is not None:
            config["after"] = self._last
        if spec.finite and spec.pass_start is not None:
            config["pass_start"] = spec.pass_start
        if spec.begun is not None and batch_index == spec.begun[0]:
            config["skip"] = spec.begun[1]
        reply = self._client.fetch_batch(
            spec.data_fields,
            spec.batch_size,
            self._partition,
            spec.task_name,
            config,
            wait_s=wait_s,
            finite=spec.finite,
            meanwhile=meanwhile,
        )
        if isinstance(reply, p.NotReady):
            return reply
        self._last = reply.meta.token
        return _Arrived(self._client, reply)

    def _try_custom(self, fetch: Callable[[tuple[Any, ...]], Any], batch_index: int) -> Fetched | None:
        spec = self._spec
        asked = (spec.data_fields, spec.batch_size, self._partition, spec.task_name, dict(spec.sampling_config))
        data, meta = fetch((self._client, *asked, batch_index))
        if data is not None:
            return _AtHand(data, meta)
        if spec.finite and self._client.check_consumption_status(spec.task_name, self._partition):
            raise EndOfPartitionError(f"every sample of {self._partition!r} is consumed by {spec.task_name!r}.")
        self._pause(environment_number("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 0.05))
        return None


def as_fetch(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any] | None:
    """How to call the user's function: by the names it has, else in the documented order. None: it is the default one.

    Raises:
        ValueError: it can't be called either way.
    """
    if function is default_fetch_batch_fn:
        return None
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    names = [name for name in _ARGUMENTS if takes_any or name in named]
    if names and _binds(signature, **dict.fromkeys(names)):
        chosen = frozenset(names)
        return lambda values: function(
            **{name: value for name, value in zip(_ARGUMENTS, values, strict=True) if name in chosen}
        )
    if _binds(signature, *_ARGUMENTS):
        return lambda values: function(*values)
    raise InvalidRequestError(
        f"fetch_batch_fn has the parameters {signature}, so it can be called neither by name nor by position. It gets "
        f"{', '.join(_ARGUMENTS)}: take those by these names (any of them, or **kwargs), or all seven by position."
    )


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
