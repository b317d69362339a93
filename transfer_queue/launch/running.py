# SPDX-License-Identifier: Apache-2.0
"""A running queue as this process sees it: its configuration, and an observer, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from transfer_queue import protocol as p
from transfer_queue.config import client_id, merge, queue_key_file
from transfer_queue.errors import ProtocolError
from transfer_queue.launch.local import with_servers
from transfer_queue.storage.backends import StorageManagerFactory, section_of, storage_settings
from transfer_queue.storage.shm.choose import reachable
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo


class Observer:
    """Sees a running queue, and may end clients and tasks there. It moves no values, so it needs no torch.

    Examples:
        >>> observer = tq.Observer(tq.init().address)
        >>> observer.get_stats()["partitions"]
        {}
        >>> observer.close()
    """

    def __init__(self, address: str) -> None:
        """The file that TQ_KEY_FILE names has the keys of a queue on another host.

        Raises:
            QueueUnreachableError: no queue answers at this address.
        """
        conf = running_at(address, queue_key_file())
        info, backend = conf.controller.zmq_info, conf.backend
        self.session = Session(client_id(), info.peer(), info.key_file)
        settings = storage_settings(section_of(backend), timeout_s=conf.client.timeout_s)
        self._storage = StorageManagerFactory.create(backend.storage_backend, self.session, settings)
        self.conf = conf

    async def async_get_stats(self) -> dict[str, Any]:
        """As the client's verb of this name."""
        return await self.session.stats()

    async def async_get_storage_stats(self) -> list[dict[str, Any]]:
        """As the client's verb of this name."""
        return await self._storage.numbers()

    def get_stats(self) -> dict[str, Any]:
        """As the client's verb of this name."""
        return run_blocking(self.async_get_stats())

    def get_storage_stats(self) -> list[dict[str, Any]]:
        """As the client's verb of this name."""
        return run_blocking(self.async_get_storage_stats())

    def evict_client(self, client: str, *, unit: bool = False) -> bool:
        """As the client's verb of this name."""
        return bool(run_blocking(self.session.ask(p.EvictClient, p.Done, client, unit)).value)

    def forget_task(self, task_name: str) -> int:
        """As the client's verb of this name."""
        return int(run_blocking(self.session.ask(p.ForgetTask, p.Done, task_name)).value)

    def close(self) -> None:
        """End its session. Idempotent."""
        run_blocking(self._storage.close())
        self.session.close()


def running_at(address: str, key_file: str | None = None) -> Any:
    """The configuration of the queue at this address, as this process can use it.

    Raises:
        QueueUnreachableError: no queue answers.
    """
    info = ZMQServerInfo("controller", "controller", ports={"request_handle_socket": address}, key_file=key_file)
    with closing(Session(client_id(), info.peer(), key_file)) as session:
        plain = run_blocking(session.plain_config())
        near = _own_socket(session) if address.startswith("tcp://") else None
    conf = _seen_from_here(_with_objects(plain), near or address, key_file)
    if near is not None:
        conf.address = address
    return conf


def _own_socket(session: Session) -> str | None:
    """The controller's socket for programs of its own host, if this is one: values take shared memory there."""
    try:
        units = run_blocking(session.ask(p.ListUnits, p.Units)).units
    except ProtocolError:
        return None  # a server that joined the queue: it only says where the controller is
    own = next((reachable(unit) for unit in units if unit.number == 0), "")
    return own if own.startswith("ipc://") else None


def _with_objects(plain: Mapping[str, Any]) -> Any:
    """The received configuration, with server infos as objects again."""
    conf = merge(plain)
    conf.controller.zmq_info = ZMQServerInfo.from_dict(conf.controller.zmq_info)
    for name in dict.fromkeys(("SimpleStorage", str(conf.backend.storage_backend))):
        section = conf.backend.get(name)
        if section and section.get("zmq_info"):
            section.zmq_info = {unit: ZMQServerInfo.from_dict(info) for unit, info in section.zmq_info.items()}
    return conf


def _seen_from_here(conf: Any, address: str, key_file: str | None) -> Any:
    """Replace the servers' addresses by the one joined, because another host can't reach their local sockets.

    A server that has joined the queue itself names the controller's address, which is for all hosts.
    """
    conf.key_file = key_file or conf.key_file
    controller = conf.controller.zmq_info
    if not address.startswith("tcp://") or controller.to_addr("request_handle_socket").startswith("tcp://"):
        if conf.listen is not None:
            controller.key_file = conf.key_file  # storage units on other hosts need it
        return conf
    return with_servers(conf, address, dict.fromkeys(conf.backend.SimpleStorage.zmq_info, address), {}, key_file)
