# SPDX-License-Identifier: Apache-2.0
"""Backends that a queue may have: ours, and two as users of TransferQueue 0.1 write them, over a directory of files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.storage import KVStorageManager, StorageManager, StorageManagerFactory
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient
from transfer_queue.storage.messages import Commit

DIRECTORY = "directory"


class Files:
    """Values by key, each a file; several processes may use them."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def put(self, key: str, value: Any) -> None:
        self._path(key).write_bytes(pickle.dumps(value.clone() if isinstance(value, torch.Tensor) else value))

    def get(self, key: str) -> Any:
        return pickle.loads(self._path(key).read_bytes())

    def clear(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.directory / quote(key, safe="")


@StorageClientFactory.register("FilesClient")
class FilesClient(StorageKVClient):
    """It returns metadata for each key, and wants it back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.files = Files(config[DIRECTORY])

    def put(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.files.put(key, value)
        return [{"of": key} for key in keys]

    def get(self, keys, shapes=None, dtypes=None, custom_backend_meta=None):
        assert custom_backend_meta == [{"of": key} for key in keys]
        values = [self.files.get(key) for key in keys]
        for value, shape, dtype in zip(values, shapes, dtypes, strict=True):
            assert (shape, dtype) == (
                (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (None, None)
            )
        return values

    def clear(self, keys, custom_backend_meta=None):
        assert custom_backend_meta == [{"of": key} for key in keys]
        for key in keys:
            self.files.clear(key)


@StorageManagerFactory.register("FilesByKey")
class FilesByKeyManager(KVStorageManager):
    def __init__(self, controller_info, config, zmq_context=None):
        config["client_name"] = "FilesClient"
        super().__init__(controller_info, config, zmq_context)


RUNNING: list[str] = []
"""What the backends' providers have started."""


@StorageBootstrapProvider.register_provider("FilesByKey")
def start_files(conf: Any) -> Any:
    """What a queue starts for the backend, and ends with itself."""
    conf.backend.FilesByKey.started = True
    RUNNING.append("FilesByKey")
    return SimpleNamespace(close=lambda: RUNNING.remove("FilesByKey"))


@StorageManagerFactory.register("FilesByHand")
class FilesByHandManager(StorageManager):
    """A whole manager. It announces what it stored, and finds what to clear by the metadata's fields."""

    def __init__(self, controller_info, config):
        super().__init__(controller_info, config)
        self.files = Files(config[DIRECTORY])

    async def put_data(self, data, metadata, data_parser=None):
        for name in data.keys():  # noqa: SIM118 (a TensorDict)
            column = data[name].unbind() if isinstance(data[name], torch.Tensor) else data.get(name).tolist()
            for index, value in zip(metadata.global_indexes, column, strict=True):
                self.files.put(f"{index}@{name}", value)
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, metadata.field_schema)
        return data

    async def get_data(self, metadata):
        columns: dict[str, Any] = {}
        for name in metadata.field_names:
            values = [self.files.get(f"{index}@{name}") for index in metadata.global_indexes]
            if all(isinstance(value, torch.Tensor) and not value.ndim for value in values):
                columns[name] = torch.stack(values)
                continue
            tensors = all(isinstance(value, torch.Tensor) for value in values)
            columns[name] = (
                torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)
            )
        return TensorDict(columns, batch_size=[len(metadata.global_indexes)])

    async def clear_data(self, metadata):
        for index in metadata.global_indexes:
            for name in metadata.field_names:
                self.files.clear(f"{index}@{name}")


def manager_by_hand(queue: Any) -> StorageManager:
    """As programs of the upstream package make one."""
    backend = queue.backend.storage_backend
    return StorageManagerFactory.create(backend, queue.controller.zmq_info, queue.backend[backend], zmq_context=None)


def die_before_commit(client: Any, exit_code: int) -> None:
    """From now on, when the client is about to commit a write."""
    call_many = client.session.call_many

    async def dying(asks: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(request, Commit) for _, request, _ in asks):
            os._exit(exit_code)
        return await call_many(asks, *args, **kwargs)

    client.session.call_many = dying


def simple(**storage: Any) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"num_data_storage_units": 2, **storage}}}


def own(name: str, directory: Path) -> dict[str, Any]:
    return {"backend": {"storage_backend": name, name: {DIRECTORY: str(directory)}}}


def mooncake(directory: Path) -> dict[str, Any]:
    section = {"global_segment_size": 256 << 20, "local_buffer_size": 64 << 20}
    return {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}}


BACKENDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "SimpleStorage": lambda directory: simple(),
    "SimpleStorage, each": lambda directory: {**simple(), "server_processes": "each"},
    "SimpleStorage, spilling": lambda directory: simple(
        memory="24MiB", ssd_offload={"enabled": True, "path": str(directory)}
    ),
    "FilesByKey": lambda directory: own("FilesByKey", directory),
    "FilesByHand": lambda directory: own("FilesByHand", directory),
    "RayStore": lambda directory: {"backend": {"storage_backend": "RayStore"}},
    "MooncakeStore": mooncake,
}
NEEDS = {"RayStore": "ray", "MooncakeStore": "mooncake.store"}


def missing(backend: str) -> str:
    """Why this backend is not available here; empty if it is."""
    try:
        import_module(NEEDS.get(backend, "torch"))
    except ImportError as error:
        return f"{NEEDS[backend]} can't be imported: {error}"
    return ""


@contextmanager
def prepared(backend: str) -> Iterator[None]:
    """A Ray cluster of the test's own, so that one of others on this machine is left alone."""
    if backend != "RayStore":
        yield
        return
    ray = import_module("ray")
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()
