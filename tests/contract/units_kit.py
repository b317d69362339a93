# SPDX-License-Identifier: Apache-2.0
"""A small queue in this process: a controller, and storage units that join it and end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import local_session, until
from tests.local_plane import LocalPlane
from transfer_queue import TransferQueueClient
from transfer_queue import protocol as p
from transfer_queue.client import kv
from transfer_queue.client.get import fetch_request
from transfer_queue.server.front import Front
from transfer_queue.server.janitor import Janitor
from transfer_queue.storage.backends import StorageManagerFactory
from transfer_queue.storage.base import Places, RowsOf
from transfer_queue.storage.shm import write as writes
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.storage.unit.lend import lend_arena
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.session import Session
from transfer_queue.utils.machine import host_id
from transfer_queue.utils.zmq_utils import ZMQServerInfo

PAGE = 4096
ROOM = 100 * PAGE
"""Of each unit."""
CONF = {
    "client": {"timeout_s": 30.0},
    "controller": {"polling_mode": False},
    "backend": {"SimpleStorage": {"put_timeout_s": 60.0}},
    "listen": "tcp://127.0.0.1:1",
}
_names = itertools.count()


class SmallQueue:
    """``close`` ends everything. Units that are joined have the numbers 1, 2, …"""

    def __init__(self, directory: Path | None, inline_nbytes: int, shared: bool = True) -> None:
        """``directory``: of the sockets; None: calls go straight to the handlers, and values travel as frames."""
        self._directory, self._inline_nbytes, self._shared = directory, inline_nbytes, shared
        self._handlers: dict[str, Front] = {}
        self._stack = ExitStack()
        self._ends: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        self.plane = LocalPlane()

    def start(self, *capacities: int | None, own: int = 0) -> SmallQueue:
        """``own``: capacity of a unit in the controller's process; 0: there is none. The others join."""
        server = self._server("controller")
        unit = self._unit("own", own, server) if own else None
        self._has_own = unit is not None
        front = Front(CONF, self.plane, unit, self._janitor)
        self._serve("controller", server, front, self._stack)
        self._stack.callback(front.close)
        if unit is not None:
            self.plane.state.units.add_own("controller", host_id(), [self._address("controller")], own)
        for capacity in capacities:
            self.join(capacity)
        return self

    def join(self, capacity: int | None) -> int:
        """Returns the unit's number."""
        name, stack = f"u{len(self._ends) + 1}", ExitStack()
        server = self._server(name)
        self._serve(name, server, Front({}, None, self._unit(name, capacity, server)), stack)
        session = self.session()
        arguments = (name, host_id(), [self._address(name)], capacity)
        number = int(run_blocking(session.ask(p.JoinUnit, p.Done, *arguments)).value)
        self._ends[number] = (stack.close, session.close)
        self._stack.callback(self.end, number)
        return number

    def stop(self, number: int) -> None:
        """The unit does not answer any more, and its controller does not know yet."""
        self._ends[number][0]()

    def end(self, number: int) -> None:
        """The unit ends, and its controller knows."""
        for step in self._ends[number]:
            step()

    def session(self) -> Session:
        if self._directory is None:
            return local_session(self._handlers)
        session = Session(f"me-{next(_names)}", Peer("controller", self._address("controller")))
        self._stack.callback(session.close)
        return session

    def manager(self, **config: Any) -> SharedMemoryManager:
        manager = StorageManagerFactory.create("SimpleStorage", self.session(), self._settings(config))
        assert isinstance(manager, SharedMemoryManager)
        self._stack.callback(lambda: run_blocking(manager.close()))
        return manager

    def client(self, **config: Any) -> TransferQueueClient:
        info = ZMQServerInfo("controller", "controller", ports={"request_handle_socket": self._address("controller")})
        client = TransferQueueClient(f"me-{next(_names)}", info)
        if self._directory is None:
            client.session.caller.close()
            client.session.caller = self.session().caller
        client._storage_args = ("SimpleStorage", self._settings(config))
        client._make_storage()
        self._stack.callback(client.close)
        return client

    def close(self) -> None:
        self._stack.close()

    def _janitor(self) -> Janitor:
        return Janitor(StorageManagerFactory.create("SimpleStorage", self.session(), self._settings({})))

    def _settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        own = [{"name": "controller", "address": self._address("controller")}]
        several = [{"name": f"u{number}", "address": self._address(f"u{number}")} for number in (1, 2)]
        return {"units": own if self._has_own else several, "inline_nbytes": self._inline_nbytes, **config}

    def _address(self, name: str) -> str:
        return f"local://{name}" if self._directory is None else f"ipc://{self._directory}/{name}"

    def _server(self, name: str) -> SocketServer | None:
        return None if self._directory is None else SocketServer(self._address(name))

    def _unit(self, name: str, capacity: int | None, server: SocketServer | None) -> StorageUnit:
        if server is None:
            return StorageUnit(name, capacity)
        return StorageUnit(name, capacity, lend_arena(server) if self._shared else None, self._inline_nbytes)

    def _serve(self, name: str, server: SocketServer | None, front: Front, stack: ExitStack) -> None:
        for known_as in (name, f"{name} {name}"):  # the second by a client's server information
            self._handlers[known_as] = front
            stack.callback(self._handlers.pop, known_as)
        if server is not None:
            thread = threading.Thread(target=server.serve, args=(front,))
            thread.start()
            stack.callback(thread.join, 10.0)
            stack.callback(server.stop)


def writers_wait_less(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For one unit, before they look for another one."""
    patch.setattr(writes, "_PATIENCE_S", seconds)


def pages(count: int, field: str = "x", first: int = 0) -> TensorDict:
    """Rows of a page each."""
    values = torch.arange(first, first + count * PAGE // 8).view(count, PAGE // 8)
    return TensorDict({field: values}, batch_size=[count])


def write(
    manager: SharedMemoryManager, indexes: range, data: TensorDict | None = None, fresh: bool = False
) -> p.UnitRuns | None:
    """Write and commit a page for each sample. Returns where they lie. ``fresh``: the samples are new."""
    call = manager.session.number()
    columns = manager.prepare(pages(len(indexes)) if data is None else data)
    units = run_blocking(manager.write(call, indexes, columns, fresh=fresh))
    run_blocking(manager.commit(call, units))
    return units


def read(manager: SharedMemoryManager, indexes: range, units: p.UnitRuns | None, field: str = "x") -> torch.Tensor:
    rows, places = RowsOf(indexes, [field]), Places({field: units})
    column: torch.Tensor = run_blocking(manager.read(rows, places, "dense"))[field]
    return column


def held(manager: SharedMemoryManager) -> list[tuple[int, int]]:
    """(values, requests that wait) of each unit, once no write of an ended call is left in any."""

    def is_idle(stats: Any) -> bool:
        return all((unit.leased_nbytes, unit.uncommitted_nbytes, unit.pins) == (0, 0, 0) for unit in stats)

    return [(unit.values, unit.parked) for unit in until(manager, is_idle)]


async def async_put_key(client: TransferQueueClient, number: int, name: str = "k") -> None:
    """Put this number as the key's value and as its tag "v"."""
    rows = await kv.rows_of(kv.one_row({"x": torch.full((PAGE // 8,), number)}), None)
    await kv.batch_put(client, [name], "p", rows, [{"v": number}])


async def async_key(client: TransferQueueClient, name: str = "k") -> tuple[int, int]:
    """(its value, its tag)."""
    values = await kv.batch_get(client, name, "p", "x")
    return int(values["x"][0][0]), (await client.async_kv_list("p"))["p"][name]["v"]


def put_key(client: TransferQueueClient, number: int) -> None:
    run_blocking(async_put_key(client, number))


def key(client: TransferQueueClient) -> tuple[int, int]:
    return run_blocking(async_key(client))


def take(client: TransferQueueClient, count: int, task: str) -> torch.Tensor:
    """The values of the task's next batch, as a stream takes them."""
    fetched = client.fetch_batch(fetch_request(["x"], count, "p", task, None, wait_s=30.0))
    return torch.stack(list(client.take(fetched)["x"].unbind()))


@contextmanager
def freezing(client: TransferQueueClient) -> Iterator[None]:
    """Inside, the values of now are being saved."""
    freeze = p.Freeze(client.session.number(), 5.0)
    run_blocking(client.session.send(freeze, p.Frozen, keep=True))
    yield
    run_blocking(client.session.ask(p.Thaw, p.Cleared, freeze.id))
