# SPDX-License-Identifier: Apache-2.0
"""Janitor: a thread that ends writes and sessions in storage units of other processes, and deletes values there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transfer_queue.errors import QueueUnreachableError
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
        self._thread = ThreadPoolExecutor(1, "tq-janitor")

    def end_write(self, client: str, call: int, published: bool) -> None:
        """This client has cancelled this write. It is committed if it was published, else aborted."""
        self._do(lambda: self._storage.end_write(client, call, published))

    def end_session(self, client: str, published: list[int]) -> None:
        """Of this client's uncommitted writes, these were published."""
        self._do(lambda: self._storage.end_session(client, published))

    def delete(self, indexes: Any) -> None:
        """Delete the values of these samples, an int64 array."""
        self._do(lambda: self._storage.clear_rows(indexes.tolist()))

    def close(self) -> None:
        """Do what is left, then end the thread."""
        self._do(self._storage.close)
        self._thread.submit(self._storage.session.close)
        self._thread.shutdown()

    def _do(self, job: Job) -> None:
        # The backend may be anybody's code, and the next job must be done.
        self._thread.submit(guarded, _carry_out, job)


def _carry_out(job: Job) -> None:
    try:
        run_blocking(job())
    except QueueUnreachableError as error:  # the unit has ended, maybe with the queue, and its values with it
        _log.debug("what an ended client left behind is gone with its storage unit: %s", error)
