# SPDX-License-Identifier: Apache-2.0
"""A client's connection to one storage unit: its address, and its arena if this process has mapped it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterable

import numpy as np

from transfer_queue.storage.messages import Path, arena_path
from transfer_queue.storage.wire import ByteArray
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import is_blocking

_BORROW_TIMEOUT_S = 10.0
_MOST_DESCRIPTORS = 2


class UnitConnection:
    """Any thread may use it."""

    def __init__(self, peer: Peer, shared: bool = True) -> None:
        """``shared`` False: don't map the arena; values travel as frames."""
        self.peer = peer
        self._trying = threading.Lock()  # held for as long as a unit may take to answer
        self._tried = not shared or arena_path(peer.address) is None
        self._arena: MappedArena | None = None
        self._closed = False

    @property
    def arena(self) -> MappedArena | None:
        """The mapped arena, or None. Decided once by trying, which may take seconds if the unit does not answer."""
        if not self._tried:
            with self._trying:
                if not self._tried:
                    self._arena = map_arena(self.peer.address)
                    self._tried = True
                    if self._closed:  # meanwhile
                        self._arena = None
        return self._arena

    @property
    def path(self) -> Path:
        """How this client's values reach the unit. It tries nothing."""
        if not self._tried:
            return "undecided"
        return "frames" if self._arena is None else "arena"

    def close(self) -> None:
        """Unmap the arena once nothing refers to it."""
        self._closed = self._tried = True
        self._arena = None


async def decide_paths(connections: Iterable[UnitConnection]) -> None:
    """Try to map the arenas of these units, in a thread if an event loop is running."""
    if is_blocking():
        return
    undecided = [connection for connection in connections if connection.path == "undecided"]
    if undecided:
        await asyncio.gather(*(asyncio.to_thread(getattr, each, "arena") for each in undecided))


# ---- the arena ----


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
    descriptors = borrow(path) if path is not None and os.path.exists(path) else []
    if not descriptors:
        return None
    try:
        return MappedArena(*(np.frombuffer(mmap.mmap(each, 0), np.uint8) for each in descriptors))
    except (OSError, ValueError, OverflowError):  # for example a limit on addresses; frames work everywhere
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def borrow(path: str, timeout_s: float = _BORROW_TIMEOUT_S) -> list[int]:
    """Return copies of the descriptors, which the caller must close.

    None at all: no process lends any at this path, or it does not answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.settimeout(timeout_s)
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return descriptors
    return []
