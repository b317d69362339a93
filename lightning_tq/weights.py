# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to producers: a version is one sample, its tensors side by side in one row of bytes."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import transfer_queue as tq
from transfer_queue import (
    BatchMeta,
    BatchTimeoutError,
    EndOfPartitionError,
    StorageKeyNotFoundError,
    TransferQueueClient,
)
from transfer_queue.errors import InvalidRequestError

logger = logging.getLogger(__name__)

PARTITION = "weights"
_FIELDS = ["values", "layout"]
_ALIGNMENT = 64
_REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of a model, in memory of the reader's own."""

    version: int
    """Optimizer steps that made it."""
    state_dict: dict[str, Tensor]
    """For ``load_state_dict``."""
    info: dict[str, Any]
    """What else the trainer says with it."""


class Snapshot:
    """A copy of tensors in one buffer on the host, which is kept for the next copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._layout: list[list[Any]] = []

    def prepare(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, pinned: bool) -> dict[str, Tensor]:
        """Where a copy of each tensor belongs: views of the buffer. Floating-point ones are cast to ``dtype``."""
        self._layout, end = [], 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            self._layout.append([name, str(kind).removeprefix("torch."), list(tensor.shape), end])
            end += math.ceil(tensor.numel() * kind.itemsize / _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or self._buffer.numel() != end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return _views(self._buffer, self._layout)

    def put(self, partition: str, version: int, info: Mapping[str, Any]) -> str:
        """Publish it; followers that wait get it. Returns its key."""
        key = f"version-{version}"
        fields = {"values": self._buffer, "layout": {"tensors": self._layout}}
        tq.kv_put(key, partition, fields=fields, tag={"version": version, "info": dict(info)})
        return key


def _views(buffer: Tensor, layout: list[list[Any]]) -> dict[str, Tensor]:
    views = {}
    for name, kind, shape, start in layout:
        dtype: torch.dtype = getattr(torch, kind)
        nbytes = math.prod(shape) * dtype.itemsize
        views[name] = buffer[start : start + nbytes].view(dtype).view(shape)
    return views


class WeightsReader:
    """The newest weights that a trainer with ``PublishWeights`` has published, in a process that doesn't train.

    Waiting is a fetch that is parked in the controller: nothing polls. Every reader sees every version.
    """

    def __init__(
        self, client: TransferQueueClient | None = None, partition: str = PARTITION, task: str | None = None
    ) -> None:
        """Args:
        client: Default: this process' client (``transfer_queue.get_client()``).
        partition: As PublishWeights has it.
        task: Name of this reader in the queue's statistics. Default: one of its own; two readers must not share it.
        """
        self._client = client if client is not None else tq.get_client()
        self._partition = partition
        self._task = task or f"weights-reader-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._weights: Weights | None = None

    @property
    def version(self) -> int:
        """Of what ``latest`` returned last; -1 before."""
        return -1 if self._weights is None else self._weights.version

    def latest(self, least: int = 0, timeout_s: float | None = None) -> Weights:
        """The newest weights as soon as their version is at least ``least``; the same object while nothing is newer.

        Args:
            least: ``version + 1`` waits for something newer than what there was.
            timeout_s: Longest wait. Default: wait, and report every 30 s.
        Raises:
            EndOfPartitionError: training has ended, and there is nothing that wasn't returned before.
            BatchTimeoutError: nothing new enough in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        newest = self._newest()
        while newest is not None or self.version < least:
            loaded = self._load(newest or self._wait(least, deadline))
            newest = None if loaded else self._newest()
        assert self._weights is not None
        return self._weights

    def _newest(self) -> BatchMeta | None:
        """The last of the versions that are there and weren't seen yet."""
        newest = None
        try:
            while (meta := self._fetch(0.0)) is not None:
                newest = meta
        except EndOfPartitionError:
            if newest is None:
                raise
        return newest

    def _wait(self, least: int, deadline: float) -> BatchMeta:
        while True:
            left = deadline - time.monotonic()
            meta = self._fetch(max(0.0, min(left, _REPORT_EVERY_S)))
            if meta is not None:
                return meta
            said = f"weights of version {least} or later, the newest of {self._partition!r} are {self.version}"
            if time.monotonic() >= deadline:
                raise BatchTimeoutError(f"waited in vain for {said}. Is the trainer at work, with PublishWeights?")
            logger.warning("waiting for %s.", said)

    def _fetch(self, wait_s: float) -> BatchMeta | None:
        try:
            meta = self._client.get_meta(_FIELDS, 1, self._partition, task_name=self._task, timeout_s=wait_s)
        except BatchTimeoutError:
            return None
        return meta if meta.size else None  # empty where the queue is configured to be polled

    def _load(self, meta: BatchMeta) -> bool:
        try:
            data = self._client.get_data(meta)
        except StorageKeyNotFoundError:
            return False  # cleared since, so there is a newer one
        tags = meta.custom_meta[0]
        tensors = _views(data["values"][0], data["layout"][0]["tensors"])
        self._weights = Weights(tags["version"], tensors, tags["info"])
        return True


def check_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries, all of them tensors of numbers.

    Raises:
        InvalidRequestError: one isn't; the text names it.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_quantized or value.layout is not torch.strided:
            raise InvalidRequestError(
                f"entry {name!r} of the state dict is a {type(value).__name__} that can't be published: weights are "
                f"dense tensors. Leave it out with PublishWeights(include=[...])."
            )
    return dict(state)
