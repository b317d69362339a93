# SPDX-License-Identifier: Apache-2.0
"""A handler that echoes and parks, behind every transport, and what a process holds open."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.local_caller import LocalCaller
from transfer_queue.transport.base import NOBODY_WAITS, Outgoing, Peer, PeerCall
from transfer_queue.transport.blocking import PendingCall, run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.framing import encode
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.tcp_wire import make_keys

JOIN_S = 10.0
_numbers = itertools.count(1)
KEYS = make_keys()
SOCKETS = ["unix", "tcp"]


def until(wanted: Callable[[], bool], found: Callable[[], object] = str) -> None:
    """Look until it is so; ``found`` says what is instead."""
    deadline = time.monotonic() + JOIN_S
    while not wanted():
        assert time.monotonic() < deadline, found()
        os.sched_yield()


class Desk:
    """ "echo" comes back at once; "park" and "late" wait, for a "free" and for 50 ms; "never" gets no answer.

    ``said`` is what came that nobody waits for, ``gone`` the clients that have left, and
    ``closed`` those of which one connection among others has closed.
    """

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.gone: list[str] = []
        self.closed: list[str] = []
        self.parked: list[Any] = []
        self.late: list[Any] = []
        self.deadline: float | None = None

    def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> list[Outgoing]:
        if envelope.number == NOBODY_WAITS:
            self.said.append(header)
            return [Outgoing(envelope, b"to nobody")]
        if header.startswith(b"park"):
            self.parked.append((envelope, header))
            return []
        if header.startswith(b"late"):
            self.late.append((envelope, header))
            self.deadline = self.deadline or now + 0.05
            return []
        if header.startswith(b"never"):
            return []
        freed: list[Any] = []
        if header == b"free":
            freed, self.parked = self.parked, []
        return [Outgoing(envelope, header, frames), *(Outgoing(parked, name) for parked, name in freed)]

    def expire(self, now: float) -> list[Outgoing]:
        late, self.late, self.deadline = self.late, [], None
        return [Outgoing(envelope, name) for envelope, name in late]

    def next_deadline(self) -> float | None:
        return self.deadline

    def connection_gone(self, client: str, route: Any, now: float) -> list[Outgoing]:
        self.closed.append(client)
        return []

    def client_gone(self, client: str, now: float) -> list[Outgoing]:
        self.gone.append(client)
        parked, self.parked = self.parked, []
        return [Outgoing(envelope, b"left " + client.encode()) for envelope, _ in parked if envelope.client != client]


def blocking(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Drive what a caller's coroutine does in this thread, as the blocking twin of a verb does."""
    return run_blocking(coroutine)


def begin(coroutine: Coroutine[Any, Any, Any]) -> PendingCall[Any]:
    """The same in two halves: what it asks for is sent, and ``finish`` waits for it."""
    return PendingCall(coroutine)


def answer(envelope: Any, header: Any, frames: Sequence[Any] = ()) -> Outgoing:
    """Of a handler, to the call that came in this envelope."""
    return Outgoing(envelope, header, frames)


def is_waited_for(envelope: Any) -> bool:
    return bool(envelope.number != NOBODY_WAITS)


def framed(number: int, header: bytes, frames: Sequence[Any] = ()) -> bytes:
    """A message as it travels."""
    return b"".join(bytes(part) for part in encode(number, header, frames))


def make_caller(name: str = "me", **settings: Any) -> SocketCaller:
    """A caller of either kind of sockets."""
    return SocketCaller(name, KEYS.public, **settings)


def address_of(kind: str, directory: Path, name: str) -> str:
    """Where a server may listen: at a "unix" socket or a "tcp" port."""
    return f"ipc://{directory}/{name}" if kind == "unix" else "tcp://127.0.0.1:0"


@contextmanager
def served_by_thread(
    directory: Path, handler: Any, kind: str = "unix", **settings: Any
) -> Iterator[tuple[Peer, SocketServer]]:
    """The handler behind a socket of this process."""
    server = SocketServer(address_of(kind, directory, "thread"), keys=KEYS, **settings)
    thread = threading.Thread(target=server.serve, args=(handler,))
    thread.start()
    try:
        yield Peer("desk", server.address), server
    finally:
        server.stop()
        thread.join(JOIN_S)


@contextmanager
def desk_behind(kind: str, directory: Path) -> Iterator[tuple[Callable[..., Any], Peer, Desk]]:
    """(makes callers by name, peer, desk): a desk behind the transport "local", "unix" or "tcp"."""
    made: list[Any] = []
    handler = Desk()

    def make(name: str = "me") -> Any:
        made.append(LocalCaller({"desk": handler}, name) if kind == "local" else make_caller(name))
        return made[-1]

    try:
        if kind == "local":
            yield make, Peer("desk", "local://desk"), handler
        else:
            with served_by_thread(directory, handler, kind) as (peer, _):
                yield make, peer, handler
    finally:
        for caller in made:
            caller.close()


def _serve(address: str, settings: dict[str, Any], ready: Any) -> None:
    server = SocketServer(address, keys=KEYS, **settings)
    ready.put(server.address)
    server.serve(Desk())


@contextmanager
def served_by_process(directory: Path, kind: str = "unix", **settings: Any) -> Iterator[tuple[Peer, Any]]:
    """A desk in a process of its own, which may be killed."""
    context = multiprocessing.get_context("fork")
    ready = context.SimpleQueue()
    process = context.Process(target=_serve, args=(address_of(kind, directory, "process"), settings, ready))
    process.start()
    address = ready.get()
    ready.close()
    try:
        yield Peer("desk", address), process
    finally:
        process.kill()
        process.join(JOIN_S)
        process.close()


def peer_at(address: str, name: str = "desk") -> Peer:
    return Peer(name, address)


def calls(peer: Peer, *headers: bytes, frames: Sequence[Any] = ()) -> list[PeerCall]:
    return [numbered(peer, header, frames) for header in headers]


def numbered(peer: Peer, header: bytes, frames: Sequence[Any] = (), cancel: bytes = b"") -> PeerCall:
    """A call with a number of its own, as a session makes it."""
    return PeerCall(peer, header, frames, (lambda: cancel) if cancel else None, next(_numbers))


def held() -> tuple[list[str], int]:
    """Names of the threads, number of open files of this process."""
    return sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))
