# SPDX-License-Identifier: Apache-2.0
"""A unit's arena as a client on the same host sees it."""

from __future__ import annotations

import mmap
import os

import numpy as np

from transfer_queue.storage.pieces import ByteArray
from transfer_queue.transport.attachments import borrow

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
