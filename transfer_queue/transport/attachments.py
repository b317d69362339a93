# SPDX-License-Identifier: Apache-2.0
"""A file descriptor handed to processes of this host over a Unix socket, which stays open: its end is the process' end.

The guest may say 64-bit words on it, which cost a system call and no answer. A packet is as many as there are to say.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import itertools
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from transfer_queue.transport.base import Outgoing
from transfer_queue.transport.descriptors import Descriptors

_WORD = struct.Struct("<Q")
_GREETING_TIMEOUT_S = 10.0
_BACKLOG = 512
_WORDS_PER_PACKET = 512
_WORDS_PER_TURN = 256
_LOOK_AGAIN_MS = 1000

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
        left = _WORDS_PER_TURN
        while left > 0:
            try:
                packet = connection.recv(_WORDS_PER_PACKET * _WORD.size + 1)  # of a longer one so much is no words
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet or len(packet) % _WORD.size:
                self._show_out(number)
                answers += self._host.detached(number, now)
                break
            left -= len(packet) // _WORD.size
            for (word,) in _WORD.iter_unpack(packet):
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
    """The guest's side. ``descriptor`` is its own copy of what was lent, closed with the attachment.

    An attachment that was not closed ends when it is dropped, or after the last thread of its process: until then a
    thread may use what was lent, and whatever the host frees may become somebody else's.
    """

    def __init__(self, connection: socket.socket, number: int, descriptor: int, greeting: bytes) -> None:
        """``connection``: a non-blocking one."""
        self.number = number
        self.descriptor = descriptor
        self.greeting = greeting
        self._ends = Descriptors(self, connection.detach(), descriptor)
        self._unsaid: deque[int] = deque()
        self._waiting = _thread.allocate_lock()  # taken by the thread that waits for room

    def say(self, word: int) -> None:
        """From any thread, also while garbage is collected: it never waits.

        Where the host has no room to hear it now, a thread says it as soon as there is some.
        """
        if self._unsaid or not self.say_at_once(word):
            self._unsaid.append(word)
            self.catch_up()

    def catch_up(self) -> None:
        """Say what was left unsaid where no thread could be had that waits for room."""
        if self._unsaid and not self._waiting.locked():
            self._speak()

    def _speak(self) -> None:
        while words := self._next_words():
            try:
                self._send(struct.pack(f"<{len(words)}Q", *words))
            except BlockingIOError:
                self._unsaid.extendleft(reversed(words))
                self._wait_elsewhere()
                break
            except OSError:  # the host has ended, and all that it lent with it
                break

    def _next_words(self) -> list[int]:
        words: list[int] = []
        while self._unsaid and len(words) < _WORDS_PER_PACKET:
            try:
                words.append(self._unsaid.popleft())
            except IndexError:  # another thread says it
                break
        return words

    def _send(self, packet: bytes) -> None:
        # Nothing between the two: another thread might close it there, and open something else of the same number.
        os.write(self._ends.at(0), packet)

    def _wait_elsewhere(self) -> None:
        if self._waiting.acquire(blocking=False):
            try:
                # Not threading's: that one waits for locks, and this may happen where garbage is collected.
                _thread.start_new_thread(self._wait_for_room, ())
            except RuntimeError:  # none can be had: ``catch_up`` will do
                self._waiting.release()

    def _wait_for_room(self) -> None:
        while self._unsaid and (connection := self._ends.at(0)) >= 0:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            poll.poll(_LOOK_AGAIN_MS)
            self._speak()
        self._waiting.release()
        self.catch_up()  # what was left to this thread just now

    def say_at_once(self, word: int) -> bool:
        """Before anything that was not said yet. Returns True once it lies with the host, which may have to read it."""
        try:
            self._send(_WORD.pack(word))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Idempotent. In a fork of the process that attached it leaves the parent's attachment alone."""
        self._ends.close()


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
    connection.setblocking(False)
    (number,) = _WORD.unpack(packet[: _WORD.size])
    os.set_inheritable(descriptors[0], False)
    return Attachment(connection, number, descriptors[0], packet[_WORD.size :])
