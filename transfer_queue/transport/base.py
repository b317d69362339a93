# SPDX-License-Identifier: Apache-2.0
"""What callers, servers and transports know of each other, in client and server: calls, replies, envelopes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a NumPy array."""

NOBODY_WAITS = 0
"""The number of a message that expects no answer: from ``post``."""

CONFIRM = (1 << 40) - 1
"""The number of a message that expects no answer, but must arrive whatever its client does next: a cancel."""


class Liveness(NamedTuple):
    """How both ends of a connection between hosts know that the other is alive."""

    heartbeat_s: float = 2.0
    """The longest interval between messages, in each direction."""
    lease_s: float = 15.0
    """How long an end may be silent before the other considers it dead."""


USUAL_LIVENESS = Liveness()


class Peer(NamedTuple):
    """A server that can be called. ``address``: ``ipc://PATH`` or ``tcp://HOST:PORT``."""

    name: str
    address: str


class PeerCall(msgspec.Struct, frozen=True):
    """One request to one peer: a short encoded header, and the values' buffers.

    ``number`` is its own among all calls of the caller; the answer comes with it.
    ``cancel`` makes the header of the message that cancels the call. It is sent on the same connection, after the call,
    if the call fails or is cancelled. None: only stop waiting for the answer.
    """

    peer: Peer
    header: bytes
    frames: Sequence[Buffer] = ()
    cancel: Callable[[], bytes] | None = None
    number: int = NOBODY_WAITS


class Envelope(msgspec.Struct, frozen=True):
    """The client that sent a request, and the route of the answer. ``number``: of the call; ``NOBODY_WAITS`` if
    no answer is expected.

    The name is the one that the client's connection gave when it was opened.
    """

    client: str
    number: int
    route: Any


class Outgoing(msgspec.Struct, frozen=True):
    """One answer to be sent to ``envelope``. It is dropped if no call waits for it."""

    envelope: Envelope
    header: bytes
    frames: Sequence[Buffer] = ()


class Handler(Protocol):
    """The deciding side of a server. It answers each envelope at most once, at once or later."""

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        """The answers that this request makes possible, its own or of those that wait. ``now`` is monotonic seconds."""

    def expire(self, now: float) -> Iterable[Outgoing]:
        """Return answers to requests past their deadline."""

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, in monotonic seconds."""

    def connection_gone(self, client: str, route: Route, now: float) -> Iterable[Outgoing]:
        """One of the connections of this client has closed, and others are open."""

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The last connection of this client has closed, and everything that it sent has been handled."""


class Route(Protocol):
    """The server's end of one connection of a client."""

    def send(self, answer: Outgoing) -> None:
        """Send an answer; it is dropped if the client has gone. It calls nothing of the server."""

    def disconnect(self) -> None:
        """Stop sending, and close the connection soon. The server gets ``left``, but not within this call."""


class Arrivals(Protocol):
    """What a listener tells its server."""

    def deliver(self, envelope: Envelope, header: bytes, frames: list[memoryview]) -> None:
        """A request has arrived."""

    def joined(self, client: str, route: Route) -> None:
        """A connection has named its client."""

    def left(self, client: str, route: Route) -> None:
        """Such a connection has closed. With its last one the client is gone."""


class Listener(Protocol):
    """Accepts clients at one address."""

    address: str
    """The address; for ``tcp://HOST:0`` with the port that was chosen."""

    def next_deadline(self) -> float:
        """When ``expire`` must be called next, in monotonic seconds; infinity for never."""

    def expire(self, now: float) -> None:
        """Do what is due."""

    def close(self) -> None:
        """Close every connection without notifying the server, and remove its files."""
