# SPDX-License-Identifier: Apache-2.0
"""The two parties that a client talks to: a session with the controller, a manager of the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError
from transfer_queue.session import Session
from transfer_queue.storage.registry import create as create_storage
from transfer_queue.storage.settings import storage_settings
from transfer_queue.transport.modes import run_blocking
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from transfer_queue.storage.base import StorageManager


class Line:
    """What all verbs share. Any thread and any event loop may use it; after a fork the child has a name of its own."""

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        """``zmq_io_threads`` and ``zmq_max_sockets`` change nothing: one I/O thread serves a process."""
        if controller_info is None:
            raise InvalidRequestError("controller_info is None: pass conf.controller.zmq_info of a running queue.")
        if not isinstance(controller_info, ZMQServerInfo):
            raise TypeError(f"controller_info must be a ZMQServerInfo, got {type(controller_info).__name__}.")
        self.client_id = client_id
        self.session = Session(client_id, controller_info.peer())
        self._storage: StorageManager | None = None
        self._storage_args: tuple[str, dict[str, Any]] | None = None

    def initialize_storage_manager(self, manager_type: str, config: Mapping[str, Any], **settings: Any) -> None:
        """Choose the backend; ``config`` is its section of a running queue's configuration."""
        self._storage_args = (manager_type, storage_settings(config, **settings))
        self._storage = create_storage(manager_type, self.session.caller, self._storage_args[1])

    @property
    def storage_manager(self) -> StorageManager:
        """Raises RuntimeError before ``initialize_storage_manager``."""
        if self._storage is None or self._storage_args is None:
            raise InvalidRequestError("this client has no storage yet: call initialize_storage_manager() first.")
        self.session.follow_fork()
        if self._storage.caller is not self.session.caller:
            self._storage = create_storage(self._storage_args[0], self.session.caller, self._storage_args[1])
        return self._storage

    async def async_get_config(self) -> dict[str, Any]:
        """The running queue's configuration."""
        return await self.session.config()

    async def put_timeout_s(self) -> float:
        """How long a put may wait for room."""
        return float((await self.session.config())["backend"]["SimpleStorage"]["put_timeout_s"])

    async def cancel(self, partition: str, indexes: Sequence[int]) -> None:
        """Give back samples that this client reserved and did not publish, and drop what was written for them: also
        for those that were cleared meanwhile, whose values belong to nobody."""
        if len(indexes):
            await self.forget(p.Cancel, partition, p.pack_indexes(indexes))

    async def forget(self, request: type[p.Request], *args: Any) -> int:
        """Ask the controller to forget samples, then drop the values of those it names. Returns how many."""
        message = self.session.message(request, *args)
        try:
            cleared = await self.session.send(message, p.Cleared)
            indexes = p.unpack_indexes(cleared.indexes).tolist()
            if indexes:
                await self.storage_manager.clear_rows(indexes)
        except (asyncio.CancelledError, KeyboardInterrupt):
            await self.session.withdraw(message)  # nobody else knows of these values now, or asks for them
            raise
        return len(indexes)

    def close(self) -> None:
        """Leave the queue; what was put stays, and so do values that were got. Idempotent."""
        if self._storage is not None:
            run_blocking(self._storage.close())
        self.session.close()
