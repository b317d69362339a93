# SPDX-License-Identifier: Apache-2.0
"""The serving end over ZMQ: one ROUTER socket, any number of clients on any host."""

from __future__ import annotations

import struct
from typing import NamedTuple

import zmq

from transfer_queue.transport.base import Envelope, Outgoing
from transfer_queue.transport.zmq_context import close_socket, open_socket

_ENVELOPE_FRAMES = 4  # route, client, request id, header
_ID = struct.Struct("<Q")


class Request(NamedTuple):
    """What a client asks."""

    envelope: Envelope
    header: bytes
    frames: list[memoryview]


class ZmqPort:
    """Its descriptor tells of news once, and any use of the socket may swallow that: hence ``unread``."""

    def __init__(self, address: str) -> None:
        """Raises zmq.ZMQError: the address can't be bound."""
        self._socket = open_socket(zmq.ROUTER)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            close_socket(self._socket)
            raise
        self.descriptor: int = self._socket.FD
        self._used = True

    def told(self, _: int) -> None:
        """The descriptor is readable."""
        self._used = True

    def unread(self) -> bool:
        """Is there a message? Ask before waiting for the descriptor."""
        if self._used:
            self._used = bool(self._socket.get(zmq.EVENTS) & zmq.POLLIN)
        return self._used

    def receive(self) -> Request | None:
        """The next request; None when there is none. What strangers say is passed over."""
        self._used = True
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(parts) < _ENVELOPE_FRAMES or len(parts[2]) != _ID.size:
                continue
            (request_id,) = _ID.unpack(parts[2].bytes)
            envelope = Envelope(parts[1].bytes.decode(errors="replace"), request_id, parts[0].bytes)
            return Request(envelope, parts[3].bytes, [part.buffer for part in parts[_ENVELOPE_FRAMES:]])

    def send(self, answer: Outgoing) -> None:
        """Dropped when its client is there no more."""
        self._used = True
        head = [answer.envelope.route, _ID.pack(answer.envelope.request_id), answer.header]
        self._socket.send_multipart([*head, *answer.frames], copy=False)

    def close(self) -> None:
        close_socket(self._socket)
