# SPDX-License-Identifier: Apache-2.0
"""The path at which programs look for the actor class of a storage unit, to change its options. Loads on first use."""

from __future__ import annotations

from typing import Any

from transfer_queue import storage

_NAMES = ("SimpleStorageUnit", "StorageKeyNotFoundError")
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(storage, name)
