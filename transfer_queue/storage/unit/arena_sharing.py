# SPDX-License-Identifier: Apache-2.0
"""How clients of the same host map a unit's arena: the unit's server lends it over a socket."""

from __future__ import annotations

import mmap
import os

import numpy as np

from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.spill import SpillFile
from transfer_queue.storage.unit.unit import INLINE_NBYTES, StorageUnit
from transfer_queue.storage.wire import ByteArray
from transfer_queue.transport.attachments import Lender, borrow
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)


_FILE_SUFFIX = ".file"
_SCHEME = "ipc://"


def arena_path(address: str) -> str | None:
    """The socket that lends the arena of the server at this address; None if the server may be on another host."""
    return address.removeprefix(_SCHEME) + ".arena" if address.startswith(_SCHEME) else None


class MappedArena:
    """A whole arena, mapped once; only touched pages cost anything. It is unmapped when no array refers to it."""

    def __init__(self, memory: ByteArray, file: ByteArray | None = None) -> None:
        """``file``: the spill file, whose bytes follow those of the arena."""
        self.nbytes = memory.nbytes
        self._memory = memory
        self._file = file

    def view(self, offset: int, nbytes: int) -> ByteArray:
        if offset >= self.nbytes and self._file is not None:
            offset -= self.nbytes
            return self._file[offset : offset + nbytes]
        return self._memory[offset : offset + nbytes]


def map_arena(address: str) -> MappedArena | None:
    """Map the arena of the server at this address. None: another host, switched off, or no mapping possible here."""
    path = arena_path(address)
    if path is None or not os.path.exists(path):
        return None
    memory = _mapped(path)
    if memory is None or not os.path.exists(path + _FILE_SUFFIX):
        return None if memory is None else MappedArena(memory)
    file = _mapped(path + _FILE_SUFFIX)
    return None if file is None else MappedArena(memory, file)


def _mapped(path: str) -> ByteArray | None:
    """The memory that the socket at this path lends; None if it can't be mapped here."""
    borrowed = borrow(path)
    if borrowed is None:
        return None
    descriptor, greeting = borrowed
    nbytes = int.from_bytes(greeting, "little")
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8, nbytes)
    except (OSError, ValueError, OverflowError):  # for example a limit on addresses; frames work everywhere
        return None
    finally:
        os.close(descriptor)


def host_unit(
    name: str,
    capacity_bytes: int | None,
    shared: bool,
    server: SocketServer,
    inline_nbytes: int = INLINE_NBYTES,
    file: SpillFile | None = None,
) -> StorageUnit:
    """Make the unit for this server. Without an arena, by configuration or necessity, values are frames."""
    path = arena_path(server.address)
    if shared and path is not None:
        try:
            arena = _lent(server, path, Arena())
            if file is not None:
                _lent(server, path + _FILE_SUFFIX, file)
            return StorageUnit(name, capacity_bytes, arena, inline_nbytes, file)
        except OSError as error:  # no memfd_create, or a limit on addresses
            _log.warning("storage unit %s shares no memory (%s): values travel as frames, which is slower", name, error)
    return StorageUnit(name, capacity_bytes, None, inline_nbytes, file)


def _lent(server: SocketServer, path: str, arena: Arena) -> Arena:
    try:
        lender = Lender(path, server.attend, arena.descriptor, arena.nbytes.to_bytes(8, "little"))
    except OSError:
        arena.close()
        raise
    server.at_close(lender.close)
    server.at_close(arena.close)
    return arena
