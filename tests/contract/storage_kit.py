# SPDX-License-Identifier: Apache-2.0
"""Storage backends that the tests run against, and how to compare what comes back."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from tests.local_caller import LocalCaller
from transfer_queue.server.front import Front
from transfer_queue.storage.backends import StorageManagerFactory
from transfer_queue.storage.base import RowsOf, StorageManager
from transfer_queue.storage.messages import INLINE_NBYTES, UnitStats
from transfer_queue.storage.unit.lend import lend_arena
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Handler, Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.session import Session


@dataclass
class Backend:
    """One running storage: a manager, what its servers hold, how to make more managers, how to end the servers."""

    manager: StorageManager
    held_nbytes: Callable[[], int]
    another: Callable[..., StorageManager]
    end: Callable[[], None] = lambda: None

    def put(self, data, indexes, parser=None) -> TensorDict:
        if isinstance(data, dict):
            data = TensorDict(data, batch_size=[len(indexes)])
        return run_blocking(self.manager.put_data(data, meta(indexes, data.keys()), parser))

    def get(self, indexes, *fields: str, layout: str | None = None) -> TensorDict:
        return run_blocking(self.manager.read(RowsOf(indexes, fields), None, layout))

    def column(self, indexes, field: str, layout: str | None = None):
        return self.get(indexes, field, layout=layout).get(field)


async def get_rows(manager: StorageManager, indexes: Any, fields: Any, where: Any = None, layout: Any = None) -> Any:
    """Read these rows without metadata."""
    return await manager.read(RowsOf(indexes, fields), where, layout)


def blocking(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Drive what a manager's coroutine does in this thread, as the blocking twin of a verb does."""
    return run_blocking(coroutine)


def meta(indexes, fields=()):
    return SimpleNamespace(global_indexes=list(indexes), field_names=sorted(fields))


def simple(capacity_bytes: int | None = None) -> Backend:
    """A unit in this process; values travel as frames."""
    unit = StorageUnit("u0", capacity_bytes)
    handlers = {"u0": Front({}, None, unit)}
    peers = [{"name": "u0", "address": "local://u0"}]

    def another(**config) -> StorageManager:
        return StorageManagerFactory.create("SimpleStorage", local_session(handlers), {"units": peers, **config})

    return Backend(another(), lambda: unit.stats().held_nbytes, another)


_names = itertools.count()


def local_session(handlers: Mapping[str, Handler]) -> Session:
    """A session whose calls go straight to these handlers."""
    name = f"local-{next(_names)}"
    session = Session(name, Peer("controller", "local://controller"))
    session.caller.close()
    session.caller = LocalCaller(handlers, name)  # type: ignore[assignment]
    return session


@contextmanager
def hosted(
    directory: Path, inline_nbytes: int, capacity_bytes: int | None = None, shared: bool = True
) -> Iterator[Backend]:
    """A unit with an arena (``shared`` False: without), behind a server in a thread of its own."""
    with ExitStack() as stack:
        servers = ExitStack()
        server = SocketServer(f"ipc://{directory}/u0")
        unit = StorageUnit("u0", capacity_bytes, lend_arena(server) if shared else None, inline_nbytes)
        thread = threading.Thread(target=server.serve, args=(Front({}, None, unit),))
        thread.start()
        servers.callback(thread.join, 10.0)
        servers.callback(server.stop)
        peers = [{"name": "u0", "address": server.address}]

        def another(**config) -> StorageManager:
            session = Session("another", Peer("controller", f"ipc://{directory}/controller"))
            stack.callback(session.close)
            settings = {"units": peers, "inline_nbytes": inline_nbytes, **config}
            manager = StorageManagerFactory.create("SimpleStorage", session, settings)
            stack.callback(lambda: run_blocking(manager.close()))
            return manager

        stack.callback(servers.close)
        manager = another()

        def held_nbytes() -> int:
            return sum(unit.held_nbytes for unit in run_blocking(manager.stats()))

        yield Backend(manager, held_nbytes, another, servers.close)


BACKENDS = {
    "frames": lambda path: nullcontext(simple()),
    "arena": lambda path: hosted(path, INLINE_NBYTES),
    "arena, all of it": lambda path: hosted(path, 0),
}


ARENAS = [name for name in BACKENDS if name.startswith("arena")]


def until(manager: StorageManager, wanted: Callable[[list[UnitStats]], bool], wait_s: float = 10.0) -> list[UnitStats]:
    """Ask the units until they are as wanted: what expects no answer arrives a little later."""
    deadline = time.monotonic() + wait_s
    while not wanted(stats := run_blocking(manager.stats())):
        assert time.monotonic() < deadline, stats
    return stats


def put_and_clear_in_threads(
    make: Callable[[], StorageManager], put: Callable[[StorageManager, range], object], count: int
) -> list[int]:
    """Four threads put so many samples ten times each, and clear them. Returns the turns in which a put was done."""
    turns, puts = itertools.count(), list[int]()

    def produce() -> None:
        manager = make()
        for turn in itertools.islice(turns, 10):
            rows = range(count * turn, count * turn + count)
            put(manager, rows)
            puts.append(turn)
            run_blocking(manager.clear_rows(rows))

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50.0)
    return sorted(puts)


def rows(column) -> list:
    """One entry per sample, whatever the column is."""
    return column.tolist() if isinstance(column, NonTensorStack) else list(column.unbind())


def assert_same(got, expected) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert raw(got) == raw(expected)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    else:
        assert got == expected


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that differ from element to element; 0 and 1 where only those are valid."""
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.arange(math.prod(shape) * size, dtype=torch.int64).to(torch.uint8)
    return (data % 2 if dtype == torch.bool else data).view(dtype).view(shape)
