# SPDX-License-Identifier: Apache-2.0
"""The web server of metrics serves few connections, each for a short time, whoever comes."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.own_processes import SLOW
from transfer_queue.server.exporter import MOST_CONNECTIONS, MetricsServer, metrics_host

WAIT_S = 20.0 * SLOW


def app(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"numbers"]


@contextmanager
def served(**more: Any) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, **more)
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connected(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT_S)


def scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=WAIT_S) as answer:
        return bytes(answer.read())


def handlers(before: set[threading.Thread]) -> int:
    return len(set(threading.enumerate()) - before) - 1  # one listens


def test_one_connection_too_many_is_closed_and_another_served_when_one_has_ended():
    before = set(threading.enumerate())
    with served() as server, ExitStack() as opened:
        idle = [opened.enter_context(connected(server)) for _ in range(MOST_CONNECTIONS)]
        for _ in range(3):
            with connected(server) as refused:
                assert refused.recv(1) == b"", "it is closed, not kept waiting"
        assert handlers(before) == MOST_CONNECTIONS
        idle[0].shutdown(socket.SHUT_WR)
        assert idle[0].recv(1) == b"", "its thread has ended it"
        assert scrape(server) == b"numbers"


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: 1"])
def test_a_connection_that_does_not_complete_its_request_is_ended(sent):
    with served(connection_s=0.1) as server, connected(server) as slow:
        slow.sendall(sent)
        assert slow.recv(1000) == b""


def test_a_connection_that_drips_is_ended_although_it_is_never_idle():
    with served(connection_s=1.0) as server, connected(server) as slow:
        slow.settimeout(0.05)
        dripped = 0
        while True:
            try:
                slow.sendall(b"G")
                dripped += 1
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert dripped > 1


def test_what_goes_wrong_with_a_connection_prints_nothing(capfd):
    with served() as server:
        with connected(server) as broken:
            broken.sendall(b"\x00\xff\r\n\r\n")
            broken.recv(1000)
        assert scrape(server) == b"numbers"
    assert capfd.readouterr() == ("", "")


def test_the_host_is_that_of_listen_unless_one_is_named():
    from transfer_queue.config import merge, typed

    def host(**conf: Any) -> str:
        return metrics_host(typed(merge(conf)))

    assert host() == "127.0.0.1"
    assert host(listen="tcp://10.0.0.7:0") == "10.0.0.7"
    assert host(listen="tcp://*:5555") == "0.0.0.0"
    assert host(listen="tcp://10.0.0.7:0", metrics={"host": "127.0.0.1"}) == "127.0.0.1"
