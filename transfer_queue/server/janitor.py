# SPDX-License-Identifier: Apache-2.0
"""Janitor: a thread that ends writes and sessions in storage units of other processes, and deletes values there."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.protocol import WriteName
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.loop import guarded
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
Job = Callable[[], Coroutine[Any, Any, Any]]


class Janitor:
    """Ends writes and sessions in storage units of other processes, in a thread: no client waits for a unit.

    ``storage``: the controller's own client of the storage. It is used in the janitor's thread alone.
    """

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self.committed: deque[WriteName] = deque()
        """Writes of clients that have ended, once every unit that can be reached has committed them."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tq-janitor", daemon=True)
        self._thread.start()

    def end_write(self, write: WriteName, published: list[WriteName]) -> None:
        """Its client has cancelled it. The published writes are committed; if it is none of them, it is aborted."""
        self._jobs.put(lambda: self._storage.end_write(write, published))
        self._jobs.put(lambda: self._note(published[-1:]))

    def end_session(self, client: str, published: list[WriteName]) -> None:
        """The published writes are committed; any others of this client are dropped."""
        self._jobs.put(lambda: self._storage.end_session(client, published))
        self._jobs.put(lambda: self._note([write for write in published if write[0] == client]))

    async def _note(self, writes: Iterable[WriteName]) -> None:
        self.committed.extend(writes)

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
