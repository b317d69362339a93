# SPDX-License-Identifier: Apache-2.0
"""Alarm: one look at many things with a time each, when the first of these times has come."""

from __future__ import annotations

import math
from collections.abc import Callable

from transfer_queue.calls.room import Calls


class Alarm:
    """Its owner sets it for each time, and in ``look`` for the next one. It may look when nothing is due any more.

    So what is over leaves nothing behind: a timer of its own would stay until its time.
    """

    def __init__(self, calls: Calls, look: Callable[[], None]) -> None:
        self._calls = calls
        self._look = look
        self._at = math.inf

    def set(self, when: float) -> None:
        """Look at that time, or before."""
        if when < self._at:
            self._at = when
            self._calls.at(when, self._ring)

    def _ring(self) -> None:
        if self._at <= self._calls.now:  # else it was set to an earlier time, and has looked then
            self._at = math.inf
            self._look()
