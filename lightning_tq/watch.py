# SPDX-License-Identifier: Apache-2.0
"""Watch: a thread beside a run that sees what a loader waiting for data can't, and ends the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_LOOK_EVERY_S = 0.2


class Watch:
    """Calls ``looks`` five times a second; the first exception that one returns stops the streams.

    The exception is raised where the main thread next asks, not here. ``hints`` only log.
    """

    def __init__(
        self, looks: Sequence[Callable[[], BaseException | None]], hints: Sequence[Callable[[], None]] = ()
    ) -> None:
        self.stopped = threading.Event()
        """Streams end once this is set."""
        self._looks = looks
        self._hints = hints
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
                    return
            for hint in self._hints:
                hint()

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
