# SPDX-License-Identifier: Apache-2.0
"""Ends writes and sessions in storage units of other processes: in a thread, so that no client waits for a unit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.modes import run_blocking
from transfer_queue.transport.server import guarded
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
Job = Callable[[], Coroutine[Any, Any, Any]]


class Janitor:
    """``storage``: the controller's own client of the storage. It is used in the janitor's thread alone.

    A client commits its write to a unit of another process after the controller has published it. It may end or cancel
    between the two, without knowing whether the write is published. The controller knows, and the janitor ends it.
    """

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._writes: dict[str, dict[int, bool]] = {}  # by client and first call: is it published?
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tq-janitor", daemon=True)
        self._thread.start()

    def started(self, client: str, write: int) -> None:
        """This call starts a write. The client stores, publishes and commits its values in later calls."""
        self._writes.setdefault(client, {})[write] = False

    def published(self, client: str, write: int) -> None:
        """The write that this call started is published. Its client has still to commit it."""
        self._writes.setdefault(client, {})[write] = True

    def received(self, client: str, calls: Iterable[int]) -> None:
        """The client is done with these calls: the writes that they started are committed."""
        own = self._writes.get(client)
        if own is None:
            return
        for call in calls:
            own.pop(call, None)
        if not own:
            del self._writes[client]

    def cancelled(self, client: str, call: int) -> None:
        """The client has cancelled this call. If it started a write, that is committed if published, else aborted."""
        published = self._writes.get(client, {}).get(call)
        if published is not None:
            self.received(client, [call])
            self._jobs.put(lambda: self._storage.end_write(client, call, published))

    def end_session(self, client: str) -> None:
        published = [write for write, is_published in self._writes.pop(client, {}).items() if is_published]
        self._jobs.put(lambda: self._storage.end_session(client, published))

    def delete(self, indexes: Any) -> None:
        """Delete the values of these samples, an int64 array."""
        self._jobs.put(lambda: self._storage.clear_rows(indexes.tolist()))

    def close(self) -> None:
        """Do what is left, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    @staticmethod
    def _do(job: Job) -> None:
        try:
            run_blocking(job())
        except QueueUnreachableError as error:  # the unit has ended, maybe with the queue, and its values with it
            _log.debug("what an ended client left behind is gone with its storage unit: %s", error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            guarded(self._do, job)  # the backend may be anybody's code, and the next job must be done
        run_blocking(self._storage.close())
        self._storage.session.close()
