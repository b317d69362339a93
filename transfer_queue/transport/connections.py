# SPDX-License-Identifier: Apache-2.0
"""The client's connections: their interface; one shared by the calls of an event loop; the errors without one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Protocol

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import CONFIRM, Buffer, Peer, PeerCall
from transfer_queue.transport.framing import Message


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
    def reached(self) -> bool:
        """Whether something listens at the other end: it is there, even if it does not answer now."""

    @property
    def unsent(self) -> bool:
        """Something waits for ``flush``."""

    @property
    def settled(self) -> bool:
        """Everything is sent, and the server has confirmed each ``CONFIRM``, or the connection is broken."""

    def send(self, number: int, header: bytes, frames: Sequence[Buffer] = ()) -> None:
        """Raises QueueUnreachableError if the peer has ended.

        A ``CONFIRM`` arrives even if only this connection has ended, where its session can go on with another one.
        """

    def flush(self) -> None:
        """Send more of what could not be sent at once. Raises QueueUnreachableError if the peer has ended."""

    def own(self) -> None:
        """Copy what is unsent, because the owners of the frames may change them from now on."""

    def receive(self) -> list[Message]:
        """Return the messages that are here now, if any. Raises QueueUnreachableError if the peer has ended."""

    def close(self) -> None:
        """Close and drop what is unsent. Idempotent."""


def gone(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} has ended, or has ended the session of this client. In the first case, what it "
        f"held is lost: look at its output."
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
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EPIPE, errno.ECONNRESET):
        return absent(peer)
    advice = _ADVICE.get(error.errno or 0, "Is the address right?")
    return QueueUnreachableError(f"can't connect to {peer.name} at {peer.address}: {error}. {advice}")


def no_address(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"can't connect to {peer.name} at {peer.address!r}: an address is ipc://PATH or tcp://HOST:PORT."
    )


def silent(peer: Peer, timeout_s: float, reached: bool) -> QueueUnreachableError:
    advice = "Is the address right and the queue still running?"
    if reached:
        advice = (
            "It is there, but busy or stopped, or no more clients can connect, or it is no queue: try again. Its log "
            "and get_stats()['alarms'] say what holds a queue."
        )
    return QueueUnreachableError(f"{peer.name} at {peer.address} did not answer within {timeout_s:.1f} s. {advice}")


def closed() -> ClosedError:
    return ClosedError("this client was closed; make a new one, or call init() again.")


class LoopConnection:
    """Used in its loop's thread only. The loop watches its descriptor only while calls wait or have to be sent."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connection = connection
        self._asked: dict[int, tuple[PeerCall, asyncio.Future[Message]]] = {}
        self._writing = False

    @property
    def is_left_unsettled(self) -> bool:
        """No call waits, so the loop may end, and there is something to send or to be confirmed."""
        return not (self._asked or self.connection.settled)

    def send(self, call: PeerCall) -> asyncio.Future[Message]:
        """Send a call and return its future reply. ``done`` or ``cancel`` must follow in every case."""
        if not self._asked:
            self.loop.add_reader(self.connection.descriptor, self._try, self._receive)
        future = self.loop.create_future()
        self._asked[call.number] = (call, future)
        self._try(lambda: self.connection.send(call.number, call.header, call.frames))
        return future

    def post(self, call: PeerCall, number: int) -> None:
        """Send without expecting an answer. Raises QueueUnreachableError if the peer has ended."""
        try:
            self.connection.send(number, call.header, call.frames)
            self.connection.own()
        finally:
            self._write()

    def done(self, call: PeerCall) -> None:
        """Stop waiting for the reply."""
        if self._asked.pop(call.number, None) is not None and not self._asked:
            self.loop.remove_reader(self.connection.descriptor)
            self._write()

    def cancel(self, call: PeerCall) -> None:
        """The call has failed: send its cancel after it, and stop waiting for its reply."""
        if call.number in self._asked:
            revoke(self.connection, call.cancel)
            self._write()
        self.done(call)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except QueueUnreachableError as error:
            self._fail(error)
            self.loop.remove_reader(self.connection.descriptor)
        self._write()

    def _write(self) -> None:
        wanted = self.connection.unsent and not self.connection.broken
        wanted = wanted and bool(self._asked) and not self.loop.is_closed()
        if wanted and not self._writing:
            self.loop.add_writer(self.connection.descriptor, self._try, self.connection.flush)
        elif self._writing and not wanted:
            self.loop.remove_writer(self.connection.descriptor)
        self._writing = wanted

    def _receive(self) -> None:
        for message in self.connection.receive():
            _, future = self._asked.get(message.number, (None, None))
            if future is not None and not future.done():
                future.set_result(message)

    def _fail(self, error: Exception) -> None:
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(type(error)(str(error)))  # each has its own traceback
                future.exception()  # retrieved, so that asyncio doesn't log it

    def retire(self) -> Connection:
        """Return the connection for use elsewhere; waiting calls, of a loop that has closed, are cancelled."""
        self._revoke_all()
        self._write()
        return self.connection

    def _revoke_all(self) -> None:
        for call, _ in self._asked.values():
            revoke(self.connection, call.cancel)
        self._asked.clear()

    def close(self, error: Exception) -> None:
        """Fail waiting calls, and close the connection; once."""
        self._fail(error)
        if self.connection.broken:  # otherwise the session ends, and they with it
            self._revoke_all()
        self._asked.clear()
        self._write()
        if not self.loop.is_closed():
            self.loop.remove_reader(self.connection.descriptor)
        self.connection.close()

    def close_from_anywhere(self, error: Exception) -> None:
        """``close``, in the loop's thread if the loop is running there."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            with contextlib.suppress(RuntimeError):  # it was closed in between
                self.loop.call_soon_threadsafe(self.close, error)
                return
        self.close(error)


def revoke(connection: Connection, cancel: Callable[[], bytes] | None) -> None:
    """Send the cancel after a call, and return the call's frames to their owner."""
    if not connection.broken:
        connection.own()
    if cancel is not None:
        with contextlib.suppress(QueueUnreachableError):  # the peer has ended, and the call with it
            connection.send(CONFIRM, cancel())
