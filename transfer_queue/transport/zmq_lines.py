# SPDX-License-Identifier: Apache-2.0
"""One socket of one event loop to one peer: any number of calls at once, each reply finds its call by its number."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Peer, Reply
from transfer_queue.transport.zmq_context import close_socket, open_socket
from transfer_queue.utils.processes import close_descriptor, open_process

_ID = struct.Struct("<Q")


def connect(peer: Peer) -> Any:
    """A new socket to the peer; it need not be there yet."""
    socket = open_socket(zmq.DEALER)
    try:
        socket.connect(peer.address)
    except zmq.ZMQError as error:
        close_socket(socket)
        raise QueueUnreachableError(f"can't connect to {peer.name} at {peer.address!r}: {error}.") from error
    return socket


def packed(request_id: int) -> bytes:
    """A request's number as it travels."""
    return _ID.pack(request_id)


def reply_in(parts: Sequence[Any]) -> tuple[int, Reply] | None:
    """The number of the request and its reply; None for what no server of ours says."""
    if len(parts) < 2 or len(parts[0]) != _ID.size:
        return None
    (request_id,) = _ID.unpack(parts[0].bytes)
    return request_id, Reply(parts[1].bytes, [part.buffer.toreadonly() for part in parts[2:]])


def gone(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} (process {peer.pid}) has ended. What it held is lost; look at its output and "
        f"start the queue again."
    )


def silent(peer: Peer, timeout_s: float) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} did not answer within {timeout_s:.1f} s. Is the address right and the queue "
        f"still running?"
    )


class LoopLine:
    """Used in its loop's thread only. The loop knows its descriptors only while a call waits."""

    def __init__(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.loop = loop
        self._socket = connect(peer)
        self._watch = open_process(peer.pid, peer.pid_namespace)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def send(self, request_id: int, parts: Sequence[Any]) -> asyncio.Future[Reply]:
        """The future reply. ``forget`` must follow, whatever becomes of it."""
        if not self._waiting:
            self._listen()
        future = self._waiting[request_id] = self.loop.create_future()
        self._socket.send_multipart(parts, copy=False)
        # A socket tells of a reply once, and a send may have swallowed that: look without being told.
        self.loop.call_soon(self._receive)
        if self._watch == -1:
            future.set_exception(gone(self.peer))
        return future

    def forget(self, request_id: int) -> None:
        """Nobody waits for this reply any more."""
        future = self._waiting.pop(request_id, None)
        if future is None:
            return
        if future.done() and not future.cancelled():
            future.exception()  # looked at, so that asyncio doesn't complain about an error nobody awaited
        if not self._waiting:
            self._stop_listening()

    def _descriptors(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {self._socket.FD: self._receive}
        if self._watch is not None and self._watch >= 0:
            found[self._watch] = self._peer_ended
        return found

    def _listen(self) -> None:
        for descriptor, callback in self._descriptors().items():
            self.loop.add_reader(descriptor, callback)

    def _stop_listening(self) -> None:
        for descriptor in self._descriptors():
            self.loop.remove_reader(descriptor)

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                found = reply_in(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
            future = None if found is None else self._waiting.get(found[0])
            if found is not None and future is not None and not future.done():
                future.set_result(found[1])

    def _peer_ended(self) -> None:
        self._receive()  # what it said before it ended still counts
        self._fail(lambda: gone(self.peer))

    def _fail(self, error: Callable[[], Exception]) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error())

    def close(self, error: Callable[[], Exception]) -> None:
        """Fail what waits, close the socket. Idempotent."""
        if self._socket.closed:
            return
        self._fail(error)
        if self._waiting:
            self._stop_listening()
            self._waiting = {}
        close_socket(self._socket)
        close_descriptor(self._watch)

    def close_from_anywhere(self, error: Callable[[], Exception]) -> None:
        """``close``, in the loop's thread where that one is running it."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            try:
                self.loop.call_soon_threadsafe(self.close, error)
                return
            except RuntimeError:  # it was closed in between
                pass
        self.close(error)
