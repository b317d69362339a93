# SPDX-License-Identifier: Apache-2.0
"""Lends a file descriptor to processes of this host: each connection to a Unix socket gets it, and a short greeting."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterable

from transfer_queue.transport.base import Outgoing, Ready

_BORROW_TIMEOUT_S = 10.0
_BACKLOG = 512
_MAX_GREETING_NBYTES = 4096

Attend = Callable[[int, Ready], Callable[[], object]]


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

    def _lend(self, now: float) -> Iterable[Outgoing]:
        try:
            connection, _ = self._door.accept()
        except OSError as error:  # the client has left, or no descriptor is free
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refuse()
            return ()
        with connection, contextlib.suppress(OSError):  # the client has left
            connection.setblocking(False)
            socket.send_fds(connection, [self._greeting], [self._descriptor])
        return ()

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


def borrow(path: str, timeout_s: float = _BORROW_TIMEOUT_S) -> tuple[int, bytes] | None:
    """Return a copy of the descriptor, which the caller must close, and the greeting.

    None: no process lends one at this path, or it does not answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.settimeout(timeout_s)
        connection.connect(path)
        greeting, descriptors, _, _ = socket.recv_fds(connection, _MAX_GREETING_NBYTES, 1)
        if descriptors:
            os.set_inheritable(descriptors[0], False)
            return descriptors[0], greeting
    return None
