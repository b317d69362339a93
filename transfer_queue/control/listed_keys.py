# SPDX-License-Identifier: Apache-2.0
"""The keys of one partition's samples: what changed about them, by number, and which of them match a filter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer_queue.control.filtered import matching
from transfer_queue.control.kept_sets import KeptSets
from transfer_queue.control.keys_and_tags import KeyMap, TagStore
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import PUBLISHED, Rows, RowTable

_COLUMN = "keyed"
_FEWEST, _MOST = 1_000, 100_000
"""Changes that are remembered: as many as there are keys, in these bounds. A listing is no longer than more of them."""


class KeyChange(NamedTuple):
    """Samples whose keys are new or have new tags, and keys that were removed. ``number``: of the last change here."""

    indexes: list[int]
    removed: list[str]
    number: int


class ListedKeys:
    """Every change has a number. The latest ones are remembered, at least 1000 of them."""

    def __init__(self, table: RowTable, keys: KeyMap, tags: TagStore) -> None:
        self.number = 0
        self._log: list[int | str] = []  # the index of a sample that changed, or a key that was removed
        self._table = table
        self._keys = keys
        self._tags = tags
        self._matching: KeptSets[str | None] = KeptSets()
        self._seen = -1

    # ---- changes ----

    def take_changed(self) -> bool:
        """Whether there were changes since the last call. The first call counts as one."""
        self._tags.catch_up()
        before, self._seen = self._seen, self.number
        return before != self.number

    def appeared(self, rows: Rows) -> None:
        """These rows became samples."""
        if len(self._keys):
            self.named(rows)
            self.retagged(rows)

    def named(self, rows: Rows) -> None:
        """Those of these rows that have keys are listed once they are samples."""
        named = [self._keys.key_of(index) is not None for index in self._table.column("index")[rows].tolist()]
        self._table.ensure_column(_COLUMN, bool)[rows] = named

    def retagged(self, rows: Rows) -> None:
        """The tags of these rows changed."""
        rows = self._listed(rows)
        if len(rows):
            self._add(self._table.column("index")[rows].tolist())
            for _, each in self._matching.items():
                each.add(rows)

    def removing(self, rows: Rows) -> None:
        """These rows are about to be released."""
        rows = self._listed(rows)
        if len(rows):
            names = map(self._keys.key_of, self._table.column("index")[rows].tolist())
            self._add([name for name in names if name is not None])
            for _, each in self._matching.items():
                each.discard(rows)

    def _listed(self, rows: Rows) -> Rows:
        if not self._table.has_column(_COLUMN):
            return rows[:0]
        state = self._table.column("state")[rows]
        listed: Rows = rows[self._table.column(_COLUMN)[rows] & PUBLISHED[state]]
        return listed

    def _add(self, changes: list[int] | list[str]) -> None:
        self._log.extend(changes)
        self.number += len(changes)
        most = min(_MOST, max(_FEWEST, len(self._keys)))
        if len(self._log) > 2 * most:
            del self._log[:-most]

    def since(self, number: int, limit: int) -> KeyChange | None:
        """Up to ``limit`` changes after this one; None if they aren't remembered any more."""
        self._tags.catch_up()
        start = number - (self.number - len(self._log))
        if start < 0 or number > self.number:
            return None
        changes = self._log[start : start + limit]
        indexes = list(dict.fromkeys(each for each in changes if isinstance(each, int)))
        names = {self._keys.key_of(index) for index in indexes}
        removed = dict.fromkeys(each for each in changes if isinstance(each, str))
        return KeyChange(indexes, [key for key in removed if key not in names], number + len(changes))

    # ---- filters ----

    def matching(self, where: str | None) -> ReadySet:
        """The samples whose keys are listed and whose tags match, kept up to date."""
        self._tags.catch_up()
        return self._matching.get(where, lambda: matching(where, self._tags, self._all_listed()))

    def _all_listed(self) -> npt.NDArray[np.bool_]:
        if not self._table.has_column(_COLUMN):
            return np.zeros(self._table.size, dtype=np.bool_)
        listed: npt.NDArray[np.bool_] = PUBLISHED[self._table.column("state")] & self._table.column(_COLUMN)
        return listed

    def rebuild(self) -> None:
        """Row numbers changed: compare with the filters anew at their next use."""
        self._matching.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        rows = self._all_listed().nonzero()[0]
        live = PUBLISHED[self._table.column("state")].nonzero()[0]
        named = [self._keys.key_of(index) is not None for index in self._table.column("index")[live].tolist()]
        assert live[np.array(named, dtype=np.bool_)].tolist() == rows.tolist(), "samples with keys are listed"
        for _, each in self._matching.items():
            each.check_invariants(rows)
