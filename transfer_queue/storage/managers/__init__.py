# SPDX-License-Identifier: Apache-2.0
"""Storage managers, under the import path that users of TransferQueue 0.1 know. Names load on first use."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "AsyncSimpleStorageManager", "KVStorageManager", "MooncakeStorageManager", "RayStorageManager", "StorageManager",
    "StorageManagerFactory", "YuanrongStorageManager",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transfer_queue import storage

    return getattr(storage, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
