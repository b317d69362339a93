# SPDX-License-Identifier: Apache-2.0
"""Looking again and again for a moment before sleeping: to be woken takes longer than most answers do.

A processor that has nothing to do halts; when it is woken its caches are cold, and Python then runs at half its speed.
Looking costs time that somebody else could use, so it is done only where it pays, and only with a core nobody wants.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

from transfer_queue.config import environment_number

LONGEST_S = 1e-3
"""An exchange takes 0.1 to 0.3 ms; who works with what it brought asks again within one."""
_YIELD: Callable[[], None] | None = getattr(os, "sched_yield", None)
_PREEMPTED_S = 50e-6
"""Two looks are so far apart, at least, when another thread had the core in between; or when the clock ticked."""
_PRICE = 8
"""A look in vain costs as much as this many others save."""
_LONGEST_REST = 6
"""As a power of two: how many waits pass without a look when looks have always been in vain."""
_THIS_THREAD: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def _times_preempted() -> int:
    """How often this thread has lost its core to another one."""
    return resource.getrusage(_THIS_THREAD).ru_nivcsw


class Spin:
    """Of one thread. Rests for twice as many waits after each look in vain, unless enough others were not.

    A rest ends sooner where what was slept for came so soon that a look would have found it. Not where another thread
    wanted the core: there, too, it comes soon for who sleeps, but who looks gets his turn last.
    """

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float] = time.perf_counter,
        pass_on: Callable[[], None] | None = _YIELD,
        times_preempted: Callable[[], int] = _times_preempted,
    ) -> None:
        """``pass_on`` lets another thread have the core if one wants it; where there is none, nobody looks."""
        self._longest_s = longest_s
        self._clock = clock
        self._pass_on = pass_on
        self._times_preempted = times_preempted
        self._doubt = 0
        self._rested = 0  # waits since the last look in vain
        self._is_crowded = False  # another thread wanted the core then

    def look(self, poll: Callable[[int], list[Any]]) -> list[Any]:
        """What ``poll(0)`` gives within a moment. Nothing: sleep until there is something."""
        return [] if not self._may_look(math.inf) or self._rests() else self._look(poll)

    def wait(self, poll: Callable[[int], list[Any]], sleep: Callable[[], list[Any]], left_s: float) -> list[Any]:
        """The same, or what ``sleep()`` gives, which returns after ``left_s`` at the latest."""
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
    """TQ_SPIN_US: how long to look before sleeping, in microseconds; 0: sleep at once.

    On a single core who looks is in the way of whom he waits for: 0, whatever the variable says.
    """
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < 2:
        return 0.0
    return environment_number("TQ_SPIN_US", LONGEST_S * 1e6) / 1e6
