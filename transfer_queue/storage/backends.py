# SPDX-License-Identifier: Apache-2.0
"""Storage backends by name, and how their sections of the configuration are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from transfer_queue.errors import ConfigError
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

Manager = TypeVar("Manager", bound=type[StorageManager])

_backends: dict[str, str | type[StorageManager]] = {
    "SimpleStorage": "transfer_queue.storage.shm.manager:SharedMemoryManager",
    # The former name of the first backend; configurations still use it.
    "AsyncSimpleStorageManager": "transfer_queue.storage.shm.manager:SharedMemoryManager",
}


def register(name: str) -> Callable[[Manager], Manager]:
    """Class decorator: make a ``StorageManager`` available as ``backend.storage_backend: name``.

    Raises:
        TypeError: the class is not a ``StorageManager``.
    """

    def add(cls: Manager) -> Manager:
        if not (isinstance(cls, type) and issubclass(cls, StorageManager)):
            raise TypeError(
                f"{cls!r} can't be registered as storage backend {name!r}: it is no StorageManager subclass"
            )
        _backends[name] = cls
        return cls

    return add


def create(name: str, session: Session, config: Mapping[str, Any]) -> StorageManager:
    """Create the manager of this backend.

    Raises:
        ConfigError: no backend has this name.
    """
    return resolve(name)(session, config)


def resolve(name: str) -> type[StorageManager]:
    """Return the class of this backend."""
    found = _backends.get(name)
    if found is None:
        near = difflib.get_close_matches(str(name), _backends, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no storage backend {name!r}.{hint} Known: {', '.join(sorted(_backends))}.")
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    return found


def section_of(backend: Mapping[str, Any]) -> Any:
    """Return the section of the chosen backend. It has the current name even if the backend was chosen by its former
    one.
    """
    name = backend["storage_backend"]
    return backend[name] if name in backend else backend["SimpleStorage"]


def storage_settings(section: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the section as a plain dict, with ``units`` made from its ``zmq_info`` (name -> server info, or a list).

    Raises:
        ConfigError: there is no ``zmq_info``, so this isn't the configuration of a running queue.
    """
    settings = {str(key): section[key] for key in section}
    servers = settings.pop("zmq_info", None)
    if not servers:
        raise ConfigError("the storage section has no zmq_info: take the configuration that init() returned.")
    infos = [servers[name] for name in servers] if isinstance(servers, Mapping) else list(servers)
    settings["units"] = [_unit(info) for info in infos]
    return {**settings, **more}


def _unit(info: Any) -> dict[str, Any]:
    server = info if isinstance(info, ZMQServerInfo) else ZMQServerInfo.from_dict(info)
    peer = server.peer()
    return {"name": peer.name, "address": peer.address}
