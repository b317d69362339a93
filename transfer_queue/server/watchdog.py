# SPDX-License-Identifier: Apache-2.0
"""Names foreign code, such as a user's sampler, that holds the server for too long: in the log, and in ``status``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
HELD_S = 2.0
_LOOK_EVERY_S = 0.5
_REMEMBERED = 16


class Alarms:
    """What was seen to run for too long. The time is passed in."""

    def __init__(self, held_s: float = HELD_S) -> None:
        self.held_s = held_s
        self._alarms: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._last: object = None
        self._since = 0.0
        self._current: dict[str, Any] | None = None

    def look(self, running: object, now: float) -> bool:
        """``running``: the call that runs now, or None. Returns whether that makes a new alarm."""
        if running is None or running != self._last:
            self._last, self._since, self._current = running, now, None
            return False
        if now - self._since < self.held_s:
            return False
        if is_new := self._current is None:
            self._count += 1
            self._current = {"number": self._count, "what": str(running)}
        self._current.update(held_s=now - self._since, at=now)
        if is_new:
            self._alarms.append(self._current)
        return is_new

    def latest(self, now: float) -> list[dict[str, Any]]:
        """What held the server, for how long, and how long ago that was noticed last; numbered from 1."""
        alarms = [dict(alarm) for alarm in list(self._alarms)]
        for alarm in alarms:
            alarm["seen_s_ago"] = now - alarm.pop("at")
        return alarms


class Watchdog:
    """A thread that looks from time to time at what foreign code runs; it costs the server nothing."""

    def __init__(
        self, running: Callable[[], object], held_s: float = HELD_S, look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        """``running``: the call of foreign code that runs now, None for none. It is called in the watchdog's thread."""
        self._running = running
        self._look_every_s = look_every_s
        self._alarms = Alarms(held_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tq-watchdog", daemon=True)
        self._thread.start()

    def alarms(self) -> list[dict[str, Any]]:
        """See ``Alarms.latest``."""
        return self._alarms.latest(time.monotonic())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._look_every_s):
            running = self._running()
            if self._alarms.look(running, time.monotonic()):
                _log.warning(
                    "%s has held the server for more than %.1f s: nobody else is served.", running, self._alarms.held_s
                )
