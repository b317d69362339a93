# SPDX-License-Identifier: Apache-2.0
"""The loop of a server's thread: it waits for descriptors and deadlines, and does one step after the other."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Protocol

from transfer_queue.transport.descriptors import LONGEST_WAIT_S, READ, Spin, longest_s
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)

Act = Callable[[int], None]
"""Called with what is ready: ``READ``, ``WRITE``, or neither if the other side hung up."""


class Readiness:
    """Waits for descriptors. Level triggered: what is left undone is reported again."""

    def __init__(self, poller: Any = None) -> None:
        """``poller``: replaces the default, which is epoll if available."""
        self._poller: Any = poller or (select.epoll() if hasattr(select, "epoll") else select.poll())
        self._is_epoll = hasattr(self._poller, "fileno")
        self._acts: dict[int, Act] = {}
        self._spin = Spin(longest_s())

    def add(self, descriptor: int, act: Act, wanted: int = READ) -> None:
        self._poller.register(descriptor, wanted)
        self._acts[descriptor] = act

    def want(self, descriptor: int, wanted: int) -> None:
        """Change what to wait for."""
        self._poller.modify(descriptor, wanted)

    def remove(self, descriptor: int) -> None:
        """Call this before closing: a forked child's copy would still be reported."""
        del self._acts[descriptor]
        self._poller.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> Iterator[tuple[Act, int]]:
        """Yield the actions of ready descriptors; nothing after ``LONGEST_WAIT_S``. None: no deadline."""
        left_s = math.inf if timeout_s is None else timeout_s
        events = self._spin.wait(self._poller.poll, lambda: self._sleep(timeout_s), left_s)
        found = [(descriptor, self._acts.get(descriptor), ready) for descriptor, ready in events]
        for descriptor, act, ready in found:
            # A previous action may have closed this descriptor, and a new one may have its number.
            if act is not None and self._acts.get(descriptor) is act:
                yield act, ready

    def _sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if timeout_s is not None:
            timeout_s = min(timeout_s, LONGEST_WAIT_S)
            timeout_s = timeout_s if self._is_epoll else math.ceil(timeout_s * 1000)
        events: list[tuple[int, int]] = self._poller.poll(timeout_s)
        return events

    def close(self) -> None:
        """Remove all descriptors, without closing them."""
        self._acts.clear()
        if self._is_epoll:
            self._poller.close()


def guarded(step: Callable[..., object], *args: Any) -> None:
    """Run this step and log any error, which must end neither the loop nor service to other clients."""
    try:
        step(*args)
    # The guard of all servers. Samplers and parsers are user code, which may even call sys.exit().
    except (Exception, SystemExit):
        _log.exception("a server could not finish something, and goes on")


class Served(Protocol):
    """What a loop serves."""

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, in monotonic seconds."""
        ...

    def expire(self, now: float) -> None:
        """Do what is due."""
        ...

    def release(self) -> None:
        """The loop closes."""
        ...


class ServingLoop:
    """Runs several servers in one thread, one step at a time."""

    def __init__(self) -> None:
        self.readiness = Readiness()
        self.turned: Callable[[float], None] = _nothing
        """Called after each turn with the seconds that it took."""
        self._servers: list[Served] = []
        self._stopping = False
        self._closed = False
        self._lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        self.readiness.add(self._wake_read, _nothing)

    def add(self, server: Served) -> None:
        """Add a server; before ``run``."""
        self._servers.append(server)

    def stop(self) -> None:
        """Make ``run`` return; from any thread, or a signal handler."""
        self._stopping = True
        with self._lock:  # otherwise the serving thread might close the pipe in between
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
        due = [(at, server) for server in self._servers if (at := server.next_deadline()) is not None]
        earliest = min(due, key=itemgetter(0))[0] if due else None
        began = None
        for act, ready in self.readiness.wait(None if earliest is None else max(0.0, earliest - time.monotonic())):
            began = began or time.monotonic()
            guarded(act, ready)
        if earliest is not None and earliest <= (now := time.monotonic()):
            for at, server in due:
                if at <= now:
                    guarded(server.expire, now)
            began = began or now
        if began is not None:
            self.turned(time.monotonic() - began)

    def close(self) -> None:
        """Close everything, in the serving thread or if it never served. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for server in self._servers:
            server.release()
        self.readiness.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _nothing(_: float) -> None:
    """Waking up is enough."""
