# SPDX-License-Identifier: Apache-2.0
"""Storage backends by name, in client and server, and how their sections of the configuration are read.

One table says for a backend which manager a client makes, and what starts its servers, if it has any. Clients of
key-value stores have entries of their own, by the names that sections give them.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, TypeVar

from transfer_queue.errors import UnknownBackendError
from transfer_queue.storage.base import StorageKVClient, StorageManager
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

Made = TypeVar("Made", bound=Callable[..., Any])
_HERE = "transfer_queue.storage:"
_CLIENTS = "transfer_queue.storage.clients."


@dataclass(slots=True)
class _Entry:
    """What has this name: each a class or function, or its ``module:name``; None: there is none.

    ``manager``: what a client of the queue makes. ``client``: of a key-value store. ``provider``: starts servers.
    """

    manager: Any = None
    client: Any = None
    provider: Any = None


_table: defaultdict[str, _Entry] = defaultdict(_Entry, {
    "SimpleStorage": _Entry(_HERE + "SimpleStorageManager"),
    # The former name of the first backend; configurations still use it.
    "AsyncSimpleStorageManager": _Entry(_HERE + "AsyncSimpleStorageManager"),
    "RayStore": _Entry(_HERE + "RayStorageManager", provider=_CLIENTS + "ray_client:start_store"),
    "MooncakeStore": _Entry(_HERE + "MooncakeStorageManager", provider=_CLIENTS + "mooncake_client:start_store"),
    # Its provider only says why not.
    "Yuanrong": _Entry(_HERE + "YuanrongStorageManager", provider=_HERE + "YuanrongStorageClient"),
    **{name: _Entry(client=_HERE + name)
       for name in ("RayStorageClient", "MooncakeStoreClient", "YuanrongStorageClient")},
})  # fmt: skip
_OF_UNITS = ("SimpleStorage", "AsyncSimpleStorageManager")


def _register(part: str, name: str, base: type | None = None) -> Callable[[Made], Made]:
    """Decorator: add to the table. Raises TypeError for what is no subclass of ``base``."""

    def add(made: Made) -> Made:
        if base is not None and not (isinstance(made, type) and issubclass(made, base)):
            raise TypeError(f"{made!r} can't be registered as {name!r}: it is no {base.__name__} subclass")
        setattr(_table[name], part, made)
        return made

    return add


def _find(part: str, name: str) -> Any | None:
    found = getattr(_table.get(name), part, None)
    return resolve_name(found) if isinstance(found, str) else found


def _names(part: str) -> list[str]:
    return sorted(name for name, entry in _table.items() if getattr(entry, part) is not None)


class StorageManagerFactory:
    """Backends by name: what a client makes."""

    @staticmethod
    def register(manager_type: str) -> Callable[[Made], Made]:
        """Class decorator: make a ``StorageManager`` available as ``backend.storage_backend: manager_type``.

        Raises:
            TypeError: the class is not a ``StorageManager``.
        """
        return _register("manager", manager_type, StorageManager)

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
        return _register("client", client_type, StorageKVClient)

    @staticmethod
    def create(client_type: str, config: Mapping[str, Any]) -> StorageKVClient:
        """Create the client of this name.

        Raises:
            UnknownBackendError: no client has this name; a ValueError, too.
        """
        made = _find("client", client_type)
        if made is None:
            raise UnknownBackendError(f"Unknown StorageClient {client_type!r}. Known: {', '.join(_names('client'))}.")
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
        return _register("provider", name)

    @staticmethod
    def get_provider(name: str) -> Callable[[Any], Any] | None:
        """The backend's provider; None if it needs none."""
        return _find("provider", name)


def resolve(name: str) -> type[StorageManager]:
    """Return the class of this backend."""
    found: type[StorageManager] | None = _find("manager", name)
    if found is None:
        near = difflib.get_close_matches(str(name), _names("manager"), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(
            f"no storage backend {name!r}.{hint} Known: {', '.join(_names('manager'))}. A backend of your own must be "
            f"registered in this process, too: import its module first."
        )
    return found


def is_of_units(name: str) -> bool:
    """Whether this backend keeps values in storage units alone, which may share the controller's process."""
    return name in _OF_UNITS


def path_of(name: str) -> str | None:
    """``module:class`` of this backend for another process; None if no other process can import it."""
    found = _table[name].manager
    if isinstance(found, str):
        return found
    importable = found.__module__ != "__main__" and "<locals>" not in found.__qualname__
    return f"{found.__module__}:{found.__qualname__}" if importable else None


def adopt(name: str, path: str) -> None:
    """Make a backend known that another process has registered."""
    if _table[name].manager is None:
        _table[name].manager = path


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
