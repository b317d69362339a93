# SPDX-License-Identifier: Apache-2.0
"""What callers and servers say to a transport: calls, replies, envelopes. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a NumPy array."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be called.

    ``pid`` and ``pid_namespace`` let a caller on the same host notice its death at once; None when unknown.
    """

    name: str
    address: str
    pid: int | None = None
    pid_namespace: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one peer: a short encoded header and the values' buffers beside it, sent without copying them."""

    peer: Peer
    header: bytes
    frames: Sequence[Buffer] = ()


class Reply(NamedTuple):
    """What a peer answered. The frames are read-only views of received memory."""

    header: bytes
    frames: list[memoryview]


class Caller(Protocol):
    """The calling side: many calls at once, answers in the order of the calls."""

    async def call_many(self, calls: Iterable[Call], timeout_s: float) -> list[Reply]:
        """Send each as soon as it is made, then wait for all, ``timeout_s`` from the last one on.

        What making a call raises is raised here; the answers to those before it are lost.

        Raises:
            QueueUnreachableError: a peer is gone, or did not answer within ``timeout_s``.
        """
        ...


class Envelope(NamedTuple):
    """Who asked and where the answer goes. ``client`` is the asking process' client id; the rest is the transport's."""

    client: str
    request_id: int
    route: Any


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One answer on its way to ``envelope``."""

    envelope: Envelope
    header: bytes
    frames: Sequence[Buffer] = field(default=())


class Handler(Protocol):
    """The deciding side of a server. Answers each envelope exactly once, at once or later."""

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        """Answers this request lets go, its own or parked ones. ``now`` is monotonic seconds."""
        ...

    def expire(self, now: float) -> Iterable[Outgoing]:
        """Answers whose deadline has passed."""
        ...

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, in monotonic seconds."""
        ...

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The client said goodbye or its process died."""
        ...
