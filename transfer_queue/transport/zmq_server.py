# SPDX-License-Identifier: Apache-2.0
"""The serving side over ZMQ: one ROUTER socket in front of one handler, in one thread."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Iterable

import zmq

from transfer_queue.transport.base import Envelope, Handler, Outgoing
from transfer_queue.transport.zmq_context import close_socket, open_socket
from transfer_queue.utils.processes import close_descriptor, open_process

_MESSAGES_PER_TURN = 64
_ENVELOPE_FRAMES = 4  # route, client, request id, header
_ID = struct.Struct("<Q")

Ended = Callable[[float], Iterable[Outgoing]]


class ZmqServer:
    """Binds at once, so that a client may connect as soon as the constructor returns."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = open_socket(zmq.ROUTER)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            close_socket(self._socket)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake_read, self._wake_write = os.pipe()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._watched: dict[int, Ended] = {}
        self._stopping = False
        self._closed = False

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
        self._watched[descriptor] = ended
        self._poller.register(descriptor, zmq.POLLIN)
        return lambda: self._unwatch(descriptor, ended)

    def _unwatch(self, descriptor: int, ended: Ended) -> None:
        if self._watched.get(descriptor) is ended:  # else it ended, and the number may mean another file by now
            del self._watched[descriptor]
            self._poller.unregister(descriptor)
            close_descriptor(descriptor)

    def stop(self) -> None:
        """Make ``serve`` return; from any thread, or a signal handler."""
        self._stopping = True
        if not self._closed:
            os.write(self._wake_write, b"x")

    def serve(self, handler: Handler) -> None:
        """Answer until ``stop``, then close everything."""
        try:
            while not self._stopping:
                self._turn(handler)
        finally:
            self.close()

    def _turn(self, handler: Handler) -> None:
        deadline = handler.next_deadline()
        timeout = None if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
        events = dict(self._poller.poll(timeout))
        if self._socket in events:
            for _ in range(_MESSAGES_PER_TURN):
                if not self._receive(handler):
                    break
        for descriptor in events.keys() & self._watched.keys():
            ended = self._watched.get(descriptor)
            if ended is not None:  # else the one before it made us stop watching
                self._unwatch(descriptor, ended)
                self._send(ended(time.monotonic()))
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            self._send(handler.expire(now))

    def _receive(self, handler: Handler) -> bool:
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(parts) < _ENVELOPE_FRAMES or len(parts[2]) != _ID.size:
            return True  # a stranger: there is no request to answer
        (request_id,) = _ID.unpack(parts[2].bytes)
        envelope = Envelope(parts[1].bytes.decode(errors="replace"), request_id, parts[0].bytes)
        frames = [part.buffer for part in parts[_ENVELOPE_FRAMES:]]
        self._send(handler.handle(envelope, parts[3].bytes, frames, time.monotonic()))
        return True

    def _send(self, answers: Iterable[Outgoing]) -> None:
        for answer in answers:
            head = [answer.envelope.route, _ID.pack(answer.envelope.request_id), answer.header]
            self._socket.send_multipart([*head, *answer.frames], copy=False)

    def close(self) -> None:
        """Close everything, in the thread that served or instead of serving. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._watched:
            close_descriptor(descriptor)
        self._watched.clear()
        close_socket(self._socket)
        os.close(self._wake_read)
        os.close(self._wake_write)
