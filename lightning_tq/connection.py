# SPDX-License-Identifier: Apache-2.0
"""Connection: this process' way to the queue; who started what, so that exactly that is closed."""

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


class Connection:
    """Joins the queue there is or starts one; ``close`` undoes what ``open`` did, once, in the same process."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._is_ours = False
        self._finalizer: Finalize | None = None

    @property
    def is_open(self) -> bool:
        return self._pid == os.getpid()

    @property
    def client(self) -> TransferQueueClient:
        """This process' client. Raises NotInitializedError (a TransferQueueError) when there is no queue yet."""
        client: TransferQueueClient = tq.get_client()
        return client

    @property
    def conf(self) -> Any:
        """The running queue's configuration, server addresses included. Picklable."""
        self.client  # noqa: B018  (raises where there is no queue; init() would start one)
        return tq.init()

    @property
    def address(self) -> str:
        return str(self.conf["address"])

    def open(self, config: QueueConfig, sampler_modules: Iterable[str], address: str | None = None) -> None:
        """Use the queue that this process is in already, that an address or TQ_ADDRESS names, or a new one.

        Args:
            config: For a new one. What a queue that runs already has otherwise is told in a warning.
            address: Where another rank says that it has opened the queue.
        Raises:
            ConfigError: this process is in another queue than the one that was asked for, or an unknown key.
            TransferQueueError: as ``transfer_queue.init``.
        """
        if self.is_open:
            return
        wanted = address or config.address
        try:
            tq.get_client()
            self._is_ours = False
        except NotInitializedError:
            tq.init({**config.conf(sampler_modules), "address": wanted})
            self._is_ours = True
        if wanted is not None and self.address != wanted:
            raise ConfigError(
                f"this process is in the queue at {self.address} already (transfer_queue.init or TQ_ADDRESS), so not "
                f"in the one at {wanted}. Leave that queue first, or leave out the address."
            )
        if address is None and (wanted is not None or not self._is_ours):
            _tell_differences(config, self.conf)
        self._pid = os.getpid()
        # multiprocessing's, not atexit: it also runs at the end of spawned and forked ranks. Before the queue's own,
        # and for no object: a garbage collection may run in any thread, the client's own included.
        self._finalizer = Finalize(None, _close_if_ours, args=(self._is_ours, self._pid), exitpriority=20)

    def close(self) -> None:
        """Leave the queue; end it if it was started here. Idempotent; does nothing in another process."""
        if not self.is_open:
            return
        self._pid = None
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        return {"_pid": None, "_is_ours": False, "_finalizer": None}  # a spawned rank opens its own


def _tell_differences(config: QueueConfig, running: Any) -> None:
    found = differences(config, running)
    if found:
        logger.warning(
            f"the queue at {running['address']} runs already, so what was asked of it otherwise can't apply: "
            f"{', '.join(found)}. Start that queue so, or leave it out."
        )


def _close_if_ours(is_ours: bool, pid: int) -> None:
    if is_ours and os.getpid() == pid:
        tq.close()
