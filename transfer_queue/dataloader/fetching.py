# SPDX-License-Identifier: Apache-2.0
"""Getting one batch of a stream: waits in the controller, or asks a fetch function of the user's again and again."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transfer_queue import protocol as p
from transfer_queue.client import TransferQueueClient, explain
from transfer_queue.config import environment_number
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata_wire import to_meta
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)

SLICE_S = 2.0
"""Longest time that one request is parked: between two, the stream looks whether it should stop or report."""

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
    fetch_batch_fn: Callable[..., Any] | None = field(default=None)


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[Any, BatchMeta]:
    """(values, metadata) of one batch, or (None, empty metadata) for "nothing yet"."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    try:
        meta = tq_client.get_meta(data_fields, batch_size, partition_id, "fetch", task_name, config)
    except EndOfPartitionError:
        raise
    except BatchTimeoutError:
        return None, BatchMeta.empty()
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


class BatchFetcher:
    """Fetches batches by index for one partition. ``pause(seconds)`` waits, and returns True to stop."""

    def __init__(
        self, client: TransferQueueClient, spec: StreamSpec, partition_id: str, pause: Callable[[float], bool]
    ) -> None:
        self._client = client
        self._spec = spec
        self._partition = partition_id
        self._pause = pause
        custom = spec.fetch_batch_fn
        self._custom = None if custom is None or custom is default_fetch_batch_fn else _by_name(custom)

    def __call__(self, batch_index: int) -> tuple[Any, BatchMeta] | None:
        """The batch, or None when told to stop.

        Raises:
            EndOfPartitionError: the stream has ended before this batch.
            BatchTimeoutError: it did not come within the stream's ``timeout_s``.
        """
        started = reported = time.monotonic()
        while not self._pause(0.0):
            answer = self._try(batch_index)
            if not isinstance(answer, p.NotReady):
                return answer
            waited = time.monotonic() - started
            if self._spec.timeout_s is not None and waited >= self._spec.timeout_s:
                raise BatchTimeoutError(self._explain(answer, waited))
            if time.monotonic() - reported >= self._spec.report_every_s:
                reported = time.monotonic()
                logger.warning(self._explain(answer, waited))
        return None

    def _explain(self, answer: p.NotReady, waited: float) -> str:
        return explain(answer, self._spec.task_name, self._partition, self._spec.data_fields, waited)

    def _try(self, batch_index: int) -> tuple[Any, BatchMeta] | p.NotReady:
        if self._custom is not None:
            return self._try_custom(batch_index)
        spec = self._spec
        wait_s = SLICE_S if spec.timeout_s is None else min(SLICE_S, spec.timeout_s)
        reply = self._client.fetch(
            spec.data_fields,
            spec.batch_size,
            self._partition,
            spec.task_name,
            {**spec.sampling_config, "batch_index": batch_index},
            wait_s=wait_s,
            finite=spec.finite,
        )
        if isinstance(reply, p.NotReady):
            return reply
        meta = to_meta(reply)
        return self._client.get_data(meta), meta

    def _try_custom(self, batch_index: int) -> tuple[Any, BatchMeta] | p.NotReady:
        spec = self._spec
        assert self._custom is not None
        data, meta = self._custom(
            (
                self._client, spec.data_fields, spec.batch_size, self._partition, spec.task_name,
                dict(spec.sampling_config), batch_index,
            )  # fmt: skip
        )
        if data is not None:
            return data, meta
        if spec.finite and self._client.check_consumption_status(spec.task_name, self._partition):
            raise EndOfPartitionError(f"every sample of {self._partition!r} is consumed by {spec.task_name!r}.")
        self._pause(environment_number("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 0.05))
        return p.NotReady(0, spec.batch_size, 0, 0)


def _by_name(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Call the user's function by the names it has, or in the documented order where it chose names of its own."""
    parameters = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda values: function(**dict(zip(_ARGUMENTS, values, strict=True)))
    if named & set(_ARGUMENTS):
        return lambda values: function(
            **{name: value for name, value in zip(_ARGUMENTS, values, strict=True) if name in named}
        )
    return lambda values: function(*values)
