# SPDX-License-Identifier: Apache-2.0
"""WorkerTurn: one iteration of a loader's workers, from the loader's side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue.dataloader.cursor import Cursor

_LOOK_EVERY_S = 0.25


class WorkerTurn:
    """Iterates over what torch's iterator brings from the workers until the turn is over."""

    def __init__(
        self, bundles: Any, cursor: Cursor, iteration: int, keep: bool, should_stop: Callable[[], bool] | None
    ) -> None:
        """``keep``: the workers serve the next iteration, too. ``should_stop`` can only be asked in this process."""
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
        # Kept workers serve one iterator at a time: an older one must not take what is meant for the newer.
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
        """Let the workers stop waiting; end them unless they are kept and nothing went wrong. Idempotent."""
        self._ended.set()
        self._cursor.give_up(self._iteration)
        if self._watcher is not None:
            self._watcher.join()
        if failed or not self._keep:
            # Left to the garbage collector, they would outlive an error: its traceback holds torch's iterator.
            self._bundles._shutdown_workers()
