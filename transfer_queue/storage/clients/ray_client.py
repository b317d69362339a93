# SPDX-License-Identifier: Apache-2.0
"""RayStorageClient, in the client: values as objects of Ray's store, which one actor owns until they are cleared."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from transfer_queue.errors import BackendUnavailableError, QueueUnreachableError
from transfer_queue.storage.base import StorageKVClient

NAMESPACE = "transfer_queue"
_OBJECT_NBYTES = 1024 * 1024
"""Neighbouring values share an object of up to this size: an object of Ray costs as much as copying some 100 KiB."""


_in_fork: list[bool] = []


def _note_fork() -> None:
    if is_ray_up():
        _in_fork.append(True)


os.register_at_fork(after_in_child=_note_fork)


def is_ray_up() -> bool:
    """Whether this process has initialized Ray, or the one that it is a fork of."""
    ray: Any = sys.modules.get("ray")  # a process that uses Ray has imported it
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def is_in_fork() -> bool:
    """Whether this process is a fork of one that uses Ray, which does not work there: its calls hang."""
    return bool(_in_fork)


class RayStorageClient(StorageKVClient):
    """Any process of the Ray cluster, or one that can join it. It joins at its first call.

    A process that was forked from one that uses Ray can't use Ray: start loaders' workers with
    ``multiprocessing_context="spawn"``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: ``address`` of the cluster, and ``actor``, the name of the actor that owns the values."""
        super().__init__(config)
        self._ray = import_ray()
        self._owner: Any = None

    def put(self, keys: list[str], values: list[Any]) -> None:
        import numpy as np

        from transfer_queue.storage.pack import encode_rows
        from transfer_queue.storage.wire import runs_within

        column = encode_rows(values, "values", bool(self.config.get("allow_pickle", False)))
        bounds = column.bounds
        with self._calls() as owner:
            added = []
            for start, stop in runs_within(bounds, _OBJECT_NBYTES, len(keys)):
                data = column.data[bounds[start] : bounds[stop]]
                offsets = bounds[start : stop + 1] - bounds[start]
                added.append(owner.add.remote(keys[start:stop], np.ascontiguousarray(data), offsets))
            self._ray.get(added)

    def get(self, keys: list[str], *described: Any, **more: Any) -> list[Any]:
        """The values. Their bytes say what they are, so nothing else is needed."""
        from transfer_queue.storage.unpack import decode_value

        values: list[Any] = [None] * len(keys)
        with self._calls() as owner:
            references, found = self._ray.get(owner.find.remote(keys))
            objects = dict(zip(references, self._ray.get(list(references.values())), strict=True))
        allow_pickle = bool(self.config.get("allow_pickle", False))
        for at, place in enumerate(found):
            if place is not None:
                number, row = place
                data, bounds = objects[number]
                values[at] = decode_value(data[bounds[row] : bounds[row + 1]], keys[at], allow_pickle)
        return values

    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        with self._calls() as owner:
            self._ray.get(owner.clear.remote(keys))

    @contextmanager
    def _calls(self) -> Iterator[Any]:
        """The actor that owns the values. Ray's errors become QueueUnreachableError."""
        if is_in_fork():
            raise BackendUnavailableError(
                "this process is a fork of one that uses Ray, and Ray's object store doesn't work in forks. Start it "
                'with multiprocessing_context="spawn", or as a process of its own.'
            )
        try:
            if self._owner is None:
                if not self._ray.is_initialized():
                    address = self.config.get("address")
                    self._ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
                self._owner = self._ray.get_actor(str(self.config.get("actor")), NAMESPACE)
            yield self._owner
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise QueueUnreachableError(f"Ray's object store can't be reached, or has lost values: {error}") from error
        except ValueError as error:
            if self._owner is not None:
                raise
            raise QueueUnreachableError(
                f"the actor {self.config.get('actor')!r} that owns the queue's values is not in this cluster: {error}"
            ) from error


class ValueOwner:
    """The actor: it keeps the reference of each object until all keys in it are cleared."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self._references: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._added = 0

    def add(self, keys: list[str], data: Any, bounds: Any) -> None:
        """Keep the values of these keys, which replace existing ones, as one object.

        It is put again here: an object is lost with the process that put it.
        """
        reference = import_ray().put((data, bounds))
        self.clear(keys)
        self._added += 1
        self._references[self._added], self._left[self._added] = reference, len(keys)
        self._places.update((key, (self._added, row)) for row, key in enumerate(keys))

    def find(self, keys: list[str]) -> tuple[dict[int, Any], list[tuple[int, int] | None]]:
        """References by number, and for each key (number, row); None for a key that is not there."""
        found = [self._places.get(key) for key in keys]
        return {place[0]: self._references[place[0]] for place in found if place is not None}, found

    def clear(self, keys: list[str]) -> None:
        for key in keys:
            place = self._places.pop(key, None)
            if place is None:
                continue
            number, _ = place
            self._left[number] -= 1
            if not self._left[number]:
                del self._references[number], self._left[number]

    def held(self) -> tuple[int, int]:
        """(keys, objects)."""
        return len(self._places), len(self._references)


def start_store(conf: Any) -> ExitStack:
    """Start the actor, and Ray if this process is not connected to it, and complete the section ``RayStore``.

    Returns what ends them by its ``close``.
    """
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    name = f"TransferQueueStore_{uuid.uuid4().hex[:12]}"
    owner = ray.remote(num_cpus=0)(ValueOwner).options(name=name, namespace=NAMESPACE).remote()
    ray.get(owner.held.remote())
    completed = {"address": ray.get_runtime_context().gcs_address, "actor": name}
    OmegaConf.update(conf, "backend.RayStore", completed, force_add=True)
    started_here = ExitStack()
    started_here.callback(_end, owner, started)
    return started_here


def _end(owner: Any, started_ray: bool) -> None:
    """End the actor, and with it all values; also Ray, if it was started for it."""
    ray = import_ray()
    if ray.is_initialized():
        ray.kill(owner)
        if started_ray:
            ray.shutdown()


def import_ray() -> Any:
    """Ray. Raises BackendUnavailableError, which is a ConfigError, if it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise BackendUnavailableError(
            f"Ray can't be imported ({error}), which launch: ray and storage backend 'RayStore' need: install "
            f"lightning-tq with its extra 'ray' (docs/start.md)."
        ) from error
