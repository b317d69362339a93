# SPDX-License-Identifier: Apache-2.0
"""A storage backend of your own: each value is a file."""

import tempfile
from pathlib import Path

import torch

import transfer_queue as tq
from transfer_queue.storage import KVStorageManager, StorageManagerFactory
from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient


@StorageClientFactory.register("FileClient")
class FileClient(StorageKVClient):
    """Values by key, a file each. ``config`` is the backend's section of the configuration."""

    def put(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            torch.save(value, self._path(key))

    def get(self, keys, shapes=None, dtypes=None, custom_backend_meta=None):
        return [torch.load(self._path(key)) for key in keys]

    def clear(self, keys, custom_backend_meta=None):
        for key in keys:
            self._path(key).unlink(missing_ok=True)  # the put may have been interrupted

    def _path(self, key: str) -> Path:
        return Path(self.config["directory"]) / f"{key}.pt"


@StorageManagerFactory.register("FileStore")
class FileStore(KVStorageManager):
    """The manager: it only names the client."""

    def __init__(self, controller_info, config, zmq_context=None):
        super().__init__(controller_info, {**config, "client_name": "FileClient"}, zmq_context)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        tq.init({"backend": {"storage_backend": "FileStore", "FileStore": {"directory": directory}}})
        client = tq.get_client()
        meta = client.put({"x": torch.arange(6).reshape(3, 2)}, partition_id="train")
        assert len(list(Path(directory).iterdir())) == 3  # a file per value
        print(client.get_data(meta, layout="dense")["x"])
        client.clear_partition("train")
        assert not list(Path(directory).iterdir())
        tq.close()


if __name__ == "__main__":
    main()
