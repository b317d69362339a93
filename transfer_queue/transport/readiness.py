# SPDX-License-Identifier: Apache-2.0
"""Which file descriptors of a server have something to do: epoll, whose cost does not grow with their number."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue.transport.spinning import Spin, longest_s

READ, WRITE = select.POLLIN, select.POLLOUT  # epoll's numbers are the same

LONGEST_WAIT_S = 3600.0
"""A deadline may be infinitely far; the system counts milliseconds, and not that many. Whoever waits looks again."""

Act = Callable[[int], None]
"""Told what is ready: ``READ``, ``WRITE``, or neither where the other side hung up."""


class Readiness:
    """Level triggered: what is left undone is told again."""

    def __init__(self, poller: Any = None) -> None:
        """``poller``: what to use where the best there is shall not be."""
        self._poller: Any = poller or (select.epoll() if hasattr(select, "epoll") else select.poll())
        self._is_epoll = hasattr(self._poller, "fileno")
        self._acts: dict[int, Act] = {}
        self._spin = Spin(longest_s())

    def add(self, descriptor: int, act: Act, wanted: int = READ) -> None:
        self._poller.register(descriptor, wanted)
        self._acts[descriptor] = act

    def want(self, descriptor: int, wanted: int) -> None:
        """Wait for something else from now on."""
        self._poller.modify(descriptor, wanted)

    def remove(self, descriptor: int) -> None:
        """Before it is closed: a copy of it in a forked child would go on reporting."""
        del self._acts[descriptor]
        self._poller.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> Iterator[tuple[Act, int]]:
        """What to do for those that are ready, nothing after ``LONGEST_WAIT_S``; None waits without end."""
        left_s = math.inf if timeout_s is None else timeout_s
        events = self._spin.wait(self._poller.poll, lambda: self._sleep(timeout_s), left_s)
        found = [(descriptor, self._acts.get(descriptor), ready) for descriptor, ready in events]
        for descriptor, act, ready in found:
            # What was done for the one before it may have ended this one, and a newcomer may have its number.
            if act is not None and self._acts.get(descriptor) is act:
                yield act, ready

    def _sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if timeout_s is not None:
            timeout_s = min(timeout_s, LONGEST_WAIT_S)
            timeout_s = timeout_s if self._is_epoll else math.ceil(timeout_s * 1000)
        events: list[tuple[int, int]] = self._poller.poll(timeout_s)
        return events

    def close(self) -> None:
        """Forget all; closes none of them."""
        self._acts.clear()
        if self._is_epoll:
            self._poller.close()
