# SPDX-License-Identifier: Apache-2.0
"""MooncakeStoreClient, in the client: values in the memory that the processes of a Mooncake store contribute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from transfer_queue.config import MooncakeConfig, typed
from transfer_queue.errors import BackendUnavailableError, LaunchError, QueueUnreachableError, StorageFullError
from transfer_queue.storage.base import StorageKVClient

_FULL = -200, -600
"""Codes for no room: in the store's memory, or in this process' own buffer."""
_BATCH_SHARE = 4
"""A batch takes at most this fraction (a quarter) of the process' buffer."""
_STOP_TIMEOUT_S = 10.0


class MooncakeStoreClient(StorageKVClient):
    """A process that was forked from one that uses Mooncake can't use it: start loaders' workers with
    ``multiprocessing_context="spawn"``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: see ``MooncakeConfig``. Where the queue has started the store itself, its own process contributes
        the memory, and no other. So no value ends with the process that put it.

        Raises:
            BackendUnavailableError: the package, or a library that it needs, is missing.
        """
        super().__init__(config)
        self._mooncake = _mooncake()
        self._connected: Any = None
        self._buffer = int(config.get("local_buffer_size") or 1 << 30)
        self._batch_nbytes = self._buffer // _BATCH_SHARE

    def put(self, keys: list[str], values: list[Any]) -> None:
        from transfer_queue.storage.pack import encode_rows
        from transfer_queue.storage.wire import runs_within

        column = encode_rows(values, "values", bool(self.config.get("allow_pickle", False)))
        replicas, store, bounds = self._mooncake.ReplicateConfig(), self._store(), column.bounds
        replicas.with_hard_pin = self._is_pinned()
        for start, stop in runs_within(bounds, self._batch_nbytes, len(keys)):
            some = [memoryview(column.data[bounds[row] : bounds[row + 1]].data) for row in range(start, stop)]
            code = store.upsert_batch(keys[start:stop], some, replicas)
            if code in _FULL:
                raise StorageFullError(
                    f"Storage capacity exceeded: Mooncake has no room for {sum(map(len, some))} bytes (code {code}). "
                    f"Clear consumed samples sooner, or raise MooncakeStore.global_segment_size or local_buffer_size."
                )
            _check(code, "store values")

    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        import math

        import numpy as np

        from transfer_queue.storage.unpack import decode_value
        from transfer_queue.storage.wire import running_sum, runs_within

        known = zip(shapes or [None] * len(keys), dtypes or [None] * len(keys), strict=True)
        sizes = [0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize for shape, dtype in known]
        store, values = self._store(), list[Any]()
        allow_pickle = bool(self.config.get("allow_pickle", False))
        for start, stop in runs_within(running_sum(np.array(sizes, np.int64)), self._batch_nbytes, len(keys)):
            for key, data in zip(keys[start:stop], store.get_batch(keys[start:stop]), strict=True):
                values.append(decode_value(np.frombuffer(data, np.uint8), key, allow_pickle) if data else None)
        return values

    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        self._store().batch_remove(keys, True)  # its codes tell which were not there

    def close(self) -> None:
        store, self._connected = self._connected, None
        if store is not None:
            store.close()

    def _is_pinned(self) -> bool:
        pinned = self.config.get("hard_pin")
        return not (self.config.get("offload") or {}).get("enabled") if pinned is None else bool(pinned)

    def _store(self) -> Any:
        """The store, which this process joins at its first call."""
        if self._connected is None:
            config, store = self.config, self._mooncake.MooncakeDistributedStore()
            code = store.setup(
                str(config.get("local_hostname") or "127.0.0.1"),
                str(config.get("metadata_server")),
                0 if config.get("auto_init") else int(config.get("global_segment_size") or 0),
                self._buffer,
                str(config.get("protocol") or "tcp"),
                str(config.get("device_name") or ""),
                str(config.get("master_server_address")),
            )
            _check(code, f"join the store of {config.get('master_server_address')}")
            self._connected = store
        return self._connected


def _check(code: int, what: str) -> None:
    if code:
        raise QueueUnreachableError(f"Mooncake could not {what} (code {code}); what it printed to stderr says more.")


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, the master with it, and all values."""
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)  # it ends when its input does
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def start_store(conf: Any) -> ExitStack | None:
    """Start a store for this queue, unless ``auto_init`` is off, and complete the section ``MooncakeStore``.

    Returns:
        What ends it by its ``close``.
    Raises:
        BackendUnavailableError: the package, or a library that it needs, is missing.
        LaunchError: the store did not start.
    """
    _mooncake()
    config = typed(conf).backend.MooncakeStore or MooncakeConfig()
    if not config.auto_init:
        return None
    offload = config.offload
    orders = {
        "parent": os.getpid(), "segment": config.global_segment_size, "buffer": 16 << 20, "protocol": config.protocol,
        "device": config.device_name, "options": [
            f"-eviction_high_watermark_ratio={offload.eviction_high_watermark_ratio}",
            f"-eviction_ratio={offload.eviction_ratio}",
            *(["-enable_offload=true"] if offload.enabled else []),
        ],
    }  # fmt: skip
    script = Path(__file__).with_name("mooncake_host.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    store = ExitStack()
    store.callback(_end, process)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(orders) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    answer = json.loads(line) if line else {"error": f"it ended with exit code {process.wait()}; see stderr"}
    if "error" in answer:
        store.close()
        raise LaunchError(f"the Mooncake store did not start: {answer['error']}.")
    completed = {"master_server_address": answer["master"], "metadata_server": "P2PHANDSHAKE"}
    OmegaConf.update(conf, "backend.MooncakeStore", completed, force_add=True)
    return store


def _mooncake() -> Any:
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise BackendUnavailableError(
            f"storage backend 'MooncakeStore' can't be loaded ({error}): install lightning-tq "
            "with its extra 'mooncake' (docs/start.md), "
            "and the libraries of RDMA: apt install libibverbs1."
        ) from error
