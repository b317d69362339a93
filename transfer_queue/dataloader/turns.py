# SPDX-License-Identifier: Apache-2.0
"""Decides whether a stream's thread or its reader fetches batches: both are tried, and the faster one continues."""

from __future__ import annotations

import math

MOMENT_S = 3e-3
"""A reader that is away for longer, repeatedly, has other work during which a thread can fetch."""
_WINDOW = 16
"""Batches per measurement. The extremes are left out, so that one wait for a core decides nothing."""
_KEPT = (0, 0, 16)
"""Windows until the other side is tried again. Both sides soon get two, because a single window may be an outlier."""
_LAST_TRY = len(_KEPT) - 1
_SHORT_S = 1.5e-3
"""Faster batches leave a thread little to save, so it is tried last, when most streams have ended."""
_FIRST = 1
"""Batches until a reader counts as not busy."""
_GLIMPSE, _WORSE = 6, 1.25
"""A try ends after this many batches if they took this factor longer than the other side's, and the next try is late.
"""
_BETTER = 0.95
"""The reader must be this much faster, because the thread also helps with work that the reader has not shown yet."""


class Turns:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._prefers_reader = True
        self._is_busy = True  # whether the reader often has other work
        self._stayed = _WINDOW - _FIRST  # batches since the reader was last away
        self._times = {False: math.inf, True: math.inf}  # seconds from batch to batch, by ``is_readers``
        self._window: list[float] = []
        self._kept = self._tried = 0
        self._asked_at = -math.inf
        self._taken_at = math.inf
        self._looked = False  # False until after the first batch, which always takes long

    @property
    def is_readers(self) -> bool:
        """The current decision: True if the reader fetches."""
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
        if self._is_busy:  # the reader has not stayed long enough to measure
            self._is_busy = self._stayed < _WINDOW
            return
        self._window.append(now - before)
        if self._is_hopeless():
            self._tried = _LAST_TRY
            self._decide()
        elif len(self._window) == _WINDOW:
            self._decide()

    def taken(self, now: float) -> None:
        """The reader has received its batch."""
        self._taken_at = now

    def _is_hopeless(self) -> bool:
        tried_now = not self._kept and len(self._window) == _GLIMPSE
        return tried_now and _usual(self._window) > _WORSE * self._times[not self.is_readers]

    def _decide(self) -> None:
        time = _usual(self._window)
        self._window.clear()
        self._times[self.is_readers] = time
        self._kept += 1
        if time > MOMENT_S:  # for large or rare batches, the cost of two threads doesn't matter
            self._prefers_reader = self._times[True] < _BETTER * time
        elif self._kept > _KEPT[self._tried if self._tried or time > _SHORT_S else _LAST_TRY]:
            self._prefers_reader, self._kept = not self._prefers_reader, 0
            self._tried = min(self._tried + 1, _LAST_TRY)
        else:
            self._prefers_reader = self._times[True] < _BETTER * self._times[False]


def _usual(seconds: list[float]) -> float:
    """The mean of the middle half: a thread may regularly hand over two batches at once."""
    quarter = len(seconds) // 4
    middle = sorted(seconds)[quarter : len(seconds) - quarter]
    return sum(middle) / len(middle)
