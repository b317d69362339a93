# SPDX-License-Identifier: Apache-2.0
"""A storage unit with its arena, behind a server: clients of the same host find the arena beside the unit's socket."""

from __future__ import annotations

from transfer_queue.storage.simple.arena import Arena
from transfer_queue.storage.simple.mapped import arena_path
from transfer_queue.storage.simple.unit import INLINE_NBYTES, StorageUnit, Tell
from transfer_queue.transport.attachments import Reception
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


def host_unit(
    name: str,
    capacity_bytes: int | None,
    shared: bool,
    server: SocketServer,
    inline_nbytes: int = INLINE_NBYTES,
    tell: Tell | None = None,
) -> StorageUnit:
    """The handler for this server; ``tell``: see ``StorageUnit``.

    Without an arena, by wish or because there can be none here, values are frames.
    """
    path = arena_path(server.address)
    if shared and path is not None:
        try:
            return _with_arena(name, capacity_bytes, server, inline_nbytes, path, tell)
        except OSError as error:  # no memfd, a limit on addresses, a path too long for a Unix socket
            _log.warning("storage unit %s shares no memory (%s): values travel as frames, which is slower", name, error)
    return StorageUnit(name, capacity_bytes, None, inline_nbytes, tell)


def _with_arena(
    name: str, capacity_bytes: int | None, server: SocketServer, inline_nbytes: int, path: str, tell: Tell | None
) -> StorageUnit:
    arena = Arena()
    unit = StorageUnit(name, capacity_bytes, arena, inline_nbytes, tell)
    try:
        reception = Reception(path, server.attend, unit)
    except OSError:
        arena.close()
        raise
    server.at_close(reception.close)
    server.at_close(arena.close)
    return unit
