# SPDX-License-Identifier: Apache-2.0
"""The ZMQ context of this process: made at first use, ended with its last user, never carried over a fork."""

from __future__ import annotations

import os
import threading

import zmq
from zmq.utils.garbage import gc as message_keeper

_MAX_SOCKETS = 8192


class _Shared:
    """One context per process and a count of those who use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0
        self._pid = os.getpid()
        self._of_parents: list[object] = []

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
                self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            self._users += 1
            return self._context

    def release(self) -> None:
        """The caller has closed its sockets."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._users -= 1
            if self._users or self._context is None:
                return
            self._context.term()
            self._context = None
            message_keeper.stop()  # pyzmq's thread that holds the buffers of messages sent without a copy

    def _after_fork(self) -> None:
        # A socket of the parent used or closed here would hang both processes: keep it, untouched, for ever.
        self._of_parents.append(self._context)
        self._lock, self._context, self._users, self._pid = threading.Lock(), None, 0, os.getpid()


_shared = _Shared()
acquire_context = _shared.acquire
release_context = _shared.release
