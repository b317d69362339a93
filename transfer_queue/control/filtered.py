# SPDX-License-Identifier: Apache-2.0
"""Samples that match a filter: compared with it a piece at a time, and again when their tags change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transfer_queue.calls import PIECE, Turn
from transfer_queue.control.keys_and_tags import TagStore, unpacked_tags
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows
from transfer_queue.control.tag_filter import TagFilter, parse_filter

_COMPARED = PIECE // 8
"""Rows compared between two looks at the time: well below a millisecond."""


def matching(where: str | None, tags: TagStore, rows: npt.NDArray[np.bool_]) -> ReadySet:
    """Those of these rows, a bit per row, whose tags match the filter, if there is one."""
    return ReadySet(rows) if where is None else FilteredSet(parse_filter(where), tags, rows)


class FilteredSet(ReadySet):
    """Those of the added rows whose tags match. Rows that are still to be compared are not among them yet."""

    def __init__(self, where: TagFilter, tags: TagStore, rows: npt.NDArray[np.bool_]) -> None:
        """``rows``: a bit per row, like that of ``ReadySet``."""
        super().__init__()
        self._where = where
        self._tags = tags
        self._unchecked = ReadySet(rows)

    @property
    def num_unchecked(self) -> int:
        return self._unchecked.count

    def add(self, rows: Rows) -> None:
        """The rows are to be compared, also those that were compared before."""
        super().discard(rows)
        self._unchecked.add(rows)

    def discard(self, rows: Rows) -> None:
        super().discard(rows)
        self._unchecked.discard(rows)

    def finish(self, turn: Turn) -> bool:
        """Compare what is not compared yet, the first rows first, while this turn has time. Returns whether all is."""
        while self._unchecked.count:
            if not turn.has_time():
                return False
            rows = next(self._unchecked.blocks())[:_COMPARED]
            packed = self._tags.packed(rows)
            self._unchecked.discard(rows)
            super().add(rows[self._matching(packed)])
        return True

    def _matching(self, packed: list[bytes | None]) -> npt.NDArray[np.bool_]:
        matches = {own: self._where.matches(unpacked_tags(own)) for own in set(packed)}  # many samples have equal tags
        return np.fromiter((matches[own] for own in packed), np.bool_, len(packed))

    def check_invariants(self, rows: Rows) -> None:
        """Raise AssertionError unless these are all rows that were added; for tests."""
        kept, unchecked = (set(each.all_rows().tolist()) for each in (self, self._unchecked))
        assert kept.isdisjoint(unchecked), "a sample is compared, or still to be"
        assert kept | unchecked <= set(rows.tolist()), "only ready samples match"
        checked = np.array(sorted(set(rows.tolist()) - unchecked), dtype=np.intp)
        assert set(checked[self._matching(self._tags.packed(checked))].tolist()) == kept, "matches are up to date"
