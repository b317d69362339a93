# SPDX-License-Identifier: Apache-2.0
"""Samples whose values must stay as they are, since a checkpoint is being made of them; and who may replace values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import Indexes


@dataclass(slots=True)
class _Freeze:
    """``indexes`` ascending. ``kept``: those of them that were cleared since."""

    indexes: Indexes
    kept: list[Indexes] = field(default_factory=list)

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        if not len(self.indexes):
            return np.zeros(len(indexes), dtype=np.bool_)
        at = self.indexes.searchsorted(indexes)
        at[at == len(self.indexes)] = 0
        held: npt.NDArray[np.bool_] = self.indexes[at] == indexes
        return held


class Frozen:
    """Freezes by client and number. A leave: a writer may replace values, and hasn't said yet what became of that."""

    def __init__(self) -> None:
        self._freezes: dict[tuple[str, int], _Freeze] = {}
        self._leaves: dict[str, Counter[tuple[str, bytes]]] = {}

    def begin(self, client: str, number: int, indexes: Indexes) -> None:
        self._freezes[client, number] = _Freeze(np.sort(indexes))

    def end(self, client: str, number: int) -> Indexes:
        """Returns what was cleared since, and may be dropped now."""
        freeze = self._freezes.pop((client, number), None)
        if freeze is None or not freeze.kept:
            return np.empty(0, dtype=np.int64)
        kept = np.sort(np.concatenate(freeze.kept))  # many times faster than np.unique, which hashes
        return self.keep(kept[np.diff(kept, prepend=-1) > 0])

    def keep(self, cleared: Indexes) -> Indexes:
        """Those of cleared samples whose values may be dropped now; the others are told by ``end``."""
        for freeze in self._freezes.values():
            held = freeze.holds(cleared)
            if held.any():
                freeze.kept.append(cleared[held])
                cleared = cleared[~held]
        return cleared

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes must keep their values."""
        held = np.zeros(len(indexes), dtype=np.bool_)
        for freeze in self._freezes.values():
            held |= freeze.holds(indexes)
        return held

    def __bool__(self) -> bool:
        return bool(self._freezes)

    # ---- leave to replace values ----

    @property
    def has_leaves(self) -> bool:
        return bool(self._leaves)

    def give_leave(self, client: str, partition: str, indexes: bytes) -> None:
        self._leaves.setdefault(client, Counter())[partition, indexes] += 1

    def end_leave(self, client: str, partition: str, indexes: bytes) -> None:
        """A Publish or Cancel of these samples: they hold what they will hold."""
        mine = self._leaves.get(client)
        if mine is None or (partition, indexes) not in mine:
            return
        mine[partition, indexes] -= 1
        if not mine[partition, indexes]:
            del mine[partition, indexes]
        if not mine:
            del self._leaves[client]

    def client_gone(self, client: str) -> list[Indexes]:
        """Its freezes and leaves end; returns what ``end`` returns."""
        self._leaves.pop(client, None)
        return [self.end(*key) for key in list(self._freezes) if key[0] == client]
