# SPDX-License-Identifier: Apache-2.0
"""WorkerTurn: one iteration of a loader's workers, from the loader's side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue.dataloader.cursor import Cursor

_LOOK_EVERY_S = 0.25


class WorkerTurn:
    """Iterates over the bundles that torch's iterator receives from the workers, until the turn ends."""

    def __init__(
        self, bundles: Any, cursor: Cursor, iteration: int, keep: bool, should_stop: Callable[[], bool] | None
    ) -> None:
        """``keep``: the workers also serve the next iteration. ``should_stop`` can only be called in this process."""
        self._bundles = bundles
        self._cursor = cursor
        self._iteration = iteration
        self._keep = keep
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if should_stop is not None:
            self._watcher = threading.Thread(
                target=self._watch, args=(should_stop,), name="transfer-queue-should-stop", daemon=True
            )
            self._watcher.start()

    def __iter__(self) -> Iterator[Any]:
        # Kept workers serve one iterator at a time: an older one must not take the newer one's items.
        while not self._cursor.is_over(self._iteration):
            try:
                yield next(self._bundles)
            except StopIteration:
                return

    def _watch(self, should_stop: Callable[[], bool]) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            if should_stop():
                self._cursor.give_up(self._iteration)
                return

    def end(self, failed: bool = False) -> None:
        """End the workers' waits, and the workers too unless they are kept and nothing failed. Idempotent."""
        self._ended.set()
        self._cursor.give_up(self._iteration)
        if self._watcher is not None:
            self._watcher.join()
        if failed or not self._keep:
            # The garbage collector is not enough: after an error, the traceback keeps torch's iterator alive.
            self._bundles._shutdown_workers()
