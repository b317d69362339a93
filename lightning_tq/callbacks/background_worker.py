# SPDX-License-Identifier: Apache-2.0
"""BackgroundWorker: a thread that processes items one by one, and lets at most one newer item wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")
_IDLE_S = 5.0


class BackgroundWorker(Generic[Item]):
    """At most one item is in work and one waits. The owner's next call raises what the work raised.

    ``idle`` runs in the same thread every ``_IDLE_S`` seconds while there is no item.
    """

    def __init__(self, name: str, work: Callable[[Item], None], idle: Callable[[], None] = lambda: None) -> None:
        self._work, self._idle = work, idle
        self._waiting: queue.Queue[Item | None] = queue.Queue(1)
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
        self.check()
        replaced = self._take_back() if replace else None
        self._waiting.put(item)
        if self._error is not None:  # of the work on the item before, while this one waited for its place
            self._take_back()
            self.check()
        return replaced

    def check(self) -> None:
        """Raise what the work raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Wait until all work is done, and raise what it raised. The work must have its own deadlines."""
        self._waiting.join()
        self.check()

    def stop(self, timeout_s: float) -> None:
        """Start no more work, and wait up to ``timeout_s`` for the current item. Idempotent."""
        self._stopped = True
        self._take_back()
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _take_back(self) -> Item | None:
        """The item that waits, which is not worked on any more."""
        try:
            item = self._waiting.get_nowait()
        except queue.Empty:
            return None
        self._waiting.task_done()
        return item

    def _run(self) -> None:
        while True:
            try:
                item = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                self._guarded(self._idle)
                continue
            if item is None:
                return
            self._guarded(partial(self._work, item))
            del item  # release its memory before the wait for the next one
            self._waiting.task_done()

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # raised again in the owner's thread
            if not self._stopped:
                self._error = error
                self._take_back()
