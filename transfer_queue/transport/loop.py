# SPDX-License-Identifier: Apache-2.0
"""How a server's thread waits for descriptors, and what guards each step that it does."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from transfer_queue.transport.descriptors import LONGEST_WAIT_S, READ, Spin, longest_s
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)

Act = Callable[[int], None]
"""Called with what is ready: ``READ``, ``WRITE``, or neither if the other side hung up."""


class Readiness:
    """Waits for descriptors. Level triggered: what is left undone is reported again."""

    def __init__(self) -> None:
        self._poller = select.epoll()
        self.acts: dict[int, Act] = {}
        self._spin = Spin(longest_s())

    def add(self, descriptor: int, act: Act) -> None:
        """Act whenever there is something to read."""
        self._poller.register(descriptor, READ)
        self.acts[descriptor] = act

    def want(self, descriptor: int, wanted: int) -> None:
        """Change what to wait for."""
        self._poller.modify(descriptor, wanted)

    def remove(self, descriptor: int) -> None:
        """Call this before closing: a forked child's copy would still be reported."""
        del self.acts[descriptor]
        self._poller.unregister(descriptor)

    def wait(self, left_s: float) -> list[tuple[int, Act, int]]:
        """Those that are ready, each with its action and what is ready; none after ``left_s`` or ``LONGEST_WAIT_S``."""
        found, poll = [], self._poller.poll
        for descriptor, ready in self._spin.wait(poll, lambda: poll(min(left_s, LONGEST_WAIT_S)), left_s):
            act = self.acts.get(descriptor)
            if act is not None:
                found.append((descriptor, act, ready))
        return found

    def close(self) -> None:
        """Remove all descriptors, without closing them."""
        self.acts.clear()
        self._poller.close()


def guarded(step: Callable[..., object], *args: Any) -> None:
    """Run this step and log any error, which must end neither the loop nor service to other clients."""
    try:
        step(*args)
    # The guard of all servers. Samplers and parsers are user code, which may even call sys.exit().
    except (Exception, SystemExit):
        _log.exception("a server could not finish something, and goes on")
