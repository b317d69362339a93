# SPDX-License-Identifier: Apache-2.0
"""The calling end over ZMQ, for peers on other hosts; it connects when the peer appears, never says that it left."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import zmq

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Call, Peer, Reply
from transfer_queue.transport.descriptors import Descriptors
from transfer_queue.transport.line import unconnected
from transfer_queue.transport.zmq_context import close_socket, open_socket
from transfer_queue.utils.processes import open_process

_ID = struct.Struct("<Q")


class ZmqLine:
    """See ``Line``."""

    tells_once = True
    sends_later = True
    unsent = False
    broken = False

    def __init__(self, peer: Peer, client: str) -> None:
        """Raises QueueUnreachableError: the address is none."""
        self.peer = peer
        self._client = client.encode()
        self._socket = _connected(peer)
        self.descriptor: int = self._socket.FD
        self.watch = open_process(peer.pid, peer.pid_namespace)
        self._watches = Descriptors(self, *() if self.watch in (None, -1) else (self.watch,))

    def send(self, request_id: int, call: Call) -> None:
        self._socket.send_multipart([self._client, _ID.pack(request_id), call.header, *call.frames], copy=False)

    def flush(self) -> None:
        """Nothing to do: ZMQ's own thread sends."""

    def own(self) -> None:
        """Nothing that could be done: see ``sends_later``."""

    def receive(self) -> list[tuple[int, Reply]]:
        replies = []
        while not self._socket.closed:
            try:
                found = _reply_in(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
            if found is not None:
                replies.append(found)
        return replies

    def close(self) -> None:
        self._watches.close()
        close_socket(self._socket)


def _connected(peer: Peer) -> Any:
    try:
        socket = open_socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise unconnected(peer, OSError(error.errno, error.strerror)) from error
    try:
        socket.connect(peer.address)
    except zmq.ZMQError as error:
        close_socket(socket)
        raise QueueUnreachableError(f"can't connect to {peer.name} at {peer.address!r}: {error}.") from error
    return socket


def _reply_in(parts: Sequence[Any]) -> tuple[int, Reply] | None:
    """None for what no server of ours says."""
    if len(parts) < 2 or len(parts[0]) != _ID.size:
        return None
    (request_id,) = _ID.unpack(parts[0].bytes)
    return request_id, Reply(parts[1].bytes, [part.buffer.toreadonly() for part in parts[2:]])
