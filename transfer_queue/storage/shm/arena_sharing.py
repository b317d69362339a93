# SPDX-License-Identifier: Apache-2.0
"""How clients of the same host map a unit's arena: the unit's server lends it over a socket."""

from __future__ import annotations

import mmap
import os

import numpy as np

from transfer_queue.storage.shm.arena import Arena
from transfer_queue.storage.shm.unit import INLINE_NBYTES, StorageUnit
from transfer_queue.storage.wire_columns import ByteArray
from transfer_queue.transport.attachments import Lender, borrow
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


_SCHEME = "ipc://"
_TIMEOUT_S = 10.0


def arena_path(address: str) -> str | None:
    """The socket that lends the arena of the server at this address; None if the server may be on another host."""
    return address.removeprefix(_SCHEME) + ".arena" if address.startswith(_SCHEME) else None


class MappedArena:
    """A whole arena, mapped once; only touched pages cost anything. It is unmapped when no array refers to it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Raises OSError if a mapping of this size is refused."""
        self.nbytes = nbytes
        self._memory = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8, nbytes)

    def view(self, offset: int, nbytes: int) -> ByteArray:
        return self._memory[offset : offset + nbytes]


def map_arena(address: str) -> MappedArena | None:
    """Map the arena of the server at this address. None: another host, switched off, or no mapping possible here."""
    path = arena_path(address)
    if path is None or not os.path.exists(path):
        return None
    borrowed = borrow(path, _TIMEOUT_S)
    if borrowed is None:
        return None
    descriptor, greeting = borrowed
    try:
        return MappedArena(descriptor, int.from_bytes(greeting, "little"))
    except (OSError, ValueError, OverflowError):  # for example a limit on addresses; frames work everywhere
        return None
    finally:
        os.close(descriptor)


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
