# SPDX-License-Identifier: Apache-2.0
"""A client's way to the storage units: which unit holds which sample, where it is, its arena once that is mapped."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from transfer_queue.storage.pieces import ByteArray, IntArray, Positions
from transfer_queue.storage.selection import groups
from transfer_queue.storage.shm.messages import UnitStats
from transfer_queue.transport.attachments import borrow
from transfer_queue.transport.base import Peer
from transfer_queue.transport.modes import is_blocking

Shares: TypeAlias = list[tuple[int, Positions]]
"""(unit, positions of its indexes); a slice if one unit has them all."""

ROUTING_RUN = 64
"""This many neighbouring indexes share a unit, so a put is cut into few slices, yet spreads over all units."""


def unit_of(indexes: IntArray, num_units: int, run: int = ROUTING_RUN) -> IntArray:
    """Return the unit of each index. It depends on nothing else, because every process must get the same result."""
    return (indexes // run) % num_units


def peers_of(settings: Mapping[str, Any]) -> list[Peer]:
    """The units, in the order that all processes share."""
    units = settings["units"]
    return [Peer(unit["name"], unit["address"]) for unit in units]


def shares_of(indexes: Sequence[int] | IntArray, num_units: int, run: int = ROUTING_RUN) -> Shares:
    """Units that hold none of the indexes are left out."""
    if not len(indexes):
        return []
    if num_units == 1:
        return [(0, slice(0, len(indexes)))]
    if isinstance(indexes, np.ndarray):
        lowest, highest = int(indexes.min()), int(indexes.max())
    else:
        lowest, highest = min(indexes), max(indexes)
    if lowest // run == highest // run:
        return [(lowest // run % num_units, slice(0, len(indexes)))]
    return list(groups(unit_of(np.asarray(indexes, np.int64), num_units, run)))


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
