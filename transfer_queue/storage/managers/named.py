# SPDX-License-Identifier: Apache-2.0
"""The key-value backends of this package, in the client: which StorageKVClient each of them uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transfer_queue.storage.managers.base import KVStorageManager


class _NamedManager(KVStorageManager):
    client_name: ClassVar[str]

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": self.client_name}, zmq_context)


class RayStorageManager(_NamedManager):
    """Values are objects of Ray's object store; an actor owns them."""

    client_name = "RayStorageClient"


class MooncakeStorageManager(_NamedManager):
    """Values lie in the memory that the processes of a Mooncake store contribute."""

    client_name = "MooncakeStoreClient"


class YuanrongStorageManager(_NamedManager):
    """Not available: its package is not public."""

    client_name = "YuanrongStorageClient"
