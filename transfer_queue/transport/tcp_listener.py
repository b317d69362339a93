# SPDX-License-Identifier: Apache-2.0
"""Accepts clients of other hosts, in the server: one encrypted ZMQ socket, and a lease for each client."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from transfer_queue.errors import ConfigError
from transfer_queue.transport.base import CONFIRM, NOBODY_WAITS, Arrivals, Envelope, Liveness, Outgoing
from transfer_queue.transport.framing import FramingError
from transfer_queue.transport.loop import Readiness, guarded
from transfer_queue.transport.tcp_wire import BEAT, BYE, CALL, HELLO, LINGER_MS, VERSION, PartsReader, ServerKeys, pack
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
_MESSAGES_PER_TURN = 64
_END_S = 2 * LINGER_MS / 1000


class TcpRoute:
    """See ``base.Route``."""

    def __init__(self, listener: TcpListener, address: bytes, client: str) -> None:
        self._listener = listener
        self.address = address
        self.client = client
        self.silent_beats = 0
        self.reader = PartsReader()
        self._is_leaving = False

    def send(self, answer: Outgoing) -> None:
        if answer.envelope.number != NOBODY_WAITS and not self._is_leaving:
            # Stored values never change, and their memory is not reused while ZMQ refers to it.
            for message in pack(answer.envelope.number, answer.header, answer.frames, copy=False):
                self._listener.send(self.address, message)

    def disconnect(self) -> None:
        self._is_leaving = True
        self._listener.leaving.append(self)
        self._listener.look_again()


class TcpListener:
    """See ``Listener``. A client is gone when it says so, and after ``lease_s`` without a message.

    If its process ends without a word, that is noticed with the next heartbeat.
    """

    def __init__(
        self,
        address: str,
        readiness: Readiness,
        server: Arrivals,
        keys: ServerKeys | None,
        liveness: Liveness,
    ) -> None:
        """Raises OSError: the address can't be bound. ConfigError: it is none of this host."""
        if keys is None:
            _log.warning("%s is open to every process that can reach it: there is no encryption and no key", address)
        self._readiness = readiness
        self._server = server
        self._heartbeat_s, self._lease_s = liveness
        self._beat_at = time.monotonic() + self._heartbeat_s
        self._routes: dict[bytes, TcpRoute] = {}
        self.leaving: list[TcpRoute] = []
        """Routes that end once everything that came has been handled."""
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        try:
            self._router = _bound(self._context, address, keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno in (zmq.EINVAL, zmq.EPROTONOSUPPORT):
                raise ConfigError(f"{address!r} is no address of this host: tcp://HOST:PORT, or :0 for any.") from error
            raise OSError(error.errno, error.strerror, address) from error
        self.address: str = self._router.last_endpoint.decode()
        # ZMQ's own descriptor reports news once, and any use of the socket may consume that; hence the second
        # descriptor.
        self._descriptor: int = self._router.FD
        self._again = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_taking = False
        for descriptor in (self._descriptor, self._again):
            readiness.add(descriptor, self._take)
        self.look_again()

    def _take(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._again)
        self._is_taking = True
        try:
            for _ in range(_MESSAGES_PER_TURN):
                guarded(self._handle, self._router.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            self._is_taking = False  # what these sends find is not read here
            while self.leaving:
                self._end(self.leaving.pop())
        else:
            self.look_again()
        finally:
            self._is_taking = False

    def _handle(self, parts: Sequence[zmq.Frame]) -> None:
        address, kind = parts[0].bytes, parts[1].bytes if len(parts) > 1 else b""
        route = self._routes.get(address)
        if route is None:
            self._welcome(address, kind, parts)
            return
        route.silent_beats = 0
        if kind == BYE:
            self._end(route)
        elif kind == CALL:
            self._deliver(route, parts[2:])

    def _deliver(self, route: TcpRoute, parts: Sequence[zmq.Frame]) -> None:
        try:
            messages = route.reader.add(parts)
        except FramingError:  # it never was a client
            self._end(route)
            return
        for message in messages:
            number = NOBODY_WAITS if message.number == CONFIRM else message.number
            self._server.deliver(Envelope(route.client, number, route), message.header, message.frames)
            if message.number == CONFIRM:
                route.send(Outgoing(Envelope(route.client, CONFIRM, route), b""))

    def _welcome(self, address: bytes, kind: bytes, parts: Sequence[zmq.Frame]) -> None:
        if kind == HELLO and len(parts) == 4 and parts[2].bytes == VERSION:
            route = self._routes[address] = TcpRoute(self, address, parts[3].bytes.decode(errors="replace"))
            self._server.joined(route.client, route)
        elif kind in (HELLO, BEAT, CALL):  # of another version, or its lease has ended
            self.send(address, [BYE])

    def _end(self, route: TcpRoute) -> None:
        if self._routes.pop(route.address, None) is not None:
            self.send(route.address, [BYE])
            self._server.left(route.client, route)

    def send(self, address: bytes, parts: Sequence[Any]) -> None:
        """Send to a client. Dropped if its connection has ended; then the client is counted as gone, too."""
        try:
            self._router.send_multipart([address, *parts], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if address in self._routes:
                self._routes[address].disconnect()
        # The router's descriptor tells of messages once, and this send may have used that up.
        if not self._is_taking and self._router.events & zmq.POLLIN:
            self.look_again()

    def look_again(self) -> None:
        """Have ``_take`` called soon; from any thread."""
        os.eventfd_write(self._again, 1)

    def next_deadline(self) -> float:
        return self._beat_at if self._routes else math.inf

    def expire(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + self._heartbeat_s
        # Beats are counted, not seconds: after a pause of this process, its clients may still be well.
        for route in list(self._routes.values()):
            if route.silent_beats * self._heartbeat_s >= self._lease_s:
                _log.warning(
                    "client %s has been silent for %.0f s, and is counted as gone", route.client, self._lease_s
                )
                self._end(route)
            else:
                route.silent_beats += 1
                self.send(route.address, [BEAT])

    def close(self) -> None:
        for descriptor in (self._descriptor, self._again):
            self._readiness.remove(descriptor)
        os.close(self._again)
        self._routes.clear()
        self._router.close(linger=LINGER_MS)
        # ZMQ 4.3.5 may wait here for ever if a client leaves during its handshake (libzmq's issue 2733).
        ending = threading.Thread(target=self._context.term, name="tq-tcp-end", daemon=True)
        ending.start()
        ending.join(_END_S)


def _bound(context: zmq.Context[Any], address: str, keys: ServerKeys | None) -> Any:
    router: Any = context.socket(zmq.ROUTER)
    router.set_hwm(0)  # nothing is ever dropped, and a send never blocks
    router.router_mandatory = True  # a send to a client whose connection has ended is an error
    if keys is not None:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
    router.bind(address)
    return router
