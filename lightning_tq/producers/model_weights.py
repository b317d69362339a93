# SPDX-License-Identifier: Apache-2.0
"""Model weights for producers. A version is one sample: all its tensors, packed into one row of bytes."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import transfer_queue as tq
from transfer_queue import (
    BatchMeta,
    BatchTimeoutError,
    EndOfPartitionError,
    KeysTimeoutError,
    ProducersGoneError,
    StorageKeyNotFoundError,
    TransferQueueClient,
)
from transfer_queue.errors import InvalidRequestError, UnitLostError

logger = logging.getLogger(__name__)

WEIGHTS_PARTITION = "_weights"
"""Reports don't show it, because its name begins with "_" (``tq.is_internal``)."""
_FIELDS = ["values", "layout"]
_ALIGNMENT = 64
_REPORT_EVERY_S = 30.0
_LOST_S = 1.0


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of a model, in the reader's own memory.

    Examples:
        >>> L.Trainer(max_epochs=1, callbacks=[PublishWeights(module="layer")]).fit(Model(), dm)
        >>> weights = WeightsReader().latest(timeout_s=5.0)
        >>> torch.nn.Linear(1, 1).load_state_dict(weights.state_dict)
        <All keys matched successfully>
    """

    version: int
    """Number of optimizer steps that made it."""
    state_dict: dict[str, Tensor]
    """For ``load_state_dict``."""
    info: dict[str, Any]
    """Other data from the trainer."""


class WeightsSnapshot:
    """A copy of tensors in one host buffer, which is reused for the next copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._layout: list[list[Any]] = []

    def prepare(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, pinned: bool) -> dict[str, Tensor]:
        """Views of the buffer to copy each tensor into. Floating-point views have this ``dtype``, if given."""
        self._layout, end = [], 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            self._layout.append([name, str(kind).removeprefix("torch."), list(tensor.shape), end])
            end += math.ceil(tensor.numel() * kind.itemsize / _ALIGNMENT) * _ALIGNMENT
        # A checkpoint is loaded, and its version published, before the model is moved to the device.
        if self._buffer is None or (self._buffer.numel(), self._buffer.is_pinned()) != (end, pinned):
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return _views(self._buffer, self._layout)

    def put(self, partition: str, version: int, info: Mapping[str, Any]) -> str:
        """Publish this version to all readers. Returns its key."""
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
    """Reads the newest weights that a trainer with ``PublishWeights`` has published.

    It waits in the controller, without polling. Every reader sees every version.
    """

    def __init__(
        self, client: TransferQueueClient | None = None, partition: str = WEIGHTS_PARTITION, task: str | None = None
    ) -> None:
        """Args:
        client: Default: this process's client (``transfer_queue.get_client()``).
        partition: That of PublishWeights.
        task: Name of this reader in the queue's statistics. Two readers must not share it. Default: a unique name.
        """
        self._client = client if client is not None else tq.get_client()
        self._partition = partition
        self._task = task or f"_weights-reader-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._weights: Weights | None = None
        self._trainer_died = False

    @property
    def version(self) -> int:
        """Version that ``latest`` returned last; -1 before that."""
        return -1 if self._weights is None else self._weights.version

    def latest(self, least: int = 0, timeout_s: float | None = None) -> Weights:
        """Wait for the newest weights of version ``least`` or later. Returns the same object while nothing is newer.

        If the trainer dies, the wait goes on, and ends with the weights of one that resumes in this queue.

        Args:
            least: Oldest acceptable version. ``version + 1`` waits for newer weights than before.
            timeout_s: Longest wait. Default: no limit, with a report every 30 s.
        Raises:
            EndOfPartitionError: training has ended, and the last version was returned before.
            BatchTimeoutError: no such version in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        newest = self._newest()
        while newest is not None or self.version < least:
            loaded = self._load(newest or self._wait(least, deadline), deadline)
            newest = None if loaded else self._newest()
        assert self._weights is not None
        return self._weights

    def _newest(self) -> BatchMeta | None:
        """The last version that this reader has not seen, if there is one now."""
        newest = None
        try:
            while (meta := self._next(0.0)) is not None:
                newest = meta
        except EndOfPartitionError:
            if newest is None:
                raise
        return newest

    def _wait(self, least: int, deadline: float) -> BatchMeta:
        started = time.monotonic()
        while (meta := self._next(max(0.0, min(deadline - time.monotonic(), _REPORT_EVERY_S)), least)) is None:
            newest, lost = f"the newest is {self.version}", ""
            if self._client.get_lost_samples(self._partition):
                lost = " Some were lost with a storage unit; a trainer that runs puts the newest again."
            if self._weights is None:
                newest = "none can be read" if lost else "none was published yet"
            died = " The trainer has died; one that resumes in this queue will publish more." * self._trainer_died
            wanted = f"weights of version {least} or later; {newest}.{lost}{died}"
            now = time.monotonic()
            if now >= deadline:
                advice = "Check that the trainer runs with PublishWeights."
                raise BatchTimeoutError(f"waited {now - started:.1f} s for {wanted} {advice}")
            logger.warning("waiting for %s", wanted)
        return meta

    def _next(self, wait_s: float, least: int = 0) -> BatchMeta | None:
        self._trainer_died = False
        try:
            meta = self._client.get_meta(_FIELDS, 1, self._partition, task_name=self._task, timeout_s=wait_s)
        except BatchTimeoutError:
            return None
        except ProducersGoneError:
            self._trainer_died = True
            return self._next(0.0) if wait_s and self._trainer_came(least, wait_s) else None
        return meta if meta.size else None  # empty where the queue is in polling mode

    def _trainer_came(self, least: int, wait_s: float) -> bool:
        """Wait for another one. Fetches fail at once meanwhile; each version is a key with tags, too."""
        with suppress(KeysTimeoutError):
            self._client.wait_keys(self._partition, f"version >= {max(least, self.version + 1)}", timeout_s=wait_s)
            return True
        return False

    def _load(self, meta: BatchMeta, deadline: float) -> bool:
        said = ""
        while True:
            try:
                data = self._client.get_data(meta)
                break
            except StorageKeyNotFoundError:
                return False  # it was cleared, so there is a newer one
            except UnitLostError as error:
                if time.monotonic() >= deadline:
                    raise
                if said != str(error):
                    said = str(error)
                    logger.warning("weights can't be read until their trainer puts them again: %s", said)
                threading.Event().wait(_LOST_S)
                meta = self._newest() or meta
        tags = meta.custom_meta[0]
        tensors = _views(data["values"][0], data["layout"][0]["tensors"])
        self._weights = Weights(tags["version"], tensors, tags["info"])
        return True


def check_dense(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of a state dict, all of which must be dense tensors.

    Raises:
        InvalidRequestError: an entry is something else. The text names it.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_quantized or value.layout is not torch.strided:
            raise InvalidRequestError(
                f"entry {name!r} of the state dict is a {type(value).__name__}, but only dense tensors can be "
                f"published. Exclude it with PublishWeights(include=[...])."
            )
    return dict(state)
