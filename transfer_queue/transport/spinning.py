# SPDX-License-Identifier: Apache-2.0
"""Looking again and again for a moment before sleeping: to be woken takes longer than most answers do.

A processor that has nothing to do halts; when it is woken its caches are cold, and Python then runs at half its speed.
Looking costs time that somebody else could use, so it is done only where it pays, and only with a core nobody wants.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from transfer_queue.config import environment_number

LONGEST_S = 1e-3
"""An exchange takes 0.1 to 0.3 ms; who works with what it brought asks again within one."""
_YIELD: Callable[[], None] | None = getattr(os, "sched_yield", None)
_PREEMPTED_S = 50e-6
"""Two looks are this far apart when another thread had the core in between."""
_PRICE = 8
"""A look in vain costs as much as this many others save."""
_LONGEST_REST = 6
"""As a power of two: how many waits pass without a look when looks have always been in vain."""


class Spin:
    """Of one thread. Rests for twice as many waits after each look in vain, unless enough others were not."""

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float] = time.perf_counter,
        pass_on: Callable[[], None] | None = _YIELD,
    ) -> None:
        """``pass_on`` lets another thread have the core if one wants it; where there is none, nobody looks."""
        self._longest_s = longest_s
        self._clock = clock
        self._pass_on = pass_on
        self._doubt = 0
        self._rest = 0

    def look(self, poll: Callable[[int], list[Any]], left_s: float = math.inf) -> list[Any]:
        """What ``poll(0)`` gives within a moment. Nothing: sleep until there is something, or no time left."""
        if self._pass_on is None or not 0 < self._longest_s < left_s:
            return []
        if self._rest:
            self._rest -= 1
            return []
        looked = self._clock()
        end = looked + self._longest_s
        while not (found := poll(0)):
            self._pass_on()
            before, looked = looked, self._clock()
            if looked > end or looked - before > _PREEMPTED_S:
                self._doubt = min(self._doubt + _PRICE, _PRICE * _LONGEST_REST)
                self._rest = (1 << self._doubt // _PRICE) - 1
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
