# SPDX-License-Identifier: Apache-2.0
"""QueueConnection: a run's queue, joined or started in this process, and left or ended with it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterable
from multiprocessing.util import Finalize
from typing import Any, ClassVar
from weakref import WeakSet

import transfer_queue as tq
from lightning_tq.checks import list_names
from lightning_tq.dashboard_process import DashboardProcess
from lightning_tq.queue_config import QueueConfig, differences
from transfer_queue import TransferQueueClient
from transfer_queue.errors import ConfigError, NotInitializedError, TransferQueueError

logger = logging.getLogger(__name__)

_LOOKS, _LOOK_EVERY_S = 100, 0.1


class QueueConnection:
    """``close`` reverts what ``open`` did, once, in the same process.

    Connections of one process share its client. The last one to close ends what the first one started or joined.
    """

    _opened: ClassVar[WeakSet[QueueConnection]] = WeakSet()
    _ends: ClassVar[dict[tuple[int, str], Finalize]] = {}
    """By process and address, what ends a queue that a connection started or joined. None for a user's own ``init``."""

    def __init__(self) -> None:
        self._joined: tuple[int, str] | None = None
        """This process and the queue's address, while it is open."""
        self._page: DashboardProcess | None = None

    @property
    def is_open(self) -> bool:
        return self._joined is not None and self._joined[0] == os.getpid()

    @property
    def client(self) -> TransferQueueClient:
        """This process's client. Raises NotInitializedError (a TransferQueueError) before there is a queue."""
        try:
            return tq.get_client()
        except NotInitializedError as error:
            raise NotInitializedError(
                "there is no queue in this process yet, or it was closed. A run opens it. To use it before a run, call "
                "open() of the TQDataModule first (dm.open()), or transfer_queue.init()."
            ) from error

    @property
    def conf(self) -> Any:
        """The running queue's configuration, including server addresses. It can be pickled."""
        self.client  # noqa: B018  (raises without a queue; init() would start one)
        return tq.init()

    @property
    def address(self) -> str:
        return str(self.conf["address"])

    def open(
        self, config: QueueConfig, sampler_modules: Iterable[str], address: str | None = None, may_differ: bool = False
    ) -> None:
        """Use the queue this process is in, else join one by address or TQ_ADDRESS, else start one.

        Args:
            config: Configuration of a new queue. A warning names what a running queue has set differently.
            address: Address of the queue that another rank has opened.
            may_differ: This process may already be in that queue by another address.
        Raises:
            ConfigError: this process is in a different queue than requested, or a key is unknown.
            TransferQueueError: as ``transfer_queue.init``.
        """
        if self.is_open:
            return
        wanted = address or config.address
        try:
            tq.get_client()
            is_first = False
        except NotInitializedError:
            tq.init({**config.conf(sampler_modules), "address": wanted})
            is_first = True
            # multiprocessing's Finalize, unlike atexit, also runs when spawned and forked ranks end: in the process
            # that made it. It runs before the queue's own finalizer. It is bound to no object, since garbage
            # collection may run in any thread.
            self._ends[os.getpid(), self.address] = Finalize(None, _close_queue, exitpriority=20)
        if wanted is not None and self.address != wanted and not may_differ:
            raise ConfigError(
                f"this process is already in the queue at {self.address} (by transfer_queue.init or TQ_ADDRESS), not "
                f"in the one at {wanted}. Call transfer_queue.close() first, or omit the address."
            )
        if address is None and (wanted is not None or not is_first):
            _warn_of_differences(config, self.conf)
        self._joined = (os.getpid(), self.address)
        self._opened.add(self)
        if config.dashboard and address is None:
            self._page = DashboardProcess(self.address, config.dashboard if isinstance(config.dashboard, str) else None)

    def close(self) -> None:
        """Leave the queue, and end it if it was started here and no other connection of this process uses it.

        Idempotent; does nothing in another process.
        """
        if not self.is_open:
            return
        joined, self._joined = self._joined, None
        page, self._page = self._page, None
        if page is not None:
            page.close()
        is_last = not any(other._joined == joined for other in self._opened)
        if is_last and joined in self._ends:
            self._ends.pop(joined)()

    def __getstate__(self) -> dict[str, Any]:
        return {"_joined": None, "_page": None}  # a spawned rank opens its own


def _warn_of_differences(config: QueueConfig, running: Any) -> None:
    found = differences(config, running)
    if found:
        logger.warning(
            f"the queue at {running['address']} is already running, so these settings are ignored: "
            f"{', '.join(found)}. Start that queue with them, or remove them."
        )


def _close_queue() -> None:
    with contextlib.suppress(TransferQueueError):  # the queue has ended already
        wait_for_followers(tq.get_client())
    tq.close()


def wait_for_followers(client: TransferQueueClient, partitions: Collection[str] | None = None) -> None:
    """Let recorders read these partitions (None: all), which end now, such as the batch that made a run fail."""
    for look in range(_LOOKS):
        known = client.get_stats()["partitions"]
        tasks = [task for name in known.keys() & (partitions or known) for task in known[name]["tasks"].items()]
        behind = {name for name, own in tasks if "follows" in own and own["in_flight"]}
        if not behind:
            return
        if look in (0, _LOOKS - 1):
            logger.warning(
                f"{list_names(behind)} {'is waited for' if not look else 'comes too late'} to read the last batches."
            )
        threading.Event().wait(_LOOK_EVERY_S)
