# SPDX-License-Identifier: Apache-2.0
"""A server's address, plain and picklable, the same for controllers and storage units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.transport.base import Peer


class ZMQServerInfo:
    """One server. ``ports`` maps the name of a socket to its full address."""

    # Not a dataclass, because OmegaConf would convert one inside a configuration.

    def __init__(
        self,
        role: str,
        id: str,
        ip: str = "localhost",
        ports: Mapping[str, str] | None = None,
        pid: int | None = None,
        key_file: str | None = None,
    ) -> None:
        self.role = role
        self.id = id
        self.ip = ip
        self.ports = dict(ports or {})
        self.pid = pid
        self.key_file = key_file

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZMQServerInfo) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.role, self.id, tuple(self.ports.values())))

    def __repr__(self) -> str:
        return f"ZMQServerInfo({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_addr(self, port_name: str) -> str:
        """The address of a socket. Raises KeyError that lists the known ones."""
        if port_name not in self.ports:
            raise KeyError(f"{self.role} {self.id} has no socket {port_name!r}, only {', '.join(self.ports)}.")
        return self.ports[port_name]

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.id,
            "ip": self.ip,
            "ports": dict(self.ports),
            "pid": self.pid,
            "key_file": self.key_file,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ZMQServerInfo:
        return cls(**{str(key): data[key] for key in data})

    def peer(self) -> Peer:
        """The server's first socket as the transport's ``Peer``."""
        name = self.id if self.id == self.role else f"{self.role} {self.id}"
        return Peer(name, next(iter(self.ports.values())))


def local_server(role: str, server_id: str, socket_name: str, address: str, pid: int) -> ZMQServerInfo:
    """A server that is a process of this host."""
    return ZMQServerInfo(role, server_id, "localhost", {socket_name: address}, pid)


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
