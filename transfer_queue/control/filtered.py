# SPDX-License-Identifier: Apache-2.0
"""Samples that match a filter: compared with it a piece at a time, and again when their tags change."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from transfer_queue.control.keys_and_tags import TagStore, unpacked_tags
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows
from transfer_queue.control.tag_filter import TagFilter

PER_TURN = 3_000
"""Samples that one turn compares with simple filters: some milliseconds, so that no other client waits for long."""
ANSWERS_PER_TURN = 100
"""Waiting requests that one turn answers: some milliseconds, too."""
_LOOK = 1 / 6
"""What it costs to examine a waiting request that can't be answered, in answers."""
_PIECE = 256
# What costs as much as a sample with few tags and a simple filter.
_COST_OF_A_PIECE = 16
_TESTS = 4
_BYTES = 512


class TurnBudget:
    """How many samples this turn may still compare or list, and how many waiting requests it may still answer.

    It also has the partitions where some are left for later turns.
    """

    def __init__(self) -> None:
        self.left = 0
        self._answers = 0.0
        self._unfinished: dict[str, None] = {}

    def begin_turn(self) -> None:
        self.left, self._answers = PER_TURN, ANSWERS_PER_TURN

    def take_unfinished(self) -> list[str]:
        """The partitions where work was left over."""
        unfinished, self._unfinished = list(self._unfinished), {}
        return unfinished

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    @property
    def num_answers(self) -> int:
        """How many waiting requests this turn may still answer."""
        return math.ceil(self._answers)

    def examined(self, answered: bool) -> None:
        """A waiting request was examined."""
        self._answers -= 1 if answered else _LOOK

    def spend(self, count: int) -> None:
        """So many samples were listed."""
        self.left -= count

    def postpone(self, partition: str) -> None:
        """Something of this partition is left for a later turn."""
        self._unfinished[partition] = None

    def finish(self, samples: ReadySet, partition: str) -> bool:
        """Compare what is not compared yet, as far as this turn allows. Returns whether that is all."""
        if not isinstance(samples, FilteredSet) or not samples.num_unchecked:
            return True
        self.left = samples.check(self.left)
        if samples.num_unchecked:
            self.postpone(partition)
        return not samples.num_unchecked


class FilteredSet(ReadySet):
    """Those of the added rows whose tags match. Rows that are still to be compared are not among them yet."""

    def __init__(self, where: TagFilter, tags: TagStore, rows: npt.NDArray[np.bool_]) -> None:
        """``rows``: a bit per row, as for ``ReadySet``."""
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

    def check(self, most: int) -> int:
        """Compare unchecked rows, the first ones first, for as much work as ``most`` samples take. Returns the rest."""
        weight = 1 + self._where.num_tests // _TESTS
        while most > 0 and self._unchecked.count:
            rows = next(self._unchecked.blocks())[:_PIECE]
            packed = self._tags.packed(rows)
            self._unchecked.discard(rows)
            super().add(rows[self._matching(packed)])
            most -= len(rows) * weight + sum(len(own) for own in packed if own) // _BYTES + _COST_OF_A_PIECE
        return most

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
