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


class Watchdog:
    """A thread that looks from time to time at what foreign code runs; it costs the server nothing."""

    def __init__(self, running: Callable[[], str | None], held_s: float = HELD_S) -> None:
        """``running``: name of the foreign code that runs now, None for none. It is called in the watchdog's thread."""
        self._running = running
        self._held_s = held_s
        self._alarms: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tq-watchdog", daemon=True)
        self._thread.start()

    def alarms(self) -> list[dict[str, Any]]:
        """The latest ones: what held the server, for how long, and how long ago that was noticed last."""
        now = time.monotonic()
        return [
            {"what": alarm["what"], "held_s": alarm["held_s"], "seen_s_ago": now - alarm["at"]}
            for alarm in list(self._alarms)
        ]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last, since = None, 0.0
        alarm: dict[str, Any] | None = None
        while not self._stop.wait(_LOOK_EVERY_S):
            running, now = self._running(), time.monotonic()
            if running is None or running != last:
                last, since, alarm = running, now, None
                continue
            if now - since < self._held_s:
                continue
            if alarm is None:
                _log.warning("%s has held the server for more than %.1f s: nobody else is served.", last, self._held_s)
                alarm = {"what": last}
                self._alarms.append(alarm)
            alarm.update(held_s=now - since, at=now)
