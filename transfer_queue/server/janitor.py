# SPDX-License-Identifier: Apache-2.0
"""Tells storage units of other processes what ended sessions leave behind: in a thread, so nobody waits for a unit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.modes import run_blocking
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


class Janitor:
    """``storage``: the controller's own client of the storage. It is used in the janitor's thread alone.

    A write to a unit of another process is committed by its client after the controller has published it. A client may
    end or give up between the two, not knowing whether it is published. The controller does, and has the units told.
    """

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._writes: dict[str, dict[int, bool]] = {}  # by client and the call that began it: is it published?
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tq-janitor", daemon=True)
        self._thread.start()

    def began(self, client: str, write: int) -> None:
        """This call begins a write, whose values the client stores, publishes and commits in calls of their own."""
        self._writes.setdefault(client, {})[write] = False

    def published(self, client: str, write: int) -> None:
        """The write that this call began is published. Its client has still to commit it."""
        self._writes.setdefault(client, {})[write] = True

    def received(self, client: str, calls: Iterable[int]) -> None:
        """The client is done with these calls: what they began is committed."""
        own = self._writes.get(client)
        if own is None:
            return
        for call in calls:
            own.pop(call, None)
        if not own:
            del self._writes[client]

    def cancelled(self, client: str, call: int) -> None:
        """The client has given this call up. Where it began a write, that is committed if published, else aborted."""
        published = self._writes.get(client, {}).get(call)
        if published is not None:
            self.received(client, [call])
            self._jobs.put(lambda: self._storage.end_write(client, call, published))

    def end_session(self, client: str) -> None:
        published = [write for write, is_published in self._writes.pop(client, {}).items() if is_published]
        self._jobs.put(lambda: self._storage.end_session(client, published))

    def delete(self, indexes: Any) -> None:
        """Values of these samples belong to nobody."""
        self._jobs.put(lambda: self._storage.clear_rows(indexes.tolist()))

    def close(self) -> None:
        """Do what is left, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                run_blocking(job())
            except QueueUnreachableError as error:  # the unit has ended, maybe with the queue, and its values with it
                _log.debug("what an ended client left behind is gone with its storage unit: %s", error)
            except Exception as error:  # the backend may be anybody's code, and the next job must be done
                _log.warning("what an ended client left behind could not be deleted: %r", error)
        run_blocking(self._storage.close())
        self._storage.session.close()
