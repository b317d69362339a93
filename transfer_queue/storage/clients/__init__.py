# SPDX-License-Identifier: Apache-2.0
"""Key-value stores, as a queue's clients reach them. Names load on first use."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

_HOME = {
    "StorageKVClient": "transfer_queue.storage.base",
    "StorageClientFactory": "transfer_queue.storage.backends",
    "RayStorageClient": "transfer_queue.storage.clients.ray_client",
    "MooncakeStoreClient": "transfer_queue.storage.clients.mooncake_client",
    "YuanrongStorageClient": "transfer_queue.storage.clients.yuanrong_client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{_HOME[name]}:{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
