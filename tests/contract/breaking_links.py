# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy whose links break for the client alone: the server hears nothing of it, and the session goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.contract.transport_kit import JOIN_S


class Link:
    """One connection of a client, and the one to the server behind it. Each direction can be held."""

    def __init__(self, client: socket.socket, server: socket.socket, holds: bool) -> None:
        self.requests, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        if not holds:
            self.requests.set()
        self.asked, self.answered = bytearray(), bytearray()
        self._ends = client, server
        ways = (client, server, self.requests, self.asked), (server, client, self.answers, self.answered)
        self._threads = [threading.Thread(target=self._pump, args=way) for way in ways]
        for thread in self._threads:
            thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, flows: threading.Event, seen: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen += data
                assert flows.wait(6 * JOIN_S)
                with suppress(OSError):  # the client has left; what the server says is still read
                    sink.sendall(data)

    def end_for_client(self) -> None:
        with suppress(OSError):
            self._ends[0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for flows in (self.requests, self.answers):
            flows.set()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(JOIN_S)
        for end in self._ends:
            end.close()


class Proxy:
    """``holds``: the requests of links to come are held."""

    def __init__(self, target: str) -> None:
        self.links: list[Link] = []
        self.holds = False
        self._target = target.removeprefix("tcp://").rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, port = self._target
                self.links.append(Link(client, socket.create_connection((host, int(port)), JOIN_S), self.holds))

    def end_for_client(self) -> None:
        for link in self.links:
            link.end_for_client()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_S)
        self._listener.close()
        for link in self.links:
            link.close()


@contextmanager
def proxy_to(address: str) -> Iterator[Proxy]:
    proxy = Proxy(address)
    try:
        yield proxy
    finally:
        proxy.close()
