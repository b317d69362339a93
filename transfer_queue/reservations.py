# SPDX-License-Identifier: Apache-2.0
"""Indexes that a client holds for its next put, so that a steady stream of puts needs no exchange to reserve them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

_STEADY_PUTS = 2
"""Ask ahead after so many puts of one size into one partition: a lone put should leave no gap in the indexes."""


class Reservations:
    """Per partition, at most one block of indexes. A fork's child starts with none: they are its parent's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._blocks: dict[str, Sequence[int]] = {}
        self._last: tuple[str, int] | None = None
        self._streak = 0

    def take(self, partition: str, count: int) -> list[int] | None:
        """The block reserved for this partition if it has exactly ``count`` indexes."""
        with self._lock:
            self._check_process()
            block = self._blocks.get(partition)
            if block is None or len(block) != count:
                return None
            return list(self._blocks.pop(partition))

    def wish(self, partition: str, count: int) -> int:
        """How many indexes the coming publish should ask for ahead."""
        with self._lock:
            self._check_process()
            self._streak = self._streak + 1 if self._last == (partition, count) else 1
            self._last = (partition, count)
            return count if self._streak > _STEADY_PUTS and partition not in self._blocks else 0

    def keep(self, partition: str, indexes: Sequence[int]) -> None:
        """Hold what the controller reserved."""
        if len(indexes):
            with self._lock:
                self._blocks[partition] = indexes

    def drop(self, partition: str) -> Sequence[int]:
        """Let go of a partition's block and return it."""
        with self._lock:
            self._check_process()
            return self._blocks.pop(partition, ())

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._last, self._streak = os.getpid(), None, 0
            self._blocks.clear()
