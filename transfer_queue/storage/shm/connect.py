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

from transfer_queue.storage.changes import Changes
from transfer_queue.storage.messages import Path, View, arena_path
from transfer_queue.storage.wire import ByteArray
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import is_blocking

_BORROW_TIMEOUT_S = 10.0
_MOST_DESCRIPTORS = 3


class UnitConnection:
    """Any thread may use it."""

    def __init__(self, peer: Peer, shared: bool = True) -> None:
        """``shared`` False: don't map the arena; values travel as frames."""
        self.peer = peer
        self._trying = threading.Lock()  # held for as long as a unit may take to answer
        self._tried = not shared or arena_path(peer.address) is None
        self._arena: View | None = None
        self._changes: Changes | None = None

    @property
    def arena(self) -> View | None:
        """The mapped arena, or None. Decided once by trying, which may take seconds if the unit does not answer."""
        if not self._tried:
            with self._trying:
                if not self._tried:
                    arena, changes = map_arena(self.peer.address)
                    if not self._tried:  # otherwise it was closed meanwhile
                        self._arena, self._changes, self._tried = arena, changes, True
        return self._arena

    @property
    def changes(self) -> Changes | None:
        """Which of its values have changed, where the arena is mapped. It tries nothing."""
        return self._changes

    @property
    def path(self) -> Path:
        """How this client's values reach the unit. It tries nothing."""
        if not self._tried:
            return "undecided"
        return "frames" if self._arena is None else "arena"

    def close(self) -> None:
        """Unmap the arena once nothing refers to it."""
        self._tried = True
        self._arena = self._changes = None


async def decide_paths(connections: Iterable[UnitConnection]) -> None:
    """Try to map the arenas of these units, in a thread if an event loop is running."""
    if is_blocking():
        return
    undecided = [connection for connection in connections if connection.path == "undecided"]
    if undecided:
        await asyncio.gather(*(asyncio.to_thread(getattr, each, "arena") for each in undecided))


# ---- the arena ----


def map_arena(address: str) -> tuple[View | None, Changes | None]:
    """Map the whole arena of the server at this address. It is unmapped when no array refers to it.

    None: another host, switched off, or no mapping possible here.
    """
    path = arena_path(address)
    descriptors = borrow(path) if path is not None and os.path.exists(path) else []
    if not descriptors:
        return None, None
    try:
        *memories, page = descriptors
        changes = Changes(page)
        memory, *file = [np.frombuffer(mmap.mmap(each, 0), np.uint8) for each in memories]
    except (OSError, ValueError, OverflowError):  # for example a limit on addresses; frames work everywhere
        return None, None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

    def view(offset: int, nbytes: int) -> ByteArray:
        if offset >= memory.nbytes and file:  # the bytes of the spill file follow those of the arena
            offset -= memory.nbytes
            return file[0][offset : offset + nbytes]
        return memory[offset : offset + nbytes]

    return view, changes


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
