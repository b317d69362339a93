# SPDX-License-Identifier: Apache-2.0
"""Unix stream sockets of one host, in client and server: a caller's connections, a listener with its routes.

No thread lies between the two processes. The end of a connection means that the other process has ended.
Both ends never wait: what the kernel does not take now stays in ``Outbound`` until the socket is writable again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from transfer_queue.errors import ConfigError, QueueUnreachableError
from transfer_queue.transport.base import CONFIRM, NOBODY_WAITS, Arrivals, Buffer, Envelope, Outgoing, Peer
from transfer_queue.transport.connections import gone, no_address, unconnected
from transfer_queue.transport.descriptors import READ, WRITE, closed_in_children
from transfer_queue.transport.framing import FramingError, Inbound, Message, Outbound, encode
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from transfer_queue.transport.loop import Readiness

_log = get_logger(__name__)

SCHEME = "ipc://"
_BUFFER_NBYTES = 1 << 20  # the kernel gives less if its limit is lower
_CONNECT_S = 1
_BACKLOG = 4096
_NEWCOMERS_PER_TURN = 64
_NO_ROOM_S = 0.1
_WARN_EVERY_S = 30.0
_MAX_UNREAD_ANSWERS = 8


class UnixConnection:
    """See ``Connection``."""

    reached = True

    def __init__(self, peer: Peer, client: str) -> None:
        """Raises QueueUnreachableError: no server listens there, or not for this user."""
        path = peer.address.removeprefix(SCHEME)
        if path == peer.address or not path:
            raise no_address(peer)
        self.peer = peer
        self.broken = False
        try:
            self._socket = _prepared(lambda new: _connect(new, path, client))
        except OSError as error:
            raise unconnected(peer, error) from error
        # A dropped caller or ending process may not close it. This runs after the clients' goodbyes.
        Finalize(self, self._socket.close, exitpriority=0)
        self.descriptor = self._socket.fileno()
        self._inbound = Inbound()
        self._outbound = Outbound()
        self._unconfirmed = 0

    @property
    def unsent(self) -> bool:
        return bool(self._outbound)

    @property
    def settled(self) -> bool:
        return self.broken or not (self._unconfirmed or self._outbound)

    def send(self, number: int, header: bytes, frames: Sequence[Buffer] = ()) -> None:
        try:
            self._outbound.send(self._socket, encode(number, header, frames))
        except OSError as error:
            raise self._broken() from error
        self._unconfirmed += number == CONFIRM

    def flush(self) -> None:
        try:
            self._outbound.flush(self._socket)
        except OSError as error:
            raise self._broken() from error

    def own(self) -> None:
        self._outbound.own()

    def receive(self) -> list[Message]:
        try:
            messages = self._inbound.receive(self._socket)
            return self._without_confirmations(messages) if self._unconfirmed else messages
        except BlockingIOError:
            return []
        except FramingError as error:
            self.broken = True
            raise QueueUnreachableError(f"{self.peer.name} at {self.peer.address} sent {error}") from error
        except (EOFError, OSError) as error:
            raise self._broken() from error

    def _without_confirmations(self, messages: list[Message]) -> list[Message]:
        others = [message for message in messages if message.number != CONFIRM]
        self._unconfirmed -= len(messages) - len(others)
        return others

    def _broken(self) -> QueueUnreachableError:
        self.broken = True
        return gone(self.peer)

    def close(self) -> None:
        self._socket.close()


class UnixRoute:
    """The server's end of a connection. See ``base.Route``.

    If a client is slow to read answers, the server stops reading its requests meanwhile. So its queue stays short, and
    other clients are not affected.
    """

    def __init__(self, listener: UnixListener, accepted: socket.socket) -> None:
        self._listener = listener
        self._socket = accepted
        self._descriptor = accepted.fileno()
        self._client: str | None = None
        self._inbound = Inbound()
        self._outbound = Outbound()
        self._wanted = READ
        listener.readiness.add(self._descriptor, self._act)

    def _act(self, ready: int) -> None:
        try:
            if ready & WRITE:
                self._flush()
            if ready & ~WRITE:  # also if the other end has closed: what it sent before is read to the end
                self._take(self._inbound.receive(self._socket))
        except BlockingIOError:
            pass
        except (OSError, EOFError):  # it has left
            self.close()
        except (FramingError, MemoryError) as error:
            if self._client is not None:  # else it never was a client
                said = str(error) or "more than this process has memory for."
                _log.warning("the connection of %s is closed, because it sent %s", self._client, said)
            self.close()

    def _take(self, messages: list[Message]) -> None:
        server = self._listener.server
        for message in messages:
            if self._client is None:
                self._client = message.header.decode(errors="replace")
                server.joined(self._client, self)
            elif message.number == CONFIRM:
                server.deliver(Envelope(self._client, NOBODY_WAITS, self), message.header, message.frames)
                self.send(Outgoing(Envelope(self._client, CONFIRM, self), b""))
            else:
                server.deliver(Envelope(self._client, message.number, self), message.header, message.frames)

    def send(self, answer: Outgoing) -> None:
        if answer.envelope.number == NOBODY_WAITS or self._socket.fileno() < 0:
            return
        parts = encode(answer.envelope.number, answer.header, answer.frames)
        try:
            if self._outbound.send(self._socket, parts) and self._wanted == READ:
                return
        except OSError:  # the client has closed its end; what it sent before is still read
            self._outbound.clear()
        self._choose_events()

    def _flush(self) -> None:
        try:
            self._outbound.flush(self._socket)
        except OSError:  # as above
            self._outbound.clear()
        self._choose_events()

    def _choose_events(self) -> None:
        waiting = self._outbound.num_messages if self._outbound else 0
        wanted = READ if not waiting else READ | WRITE if waiting <= _MAX_UNREAD_ANSWERS else WRITE
        if wanted != self._wanted:
            self._listener.readiness.want(self._descriptor, wanted)
            self._wanted = wanted

    def disconnect(self) -> None:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, quietly: bool = False) -> None:
        """Close it, and drop an incomplete message. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._listener.readiness.remove(self._descriptor)
        self._socket.close()
        self._listener.routes.discard(self)
        if self._client is not None and not quietly:
            self._listener.server.left(self._client, self)


class UnixListener:
    """See ``Listener``."""

    def __init__(self, address: str, readiness: Readiness, server: Arrivals) -> None:
        """Raises OSError: the path can't be bound. ConfigError: there is no path."""
        if not address.removeprefix(SCHEME) or not address.startswith(SCHEME):
            raise ConfigError(f"{address!r} is no address: ipc://PATH or tcp://HOST:PORT.")
        self.address = address
        self.readiness = readiness
        self.server = server
        self._path = address.removeprefix(SCHEME)
        self.routes: set[UnixRoute] = set()
        self._paused_until = math.inf  # if it is not paused
        self._warn_at = 0.0
        self._socket = _prepared(lambda new: _bind(new, self._path))
        readiness.add(self._socket.fileno(), self._accept)

    def _accept(self, _: int) -> None:
        try:
            for _ in range(_NEWCOMERS_PER_TURN):
                self.routes.add(UnixRoute(self, _kept(self._socket.accept()[0])))
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: stop accepting for a while, or the loop would never rest
            now = time.monotonic()
            self.readiness.remove(self._socket.fileno())
            self._paused_until = now + _NO_ROOM_S
            if now >= self._warn_at:
                self._warn_at = now + _WARN_EVERY_S
                advice = "They wait. End some clients, or start this server with a higher limit (ulimit -n)."
                _log.warning(
                    "no more clients can connect beside %d connections: %s. %s", len(self.routes), error, advice
                )

    def next_deadline(self) -> float:
        return self._paused_until

    def expire(self, now: float) -> None:
        if now >= self._paused_until:
            self._paused_until = math.inf
            self.readiness.add(self._socket.fileno(), self._accept)

    def close(self) -> None:
        for route in list(self.routes):
            route.close(quietly=True)
        if self._paused_until == math.inf:
            self.readiness.remove(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):  # its directory has been removed
            os.unlink(self._path)


# ---- sockets ----


def _prepared(start: Callable[[socket.socket], None]) -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        start(new)
        return _kept(new)
    except BaseException:
        new.close()
        raise


def _connect(new: socket.socket, path: str, client: str) -> None:
    # If too many clients connect at once, it waits a little for the server to accept some.
    new.setblocking(True)
    new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _CONNECT_S, 0))
    new.connect(path)
    new.sendall(b"".join(encode(NOBODY_WAITS, client.encode())))


def _bind(new: socket.socket, path: str) -> None:
    remove_stale(path)
    new.bind(path)
    new.listen(_BACKLOG)


def remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed, of whatever type. One that is served stays."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            probe.setblocking(False)
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)


def _kept(new: socket.socket) -> socket.socket:
    new.setblocking(False)
    new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
    closed_in_children.add(new)
    return new
