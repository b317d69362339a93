# SPDX-License-Identifier: Apache-2.0
"""A server's address, plain and picklable, the same for controllers and storage units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transfer_queue.transport.base import Peer


class ZMQServerInfo(msgspec.Struct):
    """One server. ``ports`` maps the name of a socket to its full address."""

    # Not a dataclass, because OmegaConf would convert one inside a configuration.

    role: str
    id: str
    ip: str = "localhost"
    ports: dict[str, str] = {}  # each server gets its own: the struct copies defaults
    pid: int | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        self.ports = dict(self.ports)

    def __hash__(self) -> int:
        return hash((self.role, self.id, tuple(self.ports.values())))

    def to_addr(self, port_name: str) -> str:
        """The address of a socket. Raises KeyError that lists the known ones."""
        if port_name not in self.ports:
            raise KeyError(f"{self.role} {self.id} has no socket {port_name!r}, only {', '.join(self.ports)}.")
        return self.ports[port_name]

    def to_dict(self) -> dict[str, Any]:
        return {**msgspec.structs.asdict(self), "ports": dict(self.ports)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ZMQServerInfo:
        return cls(**{str(key): data[key] for key in data})

    def peer(self) -> Peer:
        """The server's first socket as the transport's ``Peer``."""
        name = self.id if self.id == self.role else f"{self.role} {self.id}"
        return Peer(name, next(iter(self.ports.values())))


def process_zmq_server_info(handlers: Any) -> Any:
    """Ask servers that are Ray actors for their addresses.

    Args:
        handlers: An actor that has ``get_zmq_server_info``, or a mapping of names to such actors.
    Returns:
        Its ZMQServerInfo, or a dict of them by the same names.
    """
    import ray

    if isinstance(handlers, Mapping):
        infos = ray.get([handler.get_zmq_server_info.remote() for handler in handlers.values()])
        return dict(zip(handlers, infos, strict=True))
    return ray.get(handlers.get_zmq_server_info.remote())
