# SPDX-License-Identifier: Apache-2.0
"""One connection to one peer as callers use it, whatever it is made of; it never waits."""

from __future__ import annotations

import errno
from typing import Protocol

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import Call, Peer, Reply


class Line(Protocol):
    """Used by one thread at a time."""

    @property
    def peer(self) -> Peer: ...

    @property
    def descriptor(self) -> int:
        """Readable when ``receive`` is due, writable when ``flush`` is."""
        ...

    @property
    def watch(self) -> int | None:
        """Readable when the peer's process has ended, -1 if it had before; None where the connection itself tells."""
        ...

    @property
    def tells_once(self) -> bool:
        """The descriptor tells of a reply once, and a send may swallow that: receive after each send, without being
        told, and then until there is nothing more."""
        ...

    @property
    def sends_later(self) -> bool:
        """A thread of others sends what the frames hold by then, and ``own`` can't change that any more."""
        ...

    @property
    def unsent(self) -> bool:
        """Something waits for ``flush``."""
        ...

    @property
    def broken(self) -> bool:
        """The connection has ended; make another."""
        ...

    def send(self, request_id: int, call: Call) -> None:
        """Raises QueueUnreachableError: the peer has gone."""
        ...

    def flush(self) -> None:
        """Send more of what didn't go at once. Raises QueueUnreachableError: the peer has gone."""
        ...

    def own(self) -> None:
        """Who sent may change his frames from now on: copy what is unsent."""
        ...

    def receive(self) -> list[tuple[int, Reply]]:
        """Replies that are here, by request id. Raises QueueUnreachableError: the peer has gone."""
        ...

    def close(self) -> None:
        """Idempotent. Drops what is unsent, and with it the late replies to what was."""
        ...


def gone(peer: Peer) -> QueueUnreachableError:
    process = "" if peer.pid is None else f" (process {peer.pid})"
    return QueueUnreachableError(
        f"{peer.name} at {peer.address}{process} has ended. What it held is lost; look at its output and start the "
        f"queue again."
    )


_ADVICE = {
    errno.EMFILE: "Close some files, or raise this process' limit (ulimit -n).",
    errno.ENFILE: "All processes of this machine together have too many files open.",
    errno.ENOMEM: "This machine is short of memory.",
    errno.ENOBUFS: "This machine is short of memory.",
}


def unconnected(peer: Peer, error: OSError) -> QueueUnreachableError:
    """The fault is on this side: the peer may live."""
    advice = _ADVICE.get(error.errno or 0, "May this process use that socket?")
    return QueueUnreachableError(f"can't connect to {peer.name} at {peer.address}: {error}. {advice}")


def silent(peer: Peer, timeout_s: float) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} did not answer within {timeout_s:.1f} s. Is the address right and the queue "
        f"still running?"
    )


def closed() -> ClosedError:
    return ClosedError("this client was closed; make a new one, or call init() again.")
