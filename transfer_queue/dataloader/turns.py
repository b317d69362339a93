# SPDX-License-Identifier: Apache-2.0
"""Who fetches a stream's batches, its thread or its reader: both are tried, and the faster one goes on."""

from __future__ import annotations

import math

MOMENT_S = 3e-3
"""A reader who is away for longer, and soon again, has something to do that a thread can fetch beside."""
_WINDOW = 16
"""Batches that one is judged by, without the extremes: a process that had to wait for a core decides nothing."""
_KEPT = (0, 0, 16)
"""Windows until the other one is tried (again): a single one may have been a bad one, so both have two soon."""
_LAST_TRY = len(_KEPT) - 1
_SHORT_S = 1.5e-3
"""Batches that come faster leave a thread little to save: it is tried as late as ever, when most streams are over."""
_FIRST = 1
"""Batches until a reader is known to come for the next one soon."""
_GLIMPSE, _WORSE = 6, 1.25
"""A try is over after so few batches if they took so much longer than the other one's, and the next one is far away."""
_BETTER = 0.95
"""The thread is preferred: what it does beside the reader may not have shown yet."""


class Turns:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._prefers_reader = True
        self._is_busy = True  # the reader: with other things, again and again
        self._stayed = _WINDOW - _FIRST  # batches since he was away
        self._times = {False: math.inf, True: math.inf}  # seconds from batch to batch, by ``is_readers``
        self._window: list[float] = []
        self._kept = self._tried = 0
        self._asked_at = -math.inf
        self._taken_at = math.inf
        self._looked = False  # at the first batch: that takes long, whoever he is

    @property
    def is_readers(self) -> bool:
        """What has been decided so far."""
        return self._prefers_reader and not self._is_busy

    def asked(self, now: float) -> None:
        """The reader asks for a batch."""
        before, self._asked_at = self._asked_at, now
        if not self._looked:
            self._looked = math.isfinite(self._taken_at)
            return
        if now - self._taken_at > MOMENT_S:
            self._window.clear()
            self._is_busy, self._stayed = self._stayed < _WINDOW, 0
            return
        self._stayed += 1
        if self._is_busy:  # too short a stay to judge anybody by
            self._is_busy = self._stayed < _WINDOW
            return
        self._window.append(now - before)
        if self._is_hopeless():
            self._tried = _LAST_TRY
            self._decide()
        elif len(self._window) == _WINDOW:
            self._decide()

    def taken(self, now: float) -> None:
        """He has it."""
        self._taken_at = now

    def _is_hopeless(self) -> bool:
        tried_now = not self._kept and len(self._window) == _GLIMPSE
        return tried_now and _usual(self._window) > _WORSE * self._times[not self.is_readers]

    def _decide(self) -> None:
        time = _usual(self._window)
        self._window.clear()
        self._times[self.is_readers] = time
        self._kept += 1
        if time > MOMENT_S:  # large batches, or few: what two threads cost each other doesn't matter
            self._prefers_reader = self._times[True] < _BETTER * time
        elif self._kept > _KEPT[self._tried if self._tried or time > _SHORT_S else _LAST_TRY]:
            self._prefers_reader, self._kept = not self._prefers_reader, 0
            self._tried = min(self._tried + 1, _LAST_TRY)
        else:
            self._prefers_reader = self._times[True] < _BETTER * self._times[False]


def _usual(seconds: list[float]) -> float:
    """Of the middle half: a thread may hand over two batches at once, all the time."""
    quarter = len(seconds) // 4
    middle = sorted(seconds)[quarter : len(seconds) - quarter]
    return sum(middle) / len(middle)
