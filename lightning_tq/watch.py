# SPDX-License-Identifier: Apache-2.0
"""Watch: a thread beside a run that sees what a loader waiting for data can't, and ends the wait."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from lightning_tq.peers import RankGoneError

_LOOK_EVERY_S = 0.2
_STUCK_AFTER_S = 60.0


class Watch:
    """Calls ``looks`` five times a second; the first exception that one returns stops the streams.

    The exception is raised where the main thread next asks, not here. ``hints`` only log.
    """

    def __init__(
        self,
        looks: Sequence[Callable[[], BaseException | None]],
        hints: Sequence[Callable[[], None]] = (),
        stuck_after_s: float = _STUCK_AFTER_S,
    ) -> None:
        self.stopped = threading.Event()
        """Streams end once this is set."""
        self._looks = looks
        self._hints = hints
        self._stuck_after_s = stuck_after_s
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lightning-tq-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            for look in self._looks:
                error = look()
                if error is not None:
                    self._error = error
                    self.stopped.set()
                    self._insist(error)
                    return
            for hint in self._hints:
                hint()

    def _insist(self, error: BaseException) -> None:
        """A main thread in a collective with a rank that is gone may never ask; then only the process can end."""
        if isinstance(error, RankGoneError) and not self._end.wait(self._stuck_after_s):
            sys.stderr.write(
                f"error: {error} This process took no notice within {self._stuck_after_s:g} s, so it is ended.\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def check(self) -> None:
        """Raise what has ended the run, once noticed."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread and every stream. Idempotent."""
        self.stopped.set()
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
