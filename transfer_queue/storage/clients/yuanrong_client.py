# SPDX-License-Identifier: Apache-2.0
"""YuanrongStorageClient: a name that a client's configuration may have, for a store that this package can't reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import BackendUnavailableError


class YuanrongStorageClient:
    """Raises BackendUnavailableError when it is created."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        raise BackendUnavailableError(
            "storage backend 'Yuanrong' is not available: its data system needs packages and devices that this package "
            "was never tested with. Choose SimpleStorage, RayStore or MooncakeStore, or register a StorageKVClient of "
            "your own (transfer_queue.storage.clients.StorageClientFactory)."
        )
