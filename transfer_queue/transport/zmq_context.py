# SPDX-License-Identifier: Apache-2.0
"""The ZMQ context of this process: made with the first socket, ended with the last, never carried over a fork."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import zmq
from zmq.utils.garbage import gc as message_keeper

_MAX_SOCKETS = 8192
_KEEPER_STOP_S = 0.2


class _Sockets:
    """Every socket of ours; the context lives as long as one of them is open, so ending it never waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_parents: list[Any] = []

    def open(self, kind: int) -> Any:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
                self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            socket: Any = self._context.socket(kind)
            self._open.add(socket)
        socket.linger = 0
        socket.set_hwm(0)  # nothing is ever dropped, and a send never blocks
        return socket

    def close(self, socket: Any) -> None:
        with self._lock:
            if socket.closed or socket not in self._open:
                return
            self._open.discard(socket)
            socket.close(linger=0)
            if len(self._open) or self._context is None:
                return
            self._context.term()
            self._context = None
            _stop_keeper()

    def after_fork(self) -> None:
        # A socket of the parent used, closed or collected here would disturb both: keep all for ever, untouched.
        self._of_parents += [self._context, *self._open]
        self._lock, self._context, self._open = threading.Lock(), None, weakref.WeakSet()


def _stop_keeper() -> None:
    """End pyzmq's thread that holds the buffers of messages sent without a copy, unless others still need it."""
    deadline = time.monotonic() + _KEEPER_STOP_S
    pause = threading.Event()
    while message_keeper.refs and time.monotonic() < deadline:  # ours are on their way: the context has ended
        pause.wait(0.001)
    if not message_keeper.refs:
        message_keeper.stop()


_sockets = _Sockets()
os.register_at_fork(after_in_child=_sockets.after_fork)


def open_socket(kind: int) -> Any:
    """A new socket of this process."""
    return _sockets.open(kind)


def close_socket(socket: Any) -> None:
    """Close what ``open_socket`` returned, dropping what is not sent yet. Idempotent; ignores a parent's socket."""
    _sockets.close(socket)
