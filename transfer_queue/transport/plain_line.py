# SPDX-License-Identifier: Apache-2.0
"""The calling end of a plain Unix socket: no thread between the two processes, and its end tells of the peer's."""

from __future__ import annotations

import weakref

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Call, Peer, Reply
from transfer_queue.transport.framing import FramingError, Inbound, Outbound, encode
from transfer_queue.transport.line import gone
from transfer_queue.transport.plain_sockets import connected, line_path


class PlainLine:
    """See ``Line``."""

    watch = None
    tells_once = False
    sends_later = False

    def __init__(self, peer: Peer, client: str) -> None:
        """Raises OSError: the peer has no plain socket, or nobody accepts there."""
        path = line_path(peer.address)
        if path is None:
            raise OSError(f"no plain socket belongs to {peer.address!r}")
        self.peer = peer
        self.broken = False
        self._socket = connected(path)
        weakref.finalize(self, self._socket.close)  # as ZMQ's do: a caller may be dropped, or the process end, unclosed
        self.descriptor = self._socket.fileno()
        self._greeting = encode(0, client.encode())
        self._inbound = Inbound()
        self._outbound = Outbound()

    @property
    def unsent(self) -> bool:
        return bool(self._outbound)

    def send(self, request_id: int, call: Call) -> None:
        parts = encode(request_id, call.header, call.frames)
        if self._greeting:
            parts, self._greeting = [*self._greeting, *parts], []
        try:
            self._outbound.send(self._socket, parts)
        except OSError as error:
            raise self._broken() from error

    def flush(self) -> None:
        try:
            self._outbound.flush(self._socket)
        except OSError as error:
            raise self._broken() from error

    def own(self) -> None:
        self._outbound.own()

    def receive(self) -> list[tuple[int, Reply]]:
        try:
            messages = self._inbound.receive(self._socket)
        except BlockingIOError:
            return []
        except FramingError as error:
            self.broken = True
            raise QueueUnreachableError(f"{self.peer.name} at {self.peer.address} sent {error}") from error
        except (EOFError, OSError) as error:
            raise self._broken() from error
        return [(request_id, Reply(header, frames)) for request_id, header, frames in messages]

    def _broken(self) -> QueueUnreachableError:
        self.broken = True
        return gone(self.peer)

    def close(self) -> None:
        self._socket.close()
