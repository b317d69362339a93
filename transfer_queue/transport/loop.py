# SPDX-License-Identifier: Apache-2.0
"""How a server's thread waits for descriptors, and what guards each step that it does."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
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
        self._acts: dict[int, Act] = {}
        self._spin = Spin(longest_s())

    def add(self, descriptor: int, act: Act) -> None:
        """Act whenever there is something to read."""
        self._poller.register(descriptor, READ)
        self._acts[descriptor] = act

    def want(self, descriptor: int, wanted: int) -> None:
        """Change what to wait for."""
        self._poller.modify(descriptor, wanted)

    def remove(self, descriptor: int) -> None:
        """Call this before closing: a forked child's copy would still be reported."""
        del self._acts[descriptor]
        self._poller.unregister(descriptor)

    def wait(self, left_s: float) -> Iterator[tuple[Act, int]]:
        """Yield the actions of ready descriptors; nothing after ``left_s`` or ``LONGEST_WAIT_S``."""
        found, poll = [], self._poller.poll
        for descriptor, ready in self._spin.wait(poll, lambda: poll(min(left_s, LONGEST_WAIT_S)), left_s):
            found.append((descriptor, self._acts.get(descriptor), ready))
        for descriptor, act, ready in found:
            # A previous action may have closed this descriptor, and a new one may have its number.
            if act is not None and self._acts.get(descriptor) is act:
                yield act, ready

    def close(self) -> None:
        """Remove all descriptors, without closing them."""
        self._acts.clear()
        self._poller.close()


def guarded(step: Callable[..., object], *args: Any) -> None:
    """Run this step and log any error, which must end neither the loop nor service to other clients."""
    try:
        step(*args)
    # The guard of all servers. Samplers and parsers are user code, which may even call sys.exit().
    except (Exception, SystemExit):
        _log.exception("a server could not finish something, and goes on")
