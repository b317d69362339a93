# SPDX-License-Identifier: Apache-2.0
"""The interface of one connection to one peer, for any transport; and the errors if there is none."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import Buffer, Peer
from transfer_queue.transport.framing import Message


class Descriptors:
    """Not closed when the process ends, because other threads may still use them; the kernel closes them after the last
    thread.
    """

    def __init__(self, owner: object, *descriptors: int) -> None:
        self._open = list(descriptors)
        weakref.finalize(owner, _close, self._open).atexit = False
        _all.add(self)

    def at(self, position: int) -> int:
        """One of the descriptors; -1 once they are closed."""
        try:
            return self._open[position]
        except IndexError:
            return -1

    def close(self) -> None:
        """Close all. Idempotent, in any thread."""
        _close(self._open)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        try:
            descriptor = descriptors.pop()
        except IndexError:  # another thread closed it
            return
        os.close(descriptor)


_all: weakref.WeakSet[Descriptors] = weakref.WeakSet()


def _after_fork() -> None:
    # A child's copy would keep a dead parent's connection open, or the contents of a file alive.
    for copies in list(_all):
        copies.close()


os.register_at_fork(after_in_child=_after_fork)


class Connection(Protocol):
    """Used by one thread at a time; never waits. Its first message names its client.

    A Ctrl-C between any two steps leaves it usable: sending or reading and recording it are a single step.
    """

    peer: Peer
    descriptor: int
    """Readable if ``receive`` is due, writable if ``flush`` is."""
    broken: bool
    """The connection has ended; make another."""

    @property
    def unsent(self) -> bool:
        """Something waits for ``flush``."""
        ...

    def send(self, request_id: int, header: bytes, frames: Sequence[Buffer] = ()) -> None:
        """Raises QueueUnreachableError if the peer has ended."""
        ...

    def flush(self) -> None:
        """Send more of what could not be sent at once. Raises QueueUnreachableError if the peer has ended."""
        ...

    def own(self) -> None:
        """Copy what is unsent, because the owners of the frames may change them from now on."""
        ...

    def receive(self) -> list[Message]:
        """Return the messages that are here now, if any. Raises QueueUnreachableError if the peer has ended."""
        ...

    def close(self) -> None:
        """Close and drop what is unsent. Idempotent."""
        ...


def gone(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} has ended. What it held is lost; look at its output and start the queue again."
    )


def absent(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} has ended, or the address is wrong: nothing listens there. Is the process that "
        f"started the queue still running?"
    )


_ADVICE = {
    errno.EMFILE: "Close some files, or raise this process' limit (ulimit -n).",
    errno.ENFILE: "All processes of this machine together have too many files open.",
    errno.ENOMEM: "This machine is short of memory.",
    errno.ENOBUFS: "This machine is short of memory.",
    errno.EACCES: "This socket belongs to another user: a queue serves the user that started it.",
    errno.EPERM: "This socket belongs to another user: a queue serves the user that started it.",
    errno.EAGAIN: "Too many connect at once, or the server hangs: look at its output, and try again.",
}


def unconnected(peer: Peer, error: OSError) -> QueueUnreachableError:
    """The error for a peer that may be alive but can't be reached."""
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return absent(peer)
    advice = _ADVICE.get(error.errno or 0, "Is the address right?")
    return QueueUnreachableError(f"can't connect to {peer.name} at {peer.address}: {error}. {advice}")


def no_address(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"can't connect to {peer.name} at {peer.address!r}: an address is ipc://PATH or tcp://HOST:PORT."
    )


def silent(peer: Peer, timeout_s: float) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} did not answer within {timeout_s:.1f} s. Is the address right and the queue "
        f"still running?"
    )


def closed() -> ClosedError:
    return ClosedError("this client was closed; make a new one, or call init() again.")
