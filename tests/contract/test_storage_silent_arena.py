# SPDX-License-Identifier: Apache-2.0
"""A unit whose arena socket takes a client in and says nothing: what waits for it, and what does not."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import Backend, hosted, meta
from transfer_queue.storage.base import RowsOf
from transfer_queue.storage.messages import PAGE_NBYTES
from transfer_queue.storage.shm.connect import UnitConnection
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.transport.base import Peer

WAIT_S = 8.0  # less than a client waits for what it is never told


@pytest.fixture
def door(tmp_path: Path) -> Iterator[socket.socket]:
    """Where the arena of unit u0 would be lent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(tmp_path / "u0.arena"))
        door.listen()
        door.settimeout(WAIT_S)
        yield door


@pytest.fixture
def storage(door: socket.socket, tmp_path: Path) -> Iterator[Backend]:
    """One unit that holds samples 0 to 63. It answers all requests."""
    with hosted(tmp_path, 0, shared=False) as storage:
        data = TensorDict({"x": torch.arange(64)}, batch_size=[64])
        asyncio.run(storage.another(arena=False).put_data(data, meta(range(64))))
        yield storage


async def put(manager: SharedMemoryManager) -> None:
    await manager.put_data(TensorDict({"x": torch.arange(64)}, batch_size=[64]), meta(range(64)))


async def get(manager: SharedMemoryManager) -> None:
    assert torch.equal((await manager.read(RowsOf(range(64), ["x"]), None, None))["x"], torch.arange(64))


async def stored(manager: SharedMemoryManager) -> None:
    async with manager.stored(range(64), ["x"]) as parts:
        assert list(parts) == ["x"]


async def path(manager: SharedMemoryManager) -> str:
    (unit,) = await manager.stats()
    return unit.path


@pytest.mark.parametrize("first", [put, get, stored], ids=lambda first: first.__name__)
def test_an_event_loop_keeps_turning_while_the_first_call_waits_for_it(
    storage: Backend, door: socket.socket, first: Callable[[Any], Awaitable[None]]
) -> None:
    manager: Any = storage.manager
    door.setblocking(False)

    async def story() -> list[Any]:
        call = asyncio.ensure_future(first(manager))
        connection, _ = await asyncio.get_running_loop().sock_accept(door)
        with connection:
            meanwhile = [await path(manager), await path(manager), call.done()]
        await call
        return [*meanwhile, await path(manager)]

    assert asyncio.run(asyncio.wait_for(story(), WAIT_S)) == ["undecided", "undecided", False, "frames"]


def test_two_calls_that_come_first_ask_once(storage: Backend, door: socket.socket) -> None:
    manager: Any = storage.manager
    door.setblocking(False)

    async def story() -> None:
        calls = [asyncio.ensure_future(first(manager)) for first in (get, put)]
        connection, _ = await asyncio.get_running_loop().sock_accept(door)
        with connection:
            assert await path(manager) == "undecided"
        await asyncio.gather(*calls)
        with pytest.raises(BlockingIOError):
            door.accept()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_closing_a_connection_does_not_wait_and_an_arena_that_comes_later_is_unmapped(
    door: socket.socket, tmp_path: Path
) -> None:
    connection_to_unit = UnitConnection(Peer("u0", f"ipc://{tmp_path}/u0"))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(connection_to_unit.arena))
    thread.start()
    connection, _ = door.accept()
    with connection:
        connection_to_unit.close()
        assert select.select([connection], [], [], 0)[0] == [], "it waits to be told"
        lent = os.memfd_create("late")
        os.truncate(lent, 2 * PAGE_NBYTES)
        socket.send_fds(connection, [b"\0"], [lent, lent])
        os.close(lent)
        thread.join(WAIT_S)
        connection.settimeout(WAIT_S)
        assert (found, connection.recv(1)) == ([None], b""), "gone"
