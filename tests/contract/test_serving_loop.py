# SPDX-License-Identifier: Apache-2.0
"""Several servers on one loop: each answers at its own address, keeps its own deadlines, ends with the others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transport_kit import JOIN_S, Desk, calls, held, numbered, until

from transfer_queue.transport.base import Outgoing, Peer, PeerCall
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.loop import ServingLoop
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.machine import pid_namespace

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def callers() -> Iterator[Callable[[], SocketCaller]]:
    made: list[SocketCaller] = []

    def make() -> SocketCaller:
        made.append(SocketCaller(f"caller {len(made)}"))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


class Noting(Desk):
    """Notes when its deadlines came."""

    def __init__(self) -> None:
        super().__init__()
        self.expired: list[float] = []

    def expire(self, now: float) -> list[Outgoing]:
        self.expired.append(now)
        return super().expire(now)


@contextmanager
def made(directory: Path, *desks: Any) -> Iterator[tuple[ServingLoop, list[SocketServer]]]:
    loop = ServingLoop()
    try:
        servers = [SocketServer(f"ipc://{directory}/s{n}", loop) for n in range(len(desks))]
        for server, desk in zip(servers, desks, strict=True):
            server.open(desk)
        yield loop, servers
    finally:
        loop.close()


@contextmanager
def running(loop: ServingLoop) -> Iterator[None]:
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join(JOIN_S)


@contextmanager
def served(directory: Path, *desks: Any) -> Iterator[list[Peer]]:
    with made(directory, *desks) as (loop, servers), running(loop):
        yield [Peer(f"s{n}", server.address) for n, server in enumerate(servers)]


def asked(caller: SocketCaller, *asks: PeerCall) -> list[bytes]:
    return [reply.header for reply in run_blocking(caller.call_many(asks, JOIN_S))]


# ---- serving ----


def test_each_server_answers_at_its_own_address(tmp_path, callers):
    caller = callers()
    with served(tmp_path, Desk(), Desk(), Desk()) as peers:
        assert [(tmp_path / name).exists() for name in ("s0", "s1", "s2")] == [True] * 3
        for turn in range(3):
            asks = [numbered(peer, b"echo", [f"{turn}{peer.name}".encode()]) for peer in peers]
            replies = run_blocking(caller.call_many(asks, JOIN_S))
            assert [(reply.header, *map(bytes, reply.frames)) for reply in replies] == [
                (b"echo", f"{turn}s{n}".encode()) for n in range(3)
            ]


def test_many_requests_to_one_server_hold_up_none_of_another(tmp_path, callers):
    async def go(busy: Peer, other: Peer) -> list[list[bytes]]:
        both = [[numbered(busy, b"%d" % n) for n in range(500)], [numbered(other, b"echo")]]
        caller = callers()
        replies = await asyncio.gather(*(caller.call_many(asks, JOIN_S) for asks in both))
        return [[reply.header for reply in some] for some in replies]

    with served(tmp_path, Desk(), Desk()) as peers:
        assert asyncio.run(go(*peers)) == [[b"%d" % n for n in range(500)], [b"echo"]]


def test_parked_answers_reach_their_clients_at_the_server_that_lets_them_go(tmp_path, callers):
    desks = Desk(), Desk()
    with served(tmp_path, *desks) as peers:
        found: dict[int, list[bytes]] = {}

        def park(n: int) -> None:
            found[n] = asked(callers(), *calls(peers[n], b"park a", b"park b"))

        threads = [threading.Thread(target=park, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: [len(desk.parked) for desk in desks] == [2, 2])
        assert asked(callers(), *calls(peers[1], b"free")) == [b"free"]
        threads[1].join(JOIN_S)
        assert (found, len(desks[0].parked)) == ({1: [b"park a", b"park b"]}, 2)
        assert asked(callers(), *calls(peers[0], b"free")) == [b"free"]
        threads[0].join(JOIN_S)
        assert found[0] == [b"park a", b"park b"]


def test_each_server_s_deadline_is_kept_and_no_other_is_told_of_it(tmp_path, callers):
    desks = Noting(), Noting(), Noting()
    with served(tmp_path, *desks) as peers:
        caller, begin = callers(), time.monotonic()
        assert asked(caller, *calls(peers[1], b"late")) == [b"late"]
        assert [len(desk.expired) for desk in desks] == [0, 1, 0]
        assert desks[1].expired[0] - begin >= 0.05
        assert asked(caller, *calls(peers[2], b"late"), *calls(peers[0], b"late")) == [b"late", b"late"]
        assert [len(desk.expired) for desk in desks] == [1, 1, 1]


def test_a_server_s_watches_and_descriptors_are_served_beside_the_others(tmp_path, callers):
    read, write = os.pipe()
    heard: list[bytes] = []

    def ready(now: float) -> list[Outgoing]:
        heard.append(os.read(read, 1))
        dismiss()
        return []

    with made(tmp_path, Desk(), Desk()) as (loop, servers):
        dismiss = servers[1].attend(read, ready)
        os.write(write, b"ab")
        with running(loop):
            for _ in range(3):
                assert asked(callers(), *calls(Peer("s0", servers[0].address), b"echo")) == [b"echo"]
    assert heard == [b"a"]
    os.close(read)
    os.close(write)


# ---- ends ----


def test_stopping_any_server_ends_all_and_leaves_nothing(tmp_path, callers):
    ended: list[int] = []
    with made(tmp_path, Desk(), Desk()) as (loop, servers):
        for n, server in enumerate(servers):
            server.at_close(lambda n=n: ended.append(n))
        thread = threading.Thread(target=loop.run)
        thread.start()
        caller = callers()
        for n, server in enumerate(servers):
            assert asked(caller, *calls(Peer(f"s{n}", server.address), b"echo")) == [b"echo"]
        servers[1].stop()
        thread.join(JOIN_S)
        assert (thread.is_alive(), ended) == (False, [0, 1])
        loop.stop()
        servers[0].stop()
    assert ended == [0, 1], "once"
    assert list(tmp_path.iterdir()) == []


def test_a_stop_before_the_loop_runs_is_not_forgotten(tmp_path):
    with made(tmp_path, Desk(), Desk()) as (loop, _):
        loop.stop()
        loop.run()


def test_closing_instead_of_serving_leaves_nothing_and_may_be_done_again(tmp_path):
    with made(tmp_path, Desk(), Desk()) as (loop, servers):
        servers[0].watch(os.getpid(), pid_namespace(), lambda now: [])
        servers[0].close()
        servers[1].close()
        loop.stop()
    ServingLoop().close()


def test_an_address_that_cannot_be_bound_leaves_nothing_of_it_and_the_others_serve(tmp_path, callers):
    (tmp_path / "taken").mkdir()
    with made(tmp_path, Desk()) as (loop, (server,)):
        before, files = held(), sorted(tmp_path.iterdir())
        with pytest.raises(OSError, match="Address already in use"):
            SocketServer(f"ipc://{tmp_path}/taken", loop=loop)
        assert held() == before
        assert sorted(tmp_path.iterdir()) == files
        another = SocketServer(f"ipc://{tmp_path}/another", loop=loop)
        another.open(Desk())
        with running(loop):
            asks = [numbered(Peer("s0", server.address), b"echo"), numbered(Peer("another", another.address), b"echo")]
            assert asked(callers(), *asks) == [b"echo", b"echo"]
