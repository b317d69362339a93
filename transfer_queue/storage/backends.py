# SPDX-License-Identifier: Apache-2.0
"""Storage backends by name, in client and server, and how their sections of the configuration are read.

Tables say for a backend which manager a client makes, and what starts its servers, if it has any. Another one has the
clients of key-value stores by the names that sections give them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, TypeAlias, TypeVar

from transfer_queue.errors import UnknownBackendError
from transfer_queue.storage.base import StorageKVClient, StorageManager
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

Made = TypeVar("Made", bound=Callable[..., Any])
Table: TypeAlias = dict[str, Any]
"""By name, what is made or called, or its ``module:name``."""
_HERE = "transfer_queue.storage:"
_CLIENTS = "transfer_queue.storage.clients."

_managers: Table = {
    "SimpleStorage": _HERE + "SimpleStorageManager",
    # The former name of the first backend; configurations still use it.
    "AsyncSimpleStorageManager": _HERE + "AsyncSimpleStorageManager",
    "RayStore": _HERE + "RayStorageManager",
    "MooncakeStore": _HERE + "MooncakeStorageManager",
    "Yuanrong": _HERE + "YuanrongStorageManager",
}
_clients: Table = {name: _HERE + name for name in ("RayStorageClient", "MooncakeStoreClient", "YuanrongStorageClient")}
_providers: Table = {
    "RayStore": _CLIENTS + "ray_client:start_store",
    "MooncakeStore": _CLIENTS + "mooncake_client:start_store",
    "Yuanrong": _HERE + "YuanrongStorageClient",  # which only says why not
}
_OF_UNITS = ("SimpleStorage", "AsyncSimpleStorageManager")


def _register(table: Table, name: str, base: type | None = None) -> Callable[[Made], Made]:
    """Decorator: add to the table. Raises TypeError for what is no subclass of ``base``."""

    def add(made: Made) -> Made:
        if base is not None and not (isinstance(made, type) and issubclass(made, base)):
            raise TypeError(f"{made!r} can't be registered as {name!r}: it is no {base.__name__} subclass")
        table[name] = made
        return made

    return add


def _find(table: Table, name: str) -> Any | None:
    found = table.get(name)
    return resolve_name(found) if isinstance(found, str) else found


class StorageManagerFactory:
    """Backends by name: what a client makes."""

    @staticmethod
    def register(manager_type: str) -> Callable[[Made], Made]:
        """Class decorator: make a ``StorageManager`` available as ``backend.storage_backend: manager_type``.

        Raises:
            TypeError: the class is not a ``StorageManager``.
        """
        return _register(_managers, manager_type, StorageManager)

    @staticmethod
    def create(
        name: str, controller_info: Session | ZMQServerInfo, config: Mapping[str, Any], **_: Any
    ) -> StorageManager:
        """Create the manager of this backend. Other keyword arguments change nothing.

        Args:
            config: Its section, or what ``storage_settings`` made of it.
        Raises:
            UnknownBackendError: no backend has this name; an AssertionError, too.
        """
        return resolve(name)(controller_info, storage_settings(config) if "zmq_info" in config else config)


class StorageClientFactory:
    """Clients of key-value stores by the ``client_name`` of a section."""

    @staticmethod
    def register(client_type: str) -> Callable[[Made], Made]:
        """Class decorator: make a client available under this name.

        Raises:
            TypeError: the class is not a ``StorageKVClient``.
        """
        return _register(_clients, client_type, StorageKVClient)

    @staticmethod
    def create(client_type: str, config: Mapping[str, Any]) -> StorageKVClient:
        """Create the client of this name.

        Raises:
            UnknownBackendError: no client has this name; a ValueError, too.
        """
        made = _find(_clients, client_type)
        if made is None:
            raise UnknownBackendError(f"Unknown StorageClient {client_type!r}. Known: {', '.join(sorted(_clients))}.")
        client: StorageKVClient = made(config)
        return client


class StorageBootstrapProvider:
    """What starts a backend's own servers when a queue starts, by the name of the backend. Most need none.

    A provider gets the whole configuration, which it may complete, and returns what it started, or None. That is ended
    with the queue: by its ``close()``, if it has one.
    """

    @staticmethod
    def register_provider(name: str) -> Callable[[Made], Made]:
        """Decorator: call this function when a queue with this backend starts."""
        return _register(_providers, name)

    @staticmethod
    def get_provider(name: str) -> Callable[[Any], Any] | None:
        """The backend's provider; None if it needs none."""
        return _find(_providers, name)


def resolve(name: str) -> type[StorageManager]:
    """Return the class of this backend."""
    found: type[StorageManager] | None = _find(_managers, name)
    if found is None:
        near = difflib.get_close_matches(str(name), _managers, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(
            f"no storage backend {name!r}.{hint} Known: {', '.join(sorted(_managers))}. A backend of your own must be "
            f"registered in this process, too: import its module first."
        )
    return found


def is_of_units(name: str) -> bool:
    """Whether this backend keeps values in storage units alone, which may share the controller's process."""
    return name in _OF_UNITS


def path_of(name: str) -> str | None:
    """``module:class`` of this backend for another process; None if no other process can import it."""
    found = _managers[name]
    if isinstance(found, str):
        return found
    importable = found.__module__ != "__main__" and "<locals>" not in found.__qualname__
    return f"{found.__module__}:{found.__qualname__}" if importable else None


def adopt(name: str, path: str) -> None:
    """Make a backend known that another process has registered."""
    _managers.setdefault(name, path)


def section_of(backend: Mapping[str, Any]) -> Any:
    """Return the section of the chosen backend. It has the current name even if the backend was chosen by its former
    one.
    """
    name = backend["storage_backend"]
    if name in _OF_UNITS:
        return backend[name] if name in backend else backend["SimpleStorage"]
    return backend.get(name) or {}


def storage_settings(section: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the section as a plain dict, with ``units`` made from its ``zmq_info`` (name -> server info, or a list) if
    it has one.
    """
    settings = {str(key): section[key] for key in section}
    servers = settings.pop("zmq_info", None)
    if servers:
        infos = [servers[name] for name in servers] if isinstance(servers, Mapping) else list(servers)
        settings["units"] = [_unit(info) for info in infos]
    return {**settings, **more}


def _unit(info: Any) -> dict[str, Any]:
    server = info if isinstance(info, ZMQServerInfo) else ZMQServerInfo.from_dict(info)
    peer = server.peer()
    return {"name": peer.name, "address": peer.address}
