# SPDX-License-Identifier: Apache-2.0
"""A file descriptor handed to processes of this host over a Unix socket, which stays open: its end is the process' end.

The guest may say 64-bit words on it, which cost a system call and no answer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from transfer_queue.transport.base import Outgoing

_WORD = struct.Struct("<Q")
_GREETING_TIMEOUT_S = 10.0
_BACKLOG = 512
_WORDS_PER_TURN = 256

Ready = Callable[[float], Iterable[Outgoing]]
Attend = Callable[[int, Ready], Callable[[], None]]


class Host(Protocol):
    """Who lends the descriptor."""

    def attached(self, guest: int) -> tuple[int, bytes]:
        """The descriptor to lend, and what else this guest should know."""
        ...

    def told(self, guest: int, word: int, now: float) -> Iterable[Outgoing]:
        """The guest said something."""
        ...

    def detached(self, guest: int, now: float) -> Iterable[Outgoing]:
        """The guest's process ended or let go."""
        ...


class Reception:
    """The serving side, in the thread of the server whose ``attend`` it uses."""

    def __init__(self, path: str, attend: Attend, host: Host) -> None:
        self._path = path
        self._attend = attend
        self._host = host
        self._numbers = itertools.count(1)
        self._guests: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._door.bind(path)
            self._door.listen(_BACKLOG)
        except OSError:
            self._door.close()
            raise
        self._door.setblocking(False)
        self._stop: Callable[[], None] | None = attend(self._door.fileno(), self._come_in)

    def close(self) -> None:
        """Stop; guests keep what they were lent."""
        self._shut()
        self._door.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for number in list(self._guests):
            self._say_goodbye(number)

    def _shut(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _come_in(self, now: float) -> Iterable[Outgoing]:
        try:
            connection, _ = self._door.accept()
        except OSError as error:  # it left again before it was let in, or there is no descriptor for it
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._guests:
                self._shut()  # until somebody leaves: to be told of it all the time would help nobody
            return ()
        with contextlib.suppress(OSError):  # it has left: to be heard of soon
            connection.setblocking(False)
            number = next(self._numbers)
            descriptor, greeting = self._host.attached(number)
            stop = self._attend(connection.fileno(), lambda now: self._listen(number, now))
            self._guests[number] = (connection, stop)
            socket.send_fds(connection, [_WORD.pack(number) + greeting], [descriptor])
        return ()

    def _listen(self, number: int, now: float) -> Iterable[Outgoing]:
        answers: list[Outgoing] = []
        if number not in self._guests:  # it was shown out in this very turn
            return answers
        connection, _ = self._guests[number]
        for _ in range(_WORDS_PER_TURN):
            try:
                packet = connection.recv(_WORD.size)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if len(packet) != _WORD.size:
                self._show_out(number)
                answers += self._host.detached(number, now)
                break
            (word,) = _WORD.unpack(packet)
            answers += self._host.told(number, word, now)
        return answers

    def _show_out(self, number: int) -> None:
        self._say_goodbye(number)
        if self._stop is None:
            self._stop = self._attend(self._door.fileno(), self._come_in)

    def _say_goodbye(self, number: int) -> None:
        connection, stop = self._guests.pop(number)
        stop()
        connection.close()


class Attachment:
    """The guest's side. ``descriptor`` is its own copy of what was lent; whoever uses it closes it."""

    def __init__(self, connection: socket.socket, number: int, descriptor: int, greeting: bytes) -> None:
        self.number = number
        self.descriptor = descriptor
        self.greeting = greeting
        self._connection = connection
        weakref.finalize(self, connection.close)  # a client may be dropped, or the process end, unclosed
        self._unsaid: deque[int] = deque()
        _attachments.add(self)

    def say(self, word: int) -> None:
        """From any thread, also while garbage is collected: it never waits.

        Where the host has no room to hear it now it is said with a later one, or by ``catch_up``.
        """
        self._unsaid.append(word)
        self.catch_up()

    def catch_up(self) -> None:
        """Say what the host had no room for before."""
        while self._unsaid:
            try:
                word = self._unsaid.popleft()
            except IndexError:  # another thread said it
                break
            try:
                self._connection.send(_WORD.pack(word), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._unsaid.appendleft(word)
                break
            except OSError:  # the host has ended, and all that it lent with it
                break

    def say_at_once(self, word: int) -> bool:
        """Before anything that was not said yet. Returns True once it lies with the host, which may have to read it."""
        try:
            self._connection.send(_WORD.pack(word), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Idempotent. In a fork of the process that attached it leaves the parent's attachment alone."""
        self._connection.close()


def attach(path: str, timeout_s: float = _GREETING_TIMEOUT_S) -> Attachment | None:
    """Ask for the descriptor; None where nobody lends one at this path, or does not answer in time."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
        packet, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    except OSError:
        connection.close()
        return None
    if len(packet) < _WORD.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        return None
    connection.settimeout(None)
    (number,) = _WORD.unpack(packet[: _WORD.size])
    os.set_inheritable(descriptors[0], False)
    return Attachment(connection, number, descriptors[0], packet[_WORD.size :])


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _after_fork() -> None:
    # A child's copy of the connection would keep a dead parent's attachment alive.
    for attachment in list(_attachments):
        attachment.close()


os.register_at_fork(after_in_child=_after_fork)
