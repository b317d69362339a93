# SPDX-License-Identifier: Apache-2.0
"""Indexes that a client holds for its next put, so that a steady stream of puts needs no exchange to reserve them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

_MOST_PARTITIONS = 8
"""Producers go on to the next partition and never come back to the ones before."""
_STEADY_PUTS = 2
"""Ask ahead after so many puts of one size into one partition: a lone put should leave no gap in the indexes."""


class Reservations:
    """Blocks of indexes per partition. A fork's child starts with none: they are its parent's."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._blocks: dict[str, list[Sequence[int]]] = {}
        self._last: tuple[str, int] | None = None
        self._streak = 0

    def _here(self) -> threading.Lock:
        if self._pid != os.getpid():  # the lock may have been held by a thread that the fork did not copy
            self._begin()
        return self._lock

    def take(self, partition: str, count: int) -> list[int] | None:
        """A block reserved for this partition if one has exactly ``count`` indexes."""
        with self._here():
            blocks = self._blocks.get(partition, ())
            found = next((block for block in blocks if len(block) == count), None)
            if found is None:
                return None
            self._blocks[partition] = [block for block in blocks if block is not found]
            return list(found)

    def wish(self, partition: str, count: int) -> int:
        """How many indexes the coming publish should ask for ahead."""
        with self._here():
            self._streak = self._streak + 1 if self._last == (partition, count) else 1
            self._last = (partition, count)
            return count if self._streak > _STEADY_PUTS and not self._blocks.get(partition) else 0

    def keep(self, partition: str, indexes: Sequence[int]) -> dict[str, list[int]]:
        """Hold what the controller reserved. Threads that put at the same time may hold a block each.

        Returns the indexes of partitions that were not put into for the longest time, to be given back.
        """
        if not len(indexes):
            return {}
        with self._here():
            self._blocks[partition] = [*self._blocks.pop(partition, ()), indexes]  # the latest is the last
            return {name: self._pop(name) for name in list(self._blocks)[:-_MOST_PARTITIONS]}

    def drop(self, partition: str) -> list[int]:
        """Let go of a partition's blocks and return their indexes."""
        with self._here():
            return self._pop(partition)

    def _pop(self, partition: str) -> list[int]:
        return [index for block in self._blocks.pop(partition, ()) for index in block]
