# SPDX-License-Identifier: Apache-2.0
"""RankWatchdog: a thread that ends a run when a process it depends on has ended, so that no rank waits forever."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence

from transfer_queue import QueueUnreachableError
from transfer_queue.errors import TransferQueueError

_CHECK_EVERY_S = 0.2

Check = Callable[[], BaseException | None]
"""Returns the reason to end the run, or None."""


class RankGoneError(TransferQueueError, RuntimeError):
    """The process of another rank ended in the middle of a run, so collectives can't continue."""


class RankWatchdog:
    """Runs ``checks`` five times a second; the first exception that one returns stops the streams.

    The main thread raises that exception at its next ``check()``. ``hint`` runs as often, and is the last check.
    """

    stuck_after_s = 60.0
    """Time for the main thread to call ``check()`` before this process ends."""

    def __init__(self, checks: Sequence[Check], hint: Check = lambda: None) -> None:
        self.stopped = threading.Event()
        """Streams end once this is set."""
        self._checks = checks
        self._hint = hint
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-tq-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_CHECK_EVERY_S):
            error = self._found() or self._hint()
            if error is not None:
                self._error = error
                self.stopped.set()
                self._exit_if_stuck(error)
                return

    def _found(self) -> BaseException | None:
        """What the first check that finds something returns."""
        return next((error for check in self._checks if (error := check()) is not None), None)

    def _exit_if_stuck(self, error: BaseException) -> None:
        """A main thread inside a collective with a dead rank may never call ``check()``. Then end the process.

        A queue may have ended with the rank that had started it.
        """
        if isinstance(error, RankGoneError | QueueUnreachableError) and not self._end.wait(self.stuck_after_s):
            sys.stderr.write(
                f"error: {error} The main thread did not react within {self.stuck_after_s:g} s, so this process ends "
                f"now.\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def check(self) -> None:
        """Raise the error that ended the run, if there is one."""
        if self._error is not None:
            raise self._error from self._error.__cause__  # not the end of a stream, where this is often called

    def look(self) -> None:
        """Raise what a check finds now. The queue may know of a process' end before the thread has looked."""
        error = self._found()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread and every stream. Idempotent."""
        self.stopped.set()
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()


def parent_check(rank: int) -> Check:
    """Spawned and forked ranks would outlive the process that started them."""
    parent = os.getppid()
    is_child = multiprocessing.parent_process() is not None

    def check() -> BaseException | None:
        if not is_child or os.getppid() == parent:
            return None
        return RankGoneError(f"the process that started rank {rank} (pid {parent}) ended, so this rank ends too.")

    return check
