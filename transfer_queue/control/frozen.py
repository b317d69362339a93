# SPDX-License-Identifier: Apache-2.0
"""Samples that must keep their values while a checkpoint reads them, and calls with a permit to replace values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import Indexes

CallKey = tuple[str, int]
"""(client, number of the call)"""


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
    """Freezes and permits, by the call that began each. A permit allows replacing values until its write ends."""

    def __init__(self) -> None:
        self._freezes: dict[CallKey, _Freeze] = {}
        self._leaves: set[CallKey] = set()

    def begin(self, client: str, call: int, indexes: Indexes) -> None:
        """``indexes`` ascending."""
        self._freezes[client, call] = _Freeze(indexes)

    def end(self, client: str, call: int) -> Indexes:
        """Returns what was cleared since, and may be deleted now."""
        freeze = self._freezes.pop((client, call), None)
        if freeze is None or not freeze.kept:
            return np.empty(0, dtype=np.int64)
        kept = np.sort(np.concatenate(freeze.kept), kind="stable")  # many times faster than np.unique, which hashes
        return self.keep(kept[np.diff(kept, prepend=-1) > 0])

    def keep(self, cleared: Indexes) -> Indexes:
        """Return the cleared samples that may lose their values now; ``end`` returns the others."""
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

    def by_client(self) -> Counter[str]:
        """Freezes of each client."""
        return Counter(client for client, _ in self._freezes)

    # ---- permits to replace values ----

    @property
    def has_leaves(self) -> bool:
        return bool(self._leaves)

    def give_leave(self, client: str, call: int) -> None:
        self._leaves.add((client, call))

    def end_leave(self, client: str, call: int) -> None:
        """The write has ended."""
        self._leaves.discard((client, call))

    def leaves_by_client(self) -> Counter[str]:
        """Permits of each client."""
        return Counter(client for client, _ in self._leaves)
