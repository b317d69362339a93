# SPDX-License-Identifier: Apache-2.0
"""StorageBootstrapProvider: what starts a backend's own servers when a queue starts."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, TypeVar

Provider = TypeVar("Provider", bound=Callable[[Any], Any])


class StorageBootstrapProvider:
    """Functions by the name of a backend. Most backends need none.

    A provider gets the whole configuration, which it may complete, and returns what it started, or None. That is ended
    with the queue: by its ``close()``, if it has one.
    """

    _providers: dict[str, str | Callable[[Any], Any]] = {  # noqa: RUF012 (it is meant to be shared)
        "RayStore": "transfer_queue.storage.clients.ray_client:start_store",
        "MooncakeStore": "transfer_queue.storage.clients.mooncake_client:start_store",
        "Yuanrong": "transfer_queue.storage.clients.yuanrong_client:YuanrongStorageClient",  # which only says why not
    }

    @classmethod
    def register_provider(cls, name: str) -> Callable[[Provider], Provider]:
        """Decorator: call this function when a queue with this backend starts."""

        def add(provider: Provider) -> Provider:
            cls._providers[name] = provider
            return provider

        return add

    @classmethod
    def get_provider(cls, name: str) -> Callable[[Any], Any] | None:
        """The backend's provider; None if it needs none."""
        found = cls._providers.get(name)
        return resolve_name(found) if isinstance(found, str) else found
