# SPDX-License-Identifier: Apache-2.0
"""A server behind its listeners: its loop, its clients, their requests to the handler, and the answers."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from transfer_queue.transport.base import USUAL_LIVENESS, Envelope, Handler, Listener, Liveness, Outgoing, Route
from transfer_queue.transport.loop import Readiness, guarded
from transfer_queue.transport.unix import UnixListener
from transfer_queue.utils.machine import open_process

if TYPE_CHECKING:
    from transfer_queue.transport.tcp_wire import ServerKeys


class SocketServer:
    """One handler at one address or several, in one thread. Binds at once, so that a client may connect as soon as the
    constructor returns.
    """

    def __init__(self, address: str, keys: ServerKeys | None = None, liveness: Liveness = USUAL_LIVENESS) -> None:
        """See ``listen``."""
        self.turned: Callable[[float], None] = _nothing
        """Called after each turn with the seconds that it took."""
        self._readiness = Readiness()
        self._handler: Handler  # from ``serve`` on; nothing is delivered before
        self._listeners: list[Listener] = []
        self._routes: dict[str, set[Route]] = {}
        self._watched: set[int] = set()
        self._at_close = contextlib.ExitStack()
        self._stopping = self._closed = False
        self._lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readiness.add(self._wake, _nothing)
        self._at_close.callback(os.close, self._wake)
        self._at_close.callback(self._readiness.close)
        try:
            self.address = self.listen(address, keys, liveness)
        except BaseException:
            self.close()
            raise

    def listen(self, address: str, keys: ServerKeys | None = None, liveness: Liveness = USUAL_LIVENESS) -> str:
        """Also serve clients who come to this address. Returns it with its real port. Call it before ``serve``.

        Args:
            address: ``ipc://PATH``, a Unix socket of this host, or ``tcp://HOST:PORT`` for other hosts, which the rest
                is about.
            keys: Clients must know the public one; all traffic is encrypted. Without, any process that can reach the
                address can read and change all values.
            liveness: How long a client may be silent before it counts as gone.
        Raises:
            OSError: the address can't be bound.
            ConfigError: it is no address.
        """
        listener: Listener
        if address.startswith("tcp://"):
            from transfer_queue.transport.tcp_listener import TcpListener

            listener = TcpListener(address, self._readiness, self, keys, liveness)
        else:
            listener = UnixListener(address, self._readiness, self)
        self._listeners.append(listener)
        self._at_close.callback(listener.close)
        return listener.address

    # ---- other events ----

    def watch(self, pid: int, namespace: int | None, ended: Callable[[], None]) -> None:
        """Call ``ended`` once when that process ends; never, if it can't be watched from here."""
        descriptor = open_process(pid, namespace)
        if descriptor is None:
            return
        if descriptor < 0:
            guarded(ended)
            return

        def end() -> None:
            dismiss()
            self._watched.discard(descriptor)
            os.close(descriptor)
            ended()

        dismiss = self.attend(descriptor, end)
        self._watched.add(descriptor)

    def attend(self, descriptor: int, ready: Callable[[], None]) -> Callable[[], None]:
        """Call ``ready`` in the serving thread whenever this descriptor is readable.

        Returns a function that stops attending: call it once, in the serving thread, before the descriptor is closed.
        """
        self._readiness.add(descriptor, lambda _: ready())
        return lambda: self._readiness.remove(descriptor)

    # ---- serving ----

    def serve(self, handler: Handler) -> None:
        """Answer until ``stop``, then close everything."""
        self._handler = handler
        try:
            while not self._stopping:
                self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Make ``serve`` return; from any thread, or a signal handler."""
        self._stopping = True
        with self._lock:  # otherwise the serving thread might close the descriptor in between
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def _turn(self) -> None:
        at, began = self._handler.next_deadline(), None
        due = math.inf if at is None else at
        for listener in self._listeners:
            due = min(due, listener.next_deadline())
        for act, ready in self._readiness.wait(max(0.0, due - time.monotonic())):
            began = began or time.monotonic()
            guarded(act, ready)
        if due <= (now := time.monotonic()):
            began = began or now
            guarded(self._expire, now)
        if began is not None:
            self.turned(time.monotonic() - began)

    def _expire(self, now: float) -> None:
        at = self._handler.next_deadline()
        if at is not None and at <= now:
            guarded(self._send, self._handler.expire)
        for listener in self._listeners:
            listener.expire(now)

    def _send(self, make: Callable[..., Iterable[Outgoing]], *args: Any) -> None:
        # One by one, as they are made, so that answers before an error are sent.
        for answer in make(*args, time.monotonic()):
            guarded(answer.envelope.route.send, answer)

    # ---- clients; the last three methods: see ``Arrivals`` ----

    def clients(self) -> dict[str, int]:
        """The number of connections of each client."""
        return {client: len(routes) for client, routes in self._routes.items()}

    def disconnect(self, client: str) -> None:
        """Close all connections of a client. Received requests are still handled, then ``client_gone`` is called."""
        for route in list(self._routes.get(client, ())):
            route.disconnect()

    def deliver(self, envelope: Envelope, header: bytes, frames: list[memoryview]) -> None:
        """A request has arrived."""
        guarded(self._send, self._handler.handle, envelope, header, frames)

    def joined(self, client: str, route: Route) -> None:
        """A connection has named its client."""
        self._routes.setdefault(client, set()).add(route)

    def left(self, client: str, route: Route) -> None:
        """Such a connection has closed. With its last one the client is gone."""
        routes = self._routes[client]
        routes.discard(route)
        if routes:
            guarded(self._send, self._handler.connection_gone, client, route)
            return
        del self._routes[client]
        guarded(self._send, self._handler.client_gone, client)

    # ---- the end ----

    def at_close(self, act: Callable[[], None]) -> None:
        """Run this when the server closes, in the serving thread, while ``attend`` still works."""
        self._at_close.callback(act)

    def close(self) -> None:
        """Close everything, in the serving thread or if it never served. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for descriptor in self._watched:
            os.close(descriptor)
        self._routes.clear()
        self._at_close.close()


def _nothing(_: float) -> None:
    """Waking up is enough."""
