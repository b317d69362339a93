# SPDX-License-Identifier: Apache-2.0
"""QueueConnection: joins or starts a queue for this process, and closes only what it started."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any

import transfer_queue as tq
from lightning_tq.queue_config import QueueConfig, differences
from transfer_queue import TransferQueueClient
from transfer_queue.errors import ConfigError, NotInitializedError

logger = logging.getLogger(__name__)


class QueueConnection:
    """``close`` reverts what ``open`` did, once, in the same process."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._owns_queue = False
        self._finalizer: Finalize | None = None

    @property
    def is_open(self) -> bool:
        return self._pid == os.getpid()

    @property
    def client(self) -> TransferQueueClient:
        """This process's client. Raises NotInitializedError (a TransferQueueError) before there is a queue."""
        client: TransferQueueClient = tq.get_client()
        return client

    @property
    def conf(self) -> Any:
        """The running queue's configuration, including server addresses. It can be pickled."""
        self.client  # noqa: B018  (raises without a queue; init() would start one)
        return tq.init()

    @property
    def address(self) -> str:
        return str(self.conf["address"])

    def open(self, config: QueueConfig, sampler_modules: Iterable[str], address: str | None = None) -> None:
        """Use the queue this process is in, else join one by address or TQ_ADDRESS, else start one.

        Args:
            config: Configuration of a new queue. A warning names what a running queue has set differently.
            address: Address of the queue that another rank has opened.
        Raises:
            ConfigError: this process is in a different queue than requested, or a key is unknown.
            TransferQueueError: as ``transfer_queue.init``.
        """
        if self.is_open:
            return
        wanted = address or config.address
        try:
            tq.get_client()
            self._owns_queue = False
        except NotInitializedError:
            tq.init({**config.conf(sampler_modules), "address": wanted})
            self._owns_queue = True
        if wanted is not None and self.address != wanted:
            raise ConfigError(
                f"this process is already in the queue at {self.address} (by transfer_queue.init or TQ_ADDRESS), not "
                f"in the one at {wanted}. Call transfer_queue.close() first, or omit the address."
            )
        if address is None and (wanted is not None or not self._owns_queue):
            _warn_of_differences(config, self.conf)
        self._pid = os.getpid()
        # multiprocessing's Finalize, unlike atexit, also runs when spawned and forked ranks end. It runs before the
        # queue's own finalizer. It is bound to no object, since garbage collection may run in any thread.
        self._finalizer = Finalize(None, _close_if_owned, args=(self._owns_queue, self._pid), exitpriority=20)

    def close(self) -> None:
        """Leave the queue, and end it if it was started here. Idempotent; does nothing in another process."""
        if not self.is_open:
            return
        self._pid = None
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        return {"_pid": None, "_owns_queue": False, "_finalizer": None}  # a spawned rank opens its own


def _warn_of_differences(config: QueueConfig, running: Any) -> None:
    found = differences(config, running)
    if found:
        logger.warning(
            f"the queue at {running['address']} is already running, so these settings are ignored: "
            f"{', '.join(found)}. Start that queue with them, or remove them."
        )


def _close_if_owned(owns_queue: bool, pid: int) -> None:
    if owns_queue and os.getpid() == pid:
        tq.close()
