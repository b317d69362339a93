# SPDX-License-Identifier: Apache-2.0
"""Storage backends by name, and how their sections of the configuration are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar

from transfer_queue.errors import UnknownBackendError
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

Manager = TypeVar("Manager", bound=type[StorageManager])

_backends: dict[str, str | type[StorageManager]] = {
    "SimpleStorage": "transfer_queue.storage.shm.shared_memory:SharedMemoryManager",
    # The former name of the first backend; configurations still use it.
    "AsyncSimpleStorageManager": "transfer_queue.storage.shm.shared_memory:SharedMemoryManager",
    "RayStore": "transfer_queue.storage.managers.named:RayStorageManager",
    "MooncakeStore": "transfer_queue.storage.managers.named:MooncakeStorageManager",
    "Yuanrong": "transfer_queue.storage.managers.named:YuanrongStorageManager",
}
_OF_UNITS = ("SimpleStorage", "AsyncSimpleStorageManager")


def register(manager_type: str) -> Callable[[Manager], Manager]:
    """Class decorator: make a ``StorageManager`` available as ``backend.storage_backend: manager_type``.

    Raises:
        TypeError: the class is not a ``StorageManager``.
    """

    def add(cls: Manager) -> Manager:
        if not (isinstance(cls, type) and issubclass(cls, StorageManager)):
            raise TypeError(
                f"{cls!r} can't be registered as storage backend {manager_type!r}: it is no StorageManager subclass"
            )
        _backends[manager_type] = cls
        return cls

    return add


def create(name: str, session: Session | ZMQServerInfo, config: Mapping[str, Any]) -> StorageManager:
    """Create the manager of this backend. ``config``: its section, or what ``storage_settings`` made of it.

    Raises:
        UnknownBackendError: no backend has this name.
    """
    return resolve(name)(session, storage_settings(config) if "zmq_info" in config else config)


class StorageManagerFactory:
    """The table of backends, under the names that users of TransferQueue 0.1 know."""

    register: ClassVar[Callable[[str], Callable[[Any], Any]]] = staticmethod(register)

    @staticmethod
    def create(name: str, controller_info: Any, config: Mapping[str, Any], **_: Any) -> StorageManager:
        """Create the manager of this backend. Other keyword arguments change nothing.

        Raises:
            UnknownBackendError: no backend has this name; an AssertionError, too.
        """
        return create(name, controller_info, config)


def resolve(name: str) -> type[StorageManager]:
    """Return the class of this backend."""
    found = _backends.get(name)
    if found is None:
        near = difflib.get_close_matches(str(name), _backends, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(
            f"no storage backend {name!r}.{hint} Known: {', '.join(sorted(_backends))}. A backend of your own must be "
            f"registered in this process, too: import its module first."
        )
    if isinstance(found, str):
        return resolve_name(found)  # type: ignore[no-any-return]
    return found


def is_of_units(name: str) -> bool:
    """Whether this backend keeps values in storage units alone, which may share the controller's process."""
    return name in _OF_UNITS


def path_of(name: str) -> str | None:
    """``module:class`` of this backend for another process; None if no other process can import it."""
    found = _backends[name]
    if isinstance(found, str):
        return found
    importable = found.__module__ != "__main__" and "<locals>" not in found.__qualname__
    return f"{found.__module__}:{found.__qualname__}" if importable else None


def adopt(name: str, path: str) -> None:
    """Make a backend known that another process has registered."""
    _backends.setdefault(name, path)


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
