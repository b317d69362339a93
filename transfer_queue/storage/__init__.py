# SPDX-License-Identifier: Apache-2.0
"""Storage, in client and server: holds values by index and field, knows nothing of tasks. Names load on first use."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

_HOME = {
    "KVStorageManager": "transfer_queue.storage.managers.base:KVStorageManager",
    "MooncakeStorageManager": "transfer_queue.storage.managers.named:MooncakeStorageManager",
    "RayStorageManager": "transfer_queue.storage.managers.named:RayStorageManager",
    "StorageManager": "transfer_queue.storage.base:StorageManager",
    "StorageManagerFactory": "transfer_queue.storage.backends:StorageManagerFactory",
    "YuanrongStorageManager": "transfer_queue.storage.managers.named:YuanrongStorageManager",
    "SimpleStorageManager": "transfer_queue.storage.shm.shared_memory:SharedMemoryManager",
    "AsyncSimpleStorageManager": "transfer_queue.storage.shm.shared_memory:SharedMemoryManager",
    "SimpleStorageUnit": "transfer_queue.controller:SimpleStorageUnit",
    "StorageKeyNotFoundError": "transfer_queue.errors:StorageKeyNotFoundError",
}
__all__ = sorted(_HOME)
_HOME |= {  # names of ``storage.clients``
    "StorageKVClient": "transfer_queue.storage.base:StorageKVClient",
    "StorageClientFactory": "transfer_queue.storage.backends:StorageClientFactory",
    "RayStorageClient": "transfer_queue.storage.clients.ray_client:RayStorageClient",
    "MooncakeStoreClient": "transfer_queue.storage.clients.mooncake_client:MooncakeStoreClient",
    "YuanrongStorageClient": "transfer_queue.storage.clients.yuanrong_client:YuanrongStorageClient",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(_HOME[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
