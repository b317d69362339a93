# SPDX-License-Identifier: Apache-2.0
"""Lends a unit's arena, in the server, to clients of the same host: each connection to a socket gets its descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from transfer_queue.storage.messages import FILE_SUFFIX, arena_path
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.spill import SpillFile
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_BACKLOG = 512
_log = get_logger(__name__)

Attend = Callable[[int, Callable[[], None]], Callable[[], object]]


class Lender:
    """The serving side, in the thread of the server that ``attend`` belongs to."""

    def __init__(self, path: str, attend: Attend, descriptor: int, greeting: bytes) -> None:
        """``descriptor`` must stay open until ``close``. Raises OSError if the path can't be bound."""
        self._path = path
        self._descriptor = descriptor
        self._greeting = greeting
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._door.bind(path)
            self._door.listen(_BACKLOG)
            self._door.setblocking(False)
            self._spare = os.dup(descriptor)
            self._stop = attend(self._door.fileno(), self._lend)
        except OSError:
            self._door.close()
            raise

    def close(self) -> None:
        """Stop lending. Borrowed copies stay valid. Idempotent."""
        if self._door.fileno() < 0:
            return
        self._stop()
        self._door.close()
        self._drop_spare()
        with contextlib.suppress(OSError):  # its directory has been removed
            os.unlink(self._path)

    def _lend(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError as error:  # the client has left, or no descriptor is free
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refuse()
            return
        with connection, contextlib.suppress(OSError):  # the client has left
            connection.setblocking(False)
            socket.send_fds(connection, [self._greeting], [self._descriptor])

    def _refuse(self) -> None:
        """Accept and close one connection with the spare descriptor; otherwise the loop would report it forever.

        Without a spare, the only way out is to close for good.
        """
        had_spare = self._spare >= 0
        self._drop_spare()
        with contextlib.suppress(OSError):
            self._door.accept()[0].close()
            had_spare = True
            self._spare = os.dup(self._descriptor)
        if not had_spare:
            self.close()

    def _drop_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def lend_arena(server: SocketServer, file: SpillFile | None = None) -> Arena | None:
    """Make an arena that this server lends, and lend ``file``. None: it can't be shared, so values are frames."""
    path = arena_path(server.address)
    if path is None:
        return None
    try:
        arena = _lent(server, path, Arena())
        if file is not None:
            _lent(server, path + FILE_SUFFIX, file)
    except OSError as error:  # such as a limit on addresses
        _log.warning("%s shares no memory (%s): values travel as frames, which is slower", server.address, error)
        return None
    return arena


def _lent(server: SocketServer, path: str, arena: Arena) -> Arena:
    try:
        lender = Lender(path, server.attend, arena.descriptor, arena.nbytes.to_bytes(8, "little"))
    except OSError:
        arena.close()
        raise
    server.at_close(lender.close)
    server.at_close(arena.close)
    return arena
