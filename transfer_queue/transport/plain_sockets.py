# SPDX-License-Identifier: Apache-2.0
"""The Unix stream sockets of this process: where they lie beside a ZMQ socket; no forked child keeps a copy."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable

_SUFFIX = ".line"
_BUFFER_NBYTES = 1 << 20  # the kernel gives less where its limit is lower

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def line_path(address: str) -> str | None:
    """The plain socket's file of a server bound to this address; None where it can have none."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith("@"):  # not on this host, or where no directory keeps strangers out
        return None
    return path + _SUFFIX


def listening(path: str, backlog: int) -> socket.socket:
    """A non-blocking listener. Raises OSError: no such directory, or a path too long for a socket."""
    return _prepared(lambda new: _bind(new, path, backlog))


def connected(path: str) -> socket.socket:
    """A non-blocking connection. Raises OSError: nobody listens there."""
    return _prepared(lambda new: new.connect(path))


def accepted(listener: socket.socket) -> socket.socket:
    """The next one who connected. Raises BlockingIOError: nobody has."""
    connection, _ = listener.accept()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
    _open.add(connection)
    return connection


def _prepared(start: Callable[[socket.socket], None]) -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        new.setblocking(False)
        new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        start(new)
    except OSError:
        new.close()
        raise
    _open.add(new)
    return new


def _bind(new: socket.socket, path: str, backlog: int) -> None:
    if os.path.lexists(path):
        os.unlink(path)
    new.bind(path)
    new.listen(backlog)


def _after_fork() -> None:
    # Else the other side would not notice the parent's end while this child lives.
    for copy in list(_open):
        copy.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
