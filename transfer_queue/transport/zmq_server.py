# SPDX-License-Identifier: Apache-2.0
"""The serving side over ZMQ: one ROUTER socket in front of one handler, in one thread."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from transfer_queue.transport.base import Envelope, Handler, Outgoing
from transfer_queue.transport.zmq_context import acquire_context, release_context
from transfer_queue.utils.processes import close_descriptor, open_process

_MESSAGES_PER_TURN = 64
_ENVELOPE_FRAMES = 4  # route, client, request id, header


class ZmqServer:
    """Binds at once, so that a client may connect as soon as the constructor returns."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = acquire_context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(0)  # a ROUTER at its high-water mark drops answers
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            release_context()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake_read, self._wake_write = os.pipe()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._watched: dict[int, Callable[[float], Iterable[Outgoing]]] = {}
        self._stopping = False

    def watch(self, pid: int, namespace: int | None, ended: Callable[[float], Iterable[Outgoing]]) -> None:
        """Call ``ended(now)`` once when that process ends; never, where it can't be watched from here."""
        descriptor = open_process(pid, namespace)
        if descriptor is None:
            return
        if descriptor < 0:
            self._send(ended(time.monotonic()))
            return
        self._watched[descriptor] = ended
        self._poller.register(descriptor, zmq.POLLIN)

    def stop(self) -> None:
        """Make ``serve`` return; from any thread, or a signal handler."""
        self._stopping = True
        os.write(self._wake_write, b"x")

    def serve(self, handler: Handler) -> None:
        """Answer until ``stop``, then close everything."""
        try:
            while not self._stopping:
                self._turn(handler)
        finally:
            self._close()

    def _turn(self, handler: Handler) -> None:
        deadline = handler.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 0.5
        events = dict(self._poller.poll(timeout))
        if self._socket in events:
            for _ in range(_MESSAGES_PER_TURN):
                if not self._receive(handler):
                    break
        for descriptor in events.keys() & self._watched.keys():
            ended = self._watched.pop(descriptor)
            self._poller.unregister(descriptor)
            close_descriptor(descriptor)
            self._send(ended(time.monotonic()))
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            self._send(handler.expire(now))

    def _receive(self, handler: Handler) -> bool:
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(parts) < _ENVELOPE_FRAMES or len(parts[2]) != struct.calcsize("<Q"):
            return True  # a stranger: there is no request to answer
        (request_id,) = struct.unpack("<Q", parts[2].bytes)
        envelope = Envelope(parts[1].bytes.decode(errors="replace"), request_id, parts[0].bytes)
        frames = [part.buffer for part in parts[_ENVELOPE_FRAMES:]]
        self._send(handler.handle(envelope, parts[3].bytes, frames, time.monotonic()))
        return True

    def _send(self, answers: Iterable[Outgoing]) -> None:
        for answer in answers:
            head = [answer.envelope.route, struct.pack("<Q", answer.envelope.request_id), answer.header]
            self._socket.send_multipart([*head, *answer.frames], copy=False)

    def _close(self) -> None:
        for descriptor in self._watched:
            close_descriptor(descriptor)
        self._watched.clear()
        self._socket.close(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)
        release_context()
