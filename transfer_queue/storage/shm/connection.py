# SPDX-License-Identifier: Apache-2.0
"""A client's connection to one storage unit: its address, and its arena once that is mapped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from transfer_queue.storage.shm.mapping import MappedArena, arena_path, map_arena
from transfer_queue.storage.shm.messages import UnitStats
from transfer_queue.transport.base import Peer
from transfer_queue.transport.modes import is_blocking

Path: TypeAlias = Literal["arena", "frames", "undecided"]


class SeenStats(UnitStats, frozen=True):
    """A unit's statistics, and how the asking client's values reach it.

    ``path``: "arena", through memory that both map (except small values); "frames", in messages; "undecided", before
    this client's first put or get there.
    """

    path: Path = "undecided"


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

    def stats(self, stats: UnitStats) -> SeenStats:
        """The unit's statistics, with this client's ``path``."""
        return SeenStats(**msgspec.structs.asdict(stats), path=self.path)

    def close(self) -> None:
        """Unmap the arena once nothing refers to it."""
        self._closed = self._tried = True
        self._arena = None


async def decide_paths(connections: Sequence[UnitConnection], units: Iterable[int]) -> None:
    """Try to map the arenas of these units, in a thread if an event loop is running."""
    if is_blocking():
        return
    undecided = [connections[unit] for unit in units if connections[unit].path == "undecided"]
    if undecided:
        await asyncio.gather(*(asyncio.to_thread(getattr, each, "arena") for each in undecided))
