# SPDX-License-Identifier: Apache-2.0
"""StorageKVClient: what a key-value store must offer so that a queue can keep its values there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

from transfer_queue.errors import UnknownBackendError

Client = TypeVar("Client", bound="type[StorageKVClient]")


class StorageKVClient(ABC):
    """A flat store of values by key. Its methods block; they may be called from several threads.

    Values are tensors without a batch dimension, or plain objects.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is the backend's section of the configuration."""
        self.config = config

    @abstractmethod
    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store these values, replacing existing ones.

        Returns:
            None, or something plain for each key that ``get`` and ``clear`` need besides the key.
        """

    @abstractmethod
    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Return the values of these keys, in their order; None for a tensor that is not there.

        Args:
            shapes: Shape of each tensor; None for an object.
            dtypes: ``torch.dtype`` of each tensor; None for an object.
            custom_backend_meta: What ``put`` returned for each key.
        """

    @abstractmethod
    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        """Delete these keys. Some may not be there: their put was interrupted."""

    def close(self) -> None:
        """Release what the client opened; stored values stay."""
        return


class StorageClientFactory:
    """Clients by the ``client_name`` of a section."""

    _clients: dict[str, str | type[StorageKVClient]] = {  # noqa: RUF012 (it is meant to be shared)
        "RayStorageClient": "transfer_queue.storage.clients.ray_client:RayStorageClient",
        "MooncakeStoreClient": "transfer_queue.storage.clients.mooncake_client:MooncakeStoreClient",
        "YuanrongStorageClient": "transfer_queue.storage.clients.yuanrong_client:YuanrongStorageClient",
    }

    @classmethod
    def register(cls, client_type: str) -> Callable[[Client], Client]:
        """Class decorator: make a client available under this name.

        Raises:
            TypeError: the class is not a ``StorageKVClient``.
        """

        def add(client: Client) -> Client:
            if not (isinstance(client, type) and issubclass(client, StorageKVClient)):
                raise TypeError(
                    f"{client!r} can't be registered as client {client_type!r}: it is no StorageKVClient subclass"
                )
            cls._clients[client_type] = client
            return client

        return add

    @classmethod
    def create(cls, client_type: str, config: Mapping[str, Any]) -> StorageKVClient:
        """Create the client of this name.

        Raises:
            UnknownBackendError: no client has this name; a ValueError, too.
        """
        found = cls._clients.get(client_type)
        if found is None:
            raise UnknownBackendError(
                f"Unknown StorageClient {client_type!r}. Known: {', '.join(sorted(cls._clients))}."
            )
        client: type[StorageKVClient] = resolve_name(found) if isinstance(found, str) else found
        return client(config)
