# SPDX-License-Identifier: Apache-2.0
"""The serving end of plain Unix sockets: a listener, and a connection per line of a client; none of them waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from transfer_queue.transport.base import Envelope, Outgoing
from transfer_queue.transport.framing import FramingError, Inbound, Outbound, encode
from transfer_queue.transport.plain_sockets import accepted, listening
from transfer_queue.transport.readiness import READ, WRITE, Readiness

_BACKLOG = 4096
_NEWCOMERS_PER_TURN = 64

Deliver = Callable[[Envelope, bytes, list[memoryview]], None]


class Connection:
    """One client's line. A reader that is slow is read from again when it has taken its answers: its own queue stays
    short, and nobody else notices."""

    def __init__(self, port: PlainPort) -> None:
        """Raises OSError: there is no newcomer, or no descriptor for it."""
        self._port = port
        self._socket = accepted(port.listener)
        self._descriptor = self._socket.fileno()
        self._client: str | None = None
        self._inbound = Inbound()
        self._outbound = Outbound()
        self._writing = False
        port.readiness.add(self._descriptor, self._act)

    def _act(self, ready: int) -> None:
        try:
            if ready & WRITE:
                self._outbound.flush(self._socket)
                self._choose()
            messages = self._inbound.receive(self._socket) if ready & ~WRITE else []
        except BlockingIOError:
            return
        except (OSError, EOFError, FramingError):  # it left, or never was a client
            self.close()
            return
        for request_id, header, frames in messages:
            if self._client is None:
                self._client = header.decode(errors="replace")  # the first message says who it is
            else:
                self._port.deliver(Envelope(self._client, request_id, self), header, frames)

    def send(self, answer: Outgoing) -> None:
        """Dropped when the client is there no more."""
        if self._socket.fileno() < 0:
            return
        try:
            self._outbound.send(self._socket, encode(answer.envelope.request_id, answer.header, answer.frames))
            self._choose()
        except OSError:
            self.close()

    def _choose(self) -> None:
        writing = bool(self._outbound)
        if writing != self._writing:
            self._port.readiness.want(self._descriptor, WRITE if writing else READ)
            self._writing = writing

    def close(self) -> None:
        """Idempotent. Half a message goes with it."""
        if self._socket.fileno() < 0:
            return
        self._port.readiness.remove(self._descriptor)
        self._socket.close()
        self._port.left(self)


class PlainPort:
    """Listens at once. ``deliver`` is told every request."""

    def __init__(self, path: str, readiness: Readiness, deliver: Deliver) -> None:
        """Raises OSError: the path can't be bound."""
        self.readiness = readiness
        self.deliver = deliver
        self._path = path
        self._connections: set[Connection] = set()
        self.listener = listening(path, _BACKLOG)
        self._listening = False
        self._listen()

    def _listen(self) -> None:
        self.readiness.add(self.listener.fileno(), self._accept)
        self._listening = True

    def _accept(self, _: int) -> None:
        try:
            for _ in range(_NEWCOMERS_PER_TURN):
                self._connections.add(Connection(self))
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # out of descriptors: who comes now waits until somebody leaves
            if self._connections:
                self.readiness.remove(self.listener.fileno())
                self._listening = False

    def left(self, connection: Connection) -> None:
        """It has closed."""
        self._connections.discard(connection)
        if not self._listening:
            self._listen()

    def close(self) -> None:
        """Close every connection; leave no file."""
        for connection in list(self._connections):
            connection.close()
        if self._listening:
            self.readiness.remove(self.listener.fileno())
        self.listener.close()
        with contextlib.suppress(OSError):  # its directory has gone
            os.unlink(self._path)
