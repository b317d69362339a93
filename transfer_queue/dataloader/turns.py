# SPDX-License-Identifier: Apache-2.0
"""Who fetches a stream's batches, its thread or its reader: both are tried, and the faster one goes on."""

from __future__ import annotations

import math

MOMENT_S = 3e-3
"""A reader who is away for longer has something to do that a thread can fetch beside."""
_WINDOW = 16
"""Batches that one is judged by: by the median, so that a process that had to wait for a core decides nothing."""
_KEPT = 16
"""Windows until the other one is tried again."""
_BETTER = 0.95
"""The thread is preferred: what it does beside the reader may not have shown yet."""


class Turns:
    """``is_readers`` is what has been decided so far. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.is_readers = False
        self._medians = {False: math.inf, True: math.inf}  # seconds from batch to batch, by ``is_readers``
        self._window: list[float] = []
        self._kept = _KEPT
        self._asked_at: float | None = None
        self._taken_at = 0.0

    def asked(self, now: float) -> None:
        """The reader asks for a batch."""
        before, self._asked_at = self._asked_at, now
        if before is None:
            return
        if now - self._taken_at > MOMENT_S:
            self._window.clear()
            self.is_readers, self._kept = False, _KEPT
            return
        self._window.append(now - before)
        if len(self._window) == _WINDOW:
            self._decide()

    def taken(self, now: float) -> None:
        """He has it."""
        self._taken_at = now

    def _decide(self) -> None:
        median = sorted(self._window)[_WINDOW // 2]
        self._window.clear()
        self._medians[self.is_readers] = median
        self._kept += 1
        if median > MOMENT_S:  # large batches, or few: what two threads cost each other doesn't matter
            self.is_readers = False
        elif self._kept > _KEPT:
            self.is_readers, self._kept = not self.is_readers, 0
        else:
            self.is_readers = self._medians[True] < _BETTER * self._medians[False]
