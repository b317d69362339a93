# SPDX-License-Identifier: Apache-2.0
"""What callers and servers say to a transport: calls, replies, envelopes. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a NumPy array."""

NOBODY_WAITS = 0
"""The request id of a message that expects no answer: of ``tell``, and of a cancel."""

HEARTBEAT_S = 2.0
"""Between hosts: how often each end of a connection hears of the other, at least."""

LEASE_S = 15.0
"""Between hosts: how long an end of a connection may be silent before the other takes it for dead."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be called. ``address``: ``ipc://PATH`` or ``tcp://HOST:PORT``."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one peer: a short encoded header and the values' buffers beside it.

    ``cancel`` is the header that revokes the call. It is sent on the same connection, after the call, when the call
    fails or is given up; empty: the call is only not waited for any more.
    """

    peer: Peer
    header: bytes
    frames: Sequence[Buffer] = ()
    cancel: bytes = b""


class Reply(NamedTuple):
    """What a peer answered. The frames are read-only views of received memory."""

    header: bytes
    frames: list[memoryview]


class Caller(Protocol):
    """The calling side: many calls at once, answers in the order of the calls."""

    async def call_many(self, calls: Iterable[Call], timeout_s: float) -> list[Reply]:
        """Send each as soon as it is made, then wait for all, ``timeout_s`` from the last one on.

        Either all answers are returned, or the cancel of every call that was sent is sent, too. That holds for a
        deadline, a cancelled task, Ctrl-C, a closed ``Begun``, and for an error of one call or of making it.

        Raises:
            QueueUnreachableError: a peer has ended, or did not answer within ``timeout_s``.
        """
        ...

    async def tell(self, call: Call) -> None:
        """Send a message that expects no answer; never waits. What can't be sent at once goes before the next message
        of its connection. An event loop sends it as soon as there is room.

        Raises:
            QueueUnreachableError: the peer has ended, as far as that is known by now.
        """
        ...


class Envelope(NamedTuple):
    """The client that asked, and the way back to it. ``request_id`` is ``NOBODY_WAITS`` where none is expected.

    The name is the one that the client's connection gave when it was opened.
    """

    client: str
    request_id: int
    route: Any


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One answer on its way to ``envelope``. It is dropped where nobody waits."""

    envelope: Envelope
    header: bytes
    frames: Sequence[Buffer] = field(default=())


class Handler(Protocol):
    """The deciding side of a server. It answers each envelope at most once, at once or later."""

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        """The answers that this request makes possible, its own or parked ones. ``now`` is monotonic seconds."""
        ...

    def expire(self, now: float) -> Iterable[Outgoing]:
        """Answers whose deadline has passed."""
        ...

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, in monotonic seconds."""
        ...

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The last connection of this client has closed, and all that came on it has been handled."""
        ...


class Service(Protocol):
    """What a listener tells the server that it belongs to."""

    def deliver(self, envelope: Envelope, header: bytes, frames: list[memoryview]) -> None:
        """A request has come."""
        ...

    def joined(self, client: str, route: Route) -> None:
        """A connection has said to which client it belongs."""
        ...

    def left(self, client: str, route: Route) -> None:
        """Such a connection has closed."""
        ...


class Route(Protocol):
    """The server's end of one connection of a client."""

    def send(self, answer: Outgoing) -> None:
        """Dropped when the client is there no more. Calls nothing of the server."""
        ...

    def disconnect(self) -> None:
        """Send no more, and end the connection soon: the server is told by ``left``, but not within this call."""
        ...


class Listener(Protocol):
    """Where clients of one address come in."""

    address: str
    """Where it listens; for ``tcp://HOST:0`` with the port that was free."""

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, in monotonic seconds."""
        ...

    def expire(self, now: float) -> None:
        """Do what was due."""
        ...

    def close(self) -> None:
        """Close every connection without a word to the server, and leave no file."""
        ...
