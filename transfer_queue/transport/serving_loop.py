# SPDX-License-Identifier: Apache-2.0
"""One thread's loop in front of one or more servers: what they wait for, their deadlines, how they end together."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Protocol

from transfer_queue.transport.readiness import Readiness


class Server(Protocol):
    """What the loop serves."""

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called, in monotonic seconds."""
        ...

    def expire(self, now: float) -> None:
        """Answer those whose time has come."""
        ...

    def unread(self) -> bool:
        """Is there a request that no descriptor tells of?"""
        ...

    def take(self) -> None:
        """Answer such requests, a bounded number of them."""
        ...

    def release(self) -> None:
        """Close everything; the loop's descriptors can still be taken out."""
        ...


class ServingLoop:
    """Servers of one loop may call each other's handlers: nothing of them runs at the same time."""

    def __init__(self) -> None:
        self.readiness = Readiness()
        self._servers: list[Server] = []
        self._stopping = False
        self._closed = False
        self._lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        self.readiness.add(self._wake_read, _nothing)

    def add(self, server: Server) -> None:
        """Serve this one, too; before ``run``."""
        self._servers.append(server)

    def stop(self) -> None:
        """Make ``run`` return; from any thread, or a signal handler."""
        self._stopping = True
        with self._lock:  # else the serving thread might close between the look and the word
            if not self._closed:
                os.write(self._wake_write, b"x")

    def run(self) -> None:
        """Serve until ``stop``, then close everything."""
        try:
            while not self._stopping:
                self._turn()
        finally:
            self.close()

    def _turn(self) -> None:
        due, earliest, unread = [], math.inf, False
        for server in self._servers:
            at = server.next_deadline()
            if at is not None:
                due.append((at, server))
                earliest = min(earliest, at)
            unread = unread or server.unread()
        timeout_s = None if not due else max(0.0, earliest - time.monotonic())
        for act, ready in self.readiness.wait(0.0 if unread else timeout_s):
            act(ready)
        for server in self._servers:
            if server.unread():
                server.take()
        if due and earliest <= (now := time.monotonic()):
            for at, server in due:
                if at <= now:
                    server.expire(now)

    def close(self) -> None:
        """Close everything, in the thread that served or instead of serving. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for server in self._servers:
            server.release()
        self.readiness.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _nothing(_: int) -> None:
    """To be woken is enough."""
