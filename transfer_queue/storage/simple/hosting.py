# SPDX-License-Identifier: Apache-2.0
"""A storage unit with its arena, behind a server: clients of the same host find the arena beside the unit's socket."""

from __future__ import annotations

from transfer_queue.storage.simple.arena import Arena
from transfer_queue.storage.simple.mapped import arena_path
from transfer_queue.storage.simple.unit import INLINE_NBYTES, StorageUnit
from transfer_queue.transport.attachments import Reception
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


def host_unit(
    name: str, capacity_bytes: int | None, shared: bool, server: SocketServer, inline_nbytes: int = INLINE_NBYTES
) -> StorageUnit:
    """The handler for this server. Without an arena, by wish or because there can be none here, values are frames."""
    path = arena_path(server.address)
    arena = _arena(name) if shared and path is not None else None
    unit = StorageUnit(name, capacity_bytes, arena, inline_nbytes)
    if arena is not None and path is not None:
        server.at_close(Reception(path, server.attend, unit).close)
        server.at_close(arena.close)
    return unit


def _arena(name: str) -> Arena | None:
    try:
        return Arena()
    except OSError as error:
        _log.warning("storage unit %s has no shared memory (%s): values travel as frames, which is slower", name, error)
        return None
