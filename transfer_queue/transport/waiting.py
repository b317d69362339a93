# SPDX-License-Identifier: Apache-2.0
"""How a thread waits for descriptors: a caller's for answers, a server's for requests.

Both poll for a moment before they sleep, because waking up takes longer than most answers do.
An idle processor halts. After it wakes, its caches are cold, and Python runs at half its speed.
Polling takes time from other threads, so it is done only if it pays, and only on a core that no other thread wants.
"""

from __future__ import annotations

import math
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from transfer_queue.config import environment_number
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.connections import closed
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from transfer_queue.transport.connections import Connection
    from transfer_queue.transport.framing import Message

_log = get_logger(__name__)

READ, WRITE = select.POLLIN, select.POLLOUT  # epoll's numbers are the same

LONGEST_WAIT_S = 3600.0
"""The longest single wait, because a deadline may be infinite and the system's milliseconds are bounded."""

LONGEST_S = 1e-3
"""An exchange takes 0.1 to 0.3 ms, and a busy client asks again within one millisecond."""
_YIELD: Callable[[], None] | None = getattr(os, "sched_yield", None)
_PREEMPTED_S = 50e-6
"""A gap between two polls of at least this length means that another thread had the core, or the clock ticked."""
_PRICE = 8
"""A failed spin costs as much as this many successful ones save."""
_LONGEST_REST = 6
"""As a power of two: how many waits pass without a spin if all spins have failed."""
_THIS_THREAD: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def _times_preempted() -> int:
    """How often this thread has lost its core to another one."""
    return resource.getrusage(_THIS_THREAD).ru_nivcsw


class Spin:
    """The spinning of one thread. Each failed spin doubles the rest that follows, unless enough others succeeded.

    A rest ends sooner if sleeps were so short that a spin would have succeeded. This does not apply if another thread
    wanted the core: then the sleeper is woken soon, but a spinning thread gets its turn last.
    """

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float] = time.perf_counter,
        pass_on: Callable[[], None] | None = _YIELD,
        times_preempted: Callable[[], int] = _times_preempted,
    ) -> None:
        """``pass_on`` yields the core to another thread; without it, nothing spins."""
        self._longest_s = longest_s
        self._clock = clock
        self._pass_on = pass_on
        self._times_preempted = times_preempted
        self._doubt = 0
        self._rested = 0  # waits since the last failed spin
        self._is_crowded = False  # another thread wanted the core then

    def wait(self, poll: Callable[[int], list[Any]], sleep: Callable[[], list[Any]], left_s: float) -> list[Any]:
        """Spin until ``poll(0)`` returns something; without success return the result of ``sleep()``.

        Args:
            left_s: ``sleep`` returns after this long at the latest.
        """
        if not self._may_look(left_s):
            return sleep()
        if not self._rests():
            return self._look(poll) or sleep()
        began = self._clock()
        found = sleep()
        if found and self._doubt and not self._is_crowded and self._clock() - began < self._longest_s:
            self._doubt -= 1
        return found

    def _may_look(self, left_s: float) -> bool:
        return self._pass_on is not None and 0 < self._longest_s < left_s

    def _rests(self) -> bool:
        self._rested += 1
        return self._rested < 1 << self._doubt // _PRICE

    def _look(self, poll: Callable[[int], list[Any]]) -> list[Any]:
        assert self._pass_on is not None
        preempted = self._times_preempted()
        looked = self._clock()
        end = looked + self._longest_s
        while not (found := poll(0)):
            self._pass_on()
            before, looked = looked, self._clock()
            crowded = looked - before > _PREEMPTED_S and self._times_preempted() > preempted
            if crowded or looked > end:
                self._doubt = min(self._doubt + _PRICE, _PRICE * _LONGEST_REST)
                self._rested, self._is_crowded = 0, crowded
                return []
        if self._doubt:
            self._doubt -= 1
        return found


def longest_s() -> float:
    """TQ_SPIN_US: how long to poll before sleeping, in microseconds; 0: sleep at once.

    On a single core it is always 0, because a spinning thread would delay the process that it waits for.
    """
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < 2:
        return 0.0
    return environment_number("TQ_SPIN_US", LONGEST_S * 1e6) / 1e6


# ---- a caller's thread ----


class _Here(threading.local):
    """This thread's spinning state."""

    def __init__(self) -> None:
        self.spin = Spin(longest_s())


_here = _Here()


def wait_for_some(connections: Collection[Connection], wake: int, deadline: float) -> list[Message]:
    """Messages that arrived; none if there may be some now, or the deadline has passed.

    Raises:
        ClosedError: ``wake`` is readable.
        QueueUnreachableError: a peer has ended.
    """
    events = _poll(connections, wake, deadline)
    arrived: list[Message] = []
    try:
        for connection in connections:
            happened = events.get(connection.descriptor, 0)
            if happened & WRITE:
                connection.flush()
            if happened & ~WRITE:
                arrived += connection.receive()
    except QueueUnreachableError:
        _check_closed(events, wake)  # closing the client may end the queue at the same time
        raise
    if not arrived:
        _check_closed(events, wake)
    return arrived


def _poll(connections: Collection[Connection], wake: int, deadline: float) -> dict[int, int]:
    left = max(0.0, min(deadline - time.monotonic(), LONGEST_WAIT_S))
    poll = select.poll()
    poll.register(wake, READ)
    for connection in connections:
        poll.register(connection.descriptor, READ | WRITE if connection.unsent else READ)

    def sleep() -> list[tuple[int, int]]:
        return poll.poll(math.ceil(left * 1000))

    return dict(_here.spin.wait(poll.poll, sleep, left))


def _check_closed(events: dict[int, int], wake: int) -> None:
    if wake in events:
        raise closed()


# ---- a server's thread ----


def guarded(step: Callable[..., object], *args: Any) -> None:
    """Run this step and log any error, which must end neither the loop nor service to other clients."""
    try:
        step(*args)
    # The guard of all servers. Samplers and parsers are user code, which may even call sys.exit().
    except (Exception, SystemExit):
        _log.exception("a server could not finish something, and goes on")


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
