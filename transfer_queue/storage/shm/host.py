# SPDX-License-Identifier: Apache-2.0
"""Sets up a storage unit behind a server, and the socket that lends its arena to clients of the same host."""

from __future__ import annotations

from transfer_queue.storage.shm.arena import Arena
from transfer_queue.storage.shm.connection import arena_path
from transfer_queue.storage.shm.unit import INLINE_NBYTES, StorageUnit
from transfer_queue.transport.attachments import Lender
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


def host_unit(
    name: str, capacity_bytes: int | None, shared: bool, server: SocketServer, inline_nbytes: int = INLINE_NBYTES
) -> StorageUnit:
    """Make the unit for this server. Without an arena, by configuration or necessity, values are frames."""
    path = arena_path(server.address)
    if shared and path is not None:
        try:
            return StorageUnit(name, capacity_bytes, _lent(server, path), inline_nbytes)
        except OSError as error:  # no memfd_create, or a limit on addresses
            _log.warning("storage unit %s shares no memory (%s): values travel as frames, which is slower", name, error)
    return StorageUnit(name, capacity_bytes, None, inline_nbytes)


def _lent(server: SocketServer, path: str) -> Arena:
    arena = Arena()
    try:
        lender = Lender(path, server.attend, arena.descriptor, arena.nbytes.to_bytes(8, "little"))
    except OSError:
        arena.close()
        raise
    server.at_close(lender.close)
    server.at_close(arena.close)
    return arena
