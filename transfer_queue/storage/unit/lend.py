# SPDX-License-Identifier: Apache-2.0
"""Lends a unit's arena, in the server, to clients of its host: each connection to a socket gets the descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence

from transfer_queue.storage.changes import Changes
from transfer_queue.storage.messages import arena_path
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.spill import SpillFile
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.unix import remove_stale
from transfer_queue.utils.logging_utils import get_logger

_BACKLOG = 512
_log = get_logger(__name__)

Attend = Callable[[int, Callable[[], None]], Callable[[], object]]


class Lender:
    """The serving side, in the thread of the server that ``attend`` belongs to."""

    def __init__(self, path: str, attend: Attend, descriptors: Sequence[int]) -> None:
        """``descriptors`` must stay open until ``close``. Raises OSError if the path can't be bound."""
        self._path = path
        self._descriptors = descriptors
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            remove_stale(path)
            self._door.bind(path)
            self._door.listen(_BACKLOG)
            self._door.setblocking(False)
            self._spare = self._door.dup()
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
        self._spare.close()
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
            socket.send_fds(connection, [b"\0"], list(self._descriptors))

    def _refuse(self) -> None:
        """Accept and close one connection with the spare descriptor; otherwise the loop would report it forever.

        Without a spare, the only way out is to close for good.
        """
        had_spare = self._spare.fileno() >= 0
        self._spare.close()
        with contextlib.suppress(OSError):
            self._door.accept()[0].close()
            had_spare = True
            self._spare = self._door.dup()
        if not had_spare:
            self.close()


def lend_arena(server: SocketServer, file: SpillFile | None = None) -> Arena | None:
    """Make an arena that this server lends, with ``file``. None: it can't be shared, so values are frames."""
    path = arena_path(server.address)
    if path is None:
        return None
    ends = contextlib.ExitStack()
    try:
        arena = Arena()
        ends.callback(arena.close)
        arena.changes = Changes()
        ends.callback(arena.changes.close)
        lent: list[Arena | Changes] = [arena, *([] if file is None else [file]), arena.changes]
        lender = Lender(path, server.attend, [each.descriptor for each in lent])
    except OSError as error:  # such as a limit on addresses
        if not isinstance(error, FileNotFoundError):  # its directory has gone with the owner, and the server goes, too
            _log.warning("%s shares no memory (%s): values travel as frames, which is slower", server.address, error)
        ends.close()
        return None
    for end in (lender.close, *(each.close for each in lent)):
        server.at_close(end)
    return arena
