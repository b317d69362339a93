# SPDX-License-Identifier: Apache-2.0
"""The key-value backends of this package, in the client: which StorageKVClient each of them uses."""

from __future__ import annotations

from transfer_queue.storage.managers.base import KVStorageManager


class RayStorageManager(KVStorageManager):
    """Values are objects of Ray's object store; an actor owns them."""

    client_name = "RayStorageClient"


class MooncakeStorageManager(KVStorageManager):
    """Values lie in the memory that the processes of a Mooncake store contribute."""

    client_name = "MooncakeStoreClient"


class YuanrongStorageManager(KVStorageManager):
    """Not available: its package is not public."""

    client_name = "YuanrongStorageClient"
