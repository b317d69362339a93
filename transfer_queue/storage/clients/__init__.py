# SPDX-License-Identifier: Apache-2.0
"""Clients of key-value stores. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "StorageKVClient": "base",
    "StorageClientFactory": "base",
    "RayStorageClient": "ray_client",
    "MooncakeStoreClient": "mooncake_client",
    "YuanrongStorageClient": "yuanrong_client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
