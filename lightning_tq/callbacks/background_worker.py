# SPDX-License-Identifier: Apache-2.0
"""BackgroundWorker: a thread that processes items one by one, and lets at most one newer item wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
_WAKE_EVERY_S = 1.0


class BackgroundWorker(Generic[Item]):
    """At most one item is in work and one waits. The owner's next call raises what the work raised."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._name = name
        self._work = work
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._busy = False
        self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, item: Item, replace: bool) -> Item | None:
        """Submit an item.

        Args:
            replace: Replace an item that waits. False: block until the work on that item has started.
        Returns:
            The replaced item.
        """
        with self._changed:
            while not replace and self._waiting is not None and self._error is None:
                self._wait()
            self._raise()
            replaced, self._waiting = self._waiting, item
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return replaced

    def check(self) -> None:
        """Raise what the work raised, once."""
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Wait until all work is done, and raise what it raised. The work must have its own deadlines."""
        with self._changed:
            while (self._busy or self._waiting is not None) and self._error is None:
                self._wait()
            self._raise()

    def stop(self, timeout_s: float) -> None:
        """Start no more work, and wait up to ``timeout_s`` for the current item. Idempotent."""
        with self._changed:
            self._stopped, self._waiting = True, None
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)

    def _wait(self) -> None:
        self._changed.wait(_WAKE_EVERY_S)  # in short waits, so that Ctrl-C is handled

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (item := self._next()) is not None:
            error: BaseException | None = None
            try:
                self._work(item)
            except BaseException as raised:  # raised again in the owner's thread
                error = raised
            del item  # release its memory before the wait for the next one
            with self._changed:
                self._busy = False
                if error is not None and not self._stopped:
                    self._error, self._waiting = error, None
                self._changed.notify_all()

    def _next(self) -> Item | None:
        with self._changed:
            while self._waiting is None and not self._stopped:
                self._wait()
            if self._stopped:
                return None
            item, self._waiting, self._busy = self._waiting, None, True
            self._changed.notify_all()
            return item
