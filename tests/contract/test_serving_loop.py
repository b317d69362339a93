# SPDX-License-Identifier: Apache-2.0
"""A server at several addresses: it answers at each, keeps its deadlines, and ends with all of them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transport_kit import JOIN_S, Desk, calls, held, numbered, until

from transfer_queue.transport.base import Peer, PeerCall
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.caller import SocketCaller
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


@contextmanager
def made(directory: Path) -> Iterator[tuple[SocketServer, list[Peer]]]:
    """A server with two sockets and a port."""
    server = SocketServer(f"ipc://{directory}/s0")
    try:
        addresses = [server.address, server.listen(f"ipc://{directory}/s1")]
        addresses.append(server.listen("tcp://127.0.0.1:0"))
        yield server, [Peer(f"s{n}", address) for n, address in enumerate(addresses)]
    finally:
        server.close()


@contextmanager
def running(server: SocketServer, desk: Desk) -> Iterator[None]:
    thread = threading.Thread(target=server.serve, args=(desk,))
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join(JOIN_S)


def asked(caller: SocketCaller, *asks: PeerCall) -> list[bytes]:
    return [reply.header for reply in run_blocking(caller.call_many(asks, JOIN_S))]


# ---- serving ----


def test_it_answers_at_each_of_its_addresses(tmp_path, callers):
    caller = callers()
    with made(tmp_path) as (server, peers), running(server, Desk()):
        for turn in range(3):
            asks = [numbered(peer, b"echo", [f"{turn}{peer.name}".encode()]) for peer in peers]
            replies = run_blocking(caller.call_many(asks, JOIN_S))
            assert [(reply.header, *map(bytes, reply.frames)) for reply in replies] == [
                (b"echo", f"{turn}s{n}".encode()) for n in range(3)
            ]


def test_many_requests_at_one_address_hold_up_none_at_another(tmp_path, callers):
    async def go(busy: Peer, other: Peer, _: Peer) -> list[list[bytes]]:
        both = [[numbered(busy, b"%d" % n) for n in range(500)], [numbered(other, b"echo")]]
        caller = callers()
        replies = await asyncio.gather(*(caller.call_many(asks, JOIN_S) for asks in both))
        return [[reply.header for reply in some] for some in replies]

    with made(tmp_path) as (server, peers), running(server, Desk()):
        assert asyncio.run(go(*peers)) == [[b"%d" % n for n in range(500)], [b"echo"]]


def test_parked_answers_reach_their_clients_at_whatever_address_they_are_let_go(tmp_path, callers):
    desk = Desk()
    with made(tmp_path) as (server, peers), running(server, desk):
        found: dict[int, list[bytes]] = {}

        def park(n: int) -> None:
            found[n] = asked(callers(), *calls(peers[n], b"park a", b"park b"))

        threads = [threading.Thread(target=park, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(desk.parked) == 6)
        assert asked(callers(), *calls(peers[1], b"free")) == [b"free"]
        for thread in threads:
            thread.join(JOIN_S)
        assert found == {n: [b"park a", b"park b"] for n in range(3)}


def test_a_client_is_gone_with_its_last_connection_at_any_address(tmp_path, callers):
    desk, caller = Desk(), callers()
    with made(tmp_path) as (server, peers), running(server, desk):
        assert asked(caller, *calls(peers[0], b"echo"), *calls(peers[1], b"echo")) == [b"echo", b"echo"]
        assert server.clients() == {"caller 0": 2}
        server.disconnect("caller 0")
        until(lambda: desk.gone == ["caller 0"])


def test_deadlines_are_kept_beside_those_of_its_listeners(tmp_path, callers):
    with made(tmp_path) as (server, peers), running(server, Desk()):
        begin = time.monotonic()
        assert asked(callers(), *calls(peers[2], b"late")) == [b"late"]
        assert time.monotonic() - begin >= 0.05


# ---- ends ----


def test_a_stop_ends_all_and_leaves_nothing(tmp_path, callers):
    ended: list[int] = []
    with made(tmp_path) as (server, peers):
        server.at_close(lambda: ended.append(1))
        thread = threading.Thread(target=server.serve, args=(Desk(),))
        thread.start()
        assert asked(callers(), *[numbered(peer, b"echo") for peer in peers]) == [b"echo"] * 3
        server.stop()
        thread.join(JOIN_S)
        assert (thread.is_alive(), ended) == (False, [1])
        server.stop()
    assert ended == [1], "once"
    assert list(tmp_path.iterdir()) == []


def test_a_stop_before_it_serves_is_not_forgotten(tmp_path):
    with made(tmp_path) as (server, _):
        server.stop()
        server.serve(Desk())


def test_closing_instead_of_serving_leaves_nothing_and_may_be_done_again(tmp_path):
    with made(tmp_path) as (server, _):
        server.watch(os.getpid(), pid_namespace(), lambda: None)
        server.close()
        server.stop()


def test_an_address_that_cannot_be_bound_leaves_nothing_of_it_and_the_others_serve(tmp_path, callers):
    (tmp_path / "taken").mkdir()
    with made(tmp_path) as (server, peers):
        before, files = held(), sorted(tmp_path.iterdir())
        with pytest.raises(OSError, match="Address already in use"):
            server.listen(f"ipc://{tmp_path}/taken")
        assert held() == before
        assert sorted(tmp_path.iterdir()) == files
        with running(server, Desk()):
            assert asked(callers(), *[numbered(peer, b"echo") for peer in peers]) == [b"echo"] * 3
