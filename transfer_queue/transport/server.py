# SPDX-License-Identifier: Apache-2.0
"""The serving side of one address: a handler behind ZMQ and plain Unix sockets, and all else that it waits for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from transfer_queue.transport.base import Buffer, Envelope, Handler, Outgoing, Reply
from transfer_queue.transport.plain_port import Connection, PlainPort
from transfer_queue.transport.plain_sockets import line_path
from transfer_queue.transport.serving_loop import ServingLoop
from transfer_queue.transport.zmq_port import ZmqPort
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.utils.processes import close_descriptor, open_process

_log = get_logger(__name__)
_MESSAGES_PER_TURN = 64

Ended = Callable[[float], Iterable[Outgoing]]
Ready = Callable[[float], Iterable[Outgoing]]


class SocketServer:
    """Binds at once, so that a client may connect as soon as the constructor returns."""

    def __init__(self, address: str, plain: bool = True, loop: ServingLoop | None = None) -> None:
        """Args:
            plain: Clients on this host may use a plain Unix socket beside that of an ``ipc://`` address.
            loop: Whose thread serves it, with the loop's other servers; None: one of its own.
        Raises:
            zmq.ZMQError: the address can't be bound.
        """
        self.address = address
        self._loop = loop or ServingLoop()
        self._readiness = self._loop.readiness
        self._handler: Handler | None = None
        self._watched: dict[int, Ended] = {}
        self._attended: dict[int, Ready] = {}
        self._last_acts: list[Callable[[], None]] = []
        # Before the ZMQ socket: whoever sees that one finds this one, too.
        self._plain = self._plain_port(line_path(address) if plain else None)
        try:
            self._zmq = ZmqPort(address)
        except BaseException:
            self._close_plain()
            if loop is None:
                self._loop.close()
            raise
        self._readiness.add(self._zmq.descriptor, self._zmq.told)
        self._loop.add(self)

    def _plain_port(self, path: str | None) -> PlainPort | None:
        with contextlib.suppress(OSError):  # too long for a Unix socket, say: then clients use ZMQ
            return None if path is None else PlainPort(path, self._readiness, self._deliver)
        return None

    def watch(self, pid: int, namespace: int | None, ended: Ended) -> Callable[[], None]:
        """Call ``ended(now)`` once when that process ends; never, where it can't be watched from here.

        Returns what stops watching: call it in the serving thread when the process is of no interest any more.
        """
        descriptor = open_process(pid, namespace)
        if descriptor is None:
            return lambda: None
        if descriptor < 0:
            self._send(ended(time.monotonic()))
            return lambda: None

        def end(_: int) -> None:
            self._unwatch(descriptor, ended)
            self._act(ended)

        self._watched[descriptor] = ended
        self._readiness.add(descriptor, end)
        return lambda: self._unwatch(descriptor, ended)

    def _unwatch(self, descriptor: int, ended: Ended) -> None:
        if self._watched.get(descriptor) is ended:  # else it ended, and the number may mean another file by now
            del self._watched[descriptor]
            self._readiness.remove(descriptor)
            close_descriptor(descriptor)

    def attend(self, descriptor: int, ready: Ready) -> Callable[[], None]:
        """Call ``ready(now)`` in the serving thread whenever this descriptor is readable, and send what it returns.

        Returns what stops attending: call it in the serving thread, before the descriptor is closed. Idempotent.
        """

        def act(_: int) -> None:
            self._act(ready)

        self._readiness.add(descriptor, act)
        self._attended[descriptor] = ready
        return lambda: self._dismiss(descriptor, ready)

    def _dismiss(self, descriptor: int, ready: Ready) -> None:
        if self._attended.get(descriptor) is ready:
            del self._attended[descriptor]
            self._readiness.remove(descriptor)

    # ---- serving ----

    def open(self, handler: Handler) -> None:
        """Who answers; the loop may run from then on."""
        self._handler = handler

    def serve(self, handler: Handler) -> None:
        """Answer until ``stop``, then close everything of the loop."""
        self.open(handler)
        self._loop.run()

    def stop(self) -> None:
        """Make ``serve`` return; from any thread, or a signal handler."""
        self._loop.stop()

    def next_deadline(self) -> float | None:
        return None if self._handler is None else self._handler.next_deadline()

    def expire(self, now: float) -> None:
        if self._handler is not None:
            self._act(self._handler.expire)

    def unread(self) -> bool:
        return self._zmq.unread()

    def take(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if not self._zmq.unread():
                return
            request = self._zmq.receive()
            if request is not None:
                self._deliver(*request)

    def ask(self, client: str, header: bytes, frames: Sequence[Buffer] = ()) -> Reply | None:
        """A request from within the serving thread: its answer, None when it is parked, which then gets none."""
        assert self._handler is not None
        inside, own = Envelope(client, 0, self), None
        views = [memoryview(frame) for frame in frames]
        for answer in self._handler.handle(inside, header, views, time.monotonic()):
            if answer.envelope is inside:
                own = Reply(answer.header, [memoryview(frame) for frame in answer.frames])
            else:
                self._send([answer])
        return own

    def _deliver(self, envelope: Envelope, header: bytes, frames: list[memoryview]) -> None:
        assert self._handler is not None  # connections are read from while serving only
        self._send(self._handler.handle(envelope, header, frames, time.monotonic()))

    def _act(self, act: Callable[[float], Iterable[Outgoing]]) -> None:
        """What no request asked for: nobody can be told what goes wrong, and all that are served here must go on."""
        try:
            self._send(act(time.monotonic()))
        except Exception:
            _log.exception("the server at %s could not finish something, and goes on", self.address)

    def _send(self, answers: Iterable[Outgoing]) -> None:
        for answer in answers:
            route = answer.envelope.route
            if isinstance(route, Connection):
                route.send(answer)
            elif route is not self:  # else nobody waits for it any more
                self._zmq.send(answer)

    def at_close(self, act: Callable[[], None]) -> None:
        """Do this when everything is closed, in the thread that serves, while ``attend`` still works."""
        self._last_acts.append(act)

    def _close_plain(self) -> None:
        if self._plain is not None:
            self._plain.close()

    def close(self) -> None:
        """Close everything of the loop, in the thread that served or instead of serving. Idempotent."""
        self._loop.close()

    def release(self) -> None:
        for act in self._last_acts:
            act()
        for descriptor in self._watched:
            close_descriptor(descriptor)
        self._watched.clear()
        self._attended.clear()
        self._close_plain()
        self._readiness.remove(self._zmq.descriptor)
        self._zmq.close()
