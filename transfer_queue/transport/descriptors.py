# SPDX-License-Identifier: Apache-2.0
"""File descriptors, in client and server: how a thread waits for some, and what closes them.

A thread polls for a moment before it sleeps, because waking up takes longer than most answers do. An idle processor
halts. After it wakes, its caches are cold, and Python runs at half its speed. Polling takes time from other threads, so
it is done only if it pays, and only on a core that no other thread wants.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
import weakref
from collections.abc import Callable
from typing import Any

from transfer_queue.config import environment_number

READ, WRITE = select.POLLIN, select.POLLOUT  # epoll's numbers are the same

LONGEST_WAIT_S = 3600.0
"""The longest single wait, because a deadline may be infinite and the system's milliseconds are bounded."""

LONGEST_S = 1e-3
"""An exchange takes 0.1 to 0.3 ms, and a busy client asks again within one millisecond."""
_PREEMPTED_S = 50e-6
"""A gap between two polls of at least this length means that another thread had the core, or the clock ticked."""
_PRICE = 8
"""A failed spin costs as much as this many successful ones save."""
_LONGEST_REST = 6
"""As a power of two: how many waits pass without a spin if all spins have failed."""


def _times_preempted() -> int:
    """How often this thread has lost its core to another one."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Spin:
    """The spinning of one thread. Each failed spin doubles the rest that follows, unless enough others succeeded.

    A rest ends sooner if sleeps were so short that a spin would have succeeded. This does not apply if another thread
    wanted the core: then the sleeper is woken soon, but a spinning thread gets its turn last.
    """

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float] = time.perf_counter,
        pass_on: Callable[[], None] = os.sched_yield,
        times_preempted: Callable[[], int] = _times_preempted,
    ) -> None:
        """``pass_on`` yields the core to another thread."""
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
        if not 0 < self._longest_s < left_s:
            return sleep()
        self._rested += 1
        if self._rested >= 1 << self._doubt // _PRICE:
            return self._look(poll) or sleep()
        began = self._clock()
        found = sleep()
        if found and self._doubt and not self._is_crowded and self._clock() - began < self._longest_s:
            self._doubt -= 1
        return found

    def _look(self, poll: Callable[[int], list[Any]]) -> list[Any]:
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
    if len(os.sched_getaffinity(0)) < 2:
        return 0.0
    return environment_number("TQ_SPIN_US", LONGEST_S * 1e6) / 1e6


# ---- closing ----

closed_in_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""What a forked child closes. Its copy would keep a dead parent's connection open, or the contents of a file alive."""


def _after_fork() -> None:
    for copy in list(closed_in_children):
        copy.close()
    closed_in_children.clear()


os.register_at_fork(after_in_child=_after_fork)


class Descriptors:
    """Not closed when the process ends, because other threads may still use them; the kernel closes them after the last
    thread.
    """

    def __init__(self, owner: object, *descriptors: int) -> None:
        self._open = list(descriptors)
        weakref.finalize(owner, _close, self._open).atexit = False
        closed_in_children.add(self)

    def at(self, position: int) -> int:
        """One of the descriptors; -1 once they are closed."""
        try:
            return self._open[position]
        except IndexError:
            return -1

    def close(self) -> None:
        """Close all. Idempotent, in any thread."""
        _close(self._open)


def _close(descriptors: list[int]) -> None:
    with contextlib.suppress(IndexError):  # all are closed, maybe by another thread
        while True:
            os.close(descriptors.pop())
