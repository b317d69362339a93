# SPDX-License-Identifier: Apache-2.0
"""BackgroundWorker: a thread that processes items one by one, and lets at most one newer item wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BackgroundWorker(Generic[Item]):
    """At most one item is in work and one waits. The owner's next call raises what the work raised."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._busy = False
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: Item, replace: bool) -> Item | None:
        """Submit an item.

        Args:
            replace: Replace an item that waits. False: block until the work on that item has started.
        Returns:
            The replaced item.
        """
        with self._changed:
            self._changed.wait_for(lambda: replace or self._waiting is None or self._error is not None)
            self._raise()
            replaced, self._waiting = self._waiting, item
            self._changed.notify_all()
            return replaced

    def check(self) -> None:
        """Raise what the work raised, once."""
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Wait until all work is done, and raise what it raised. The work must have its own deadlines."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not (self._busy or self._waiting is not None))
            self._raise()

    def stop(self, timeout_s: float) -> None:
        """Start no more work, and wait up to ``timeout_s`` for the current item. Idempotent."""
        with self._changed:
            self._stopped, self._waiting = True, None
            self._changed.notify_all()
        self._thread.join(timeout_s)

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
        """The item to work on next. None: the worker was stopped, and none waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._stopped)
            item, self._waiting = self._waiting, None
            self._busy = item is not None
            self._changed.notify_all()
            return item
