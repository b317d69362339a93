# SPDX-License-Identifier: Apache-2.0
"""Whole groups among ready samples. They follow what becomes ready, so a round without enough of them costs nothing."""

# PartitionView.whole_groups says what a group is. Its rows follow each other in the table, since nothing lies between
# the samples of a put, and a chain has consecutive indexes. So a group is known by its first row, its head.
# A unit is what a large put gives to one group, or a whole put smaller than a group. Each unit has a count of its ready
# samples. Whole small puts are chained like this, for groups of 4 and puts of 3, 2, 1, 1 and 2:
#
#   put        3  2  1  1  2
#   chained    3  2  3  0  2    0: a group ends here, made of the puts 2, 1 and 1
#
# When a put becomes whole, or is no longer, chains change from there on, until one is as long as it was before.

from __future__ import annotations

import numpy as np

from transfer_queue.calls import PIECE
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows, RowTable

_STEP = PIECE // 2
"""Ready rows that are examined together, until there are enough groups for a round."""
_NOT_WHOLE = -1


def groups_in(ready: ReadySet, table: RowTable, size: int) -> WholeGroups:
    """The groups of this set, which follow it from their first use on. Those of another size are forgotten."""
    known = ready.follower
    if not isinstance(known, WholeGroups) or known.size != size:
        known = ready.follower = WholeGroups(ready, table, size)
    return known


class WholeGroups:
    """Follows a ready set. Rows from ``_end`` on were not examined yet, because no round needed them."""

    def __init__(self, ready: ReadySet, table: RowTable, size: int) -> None:
        self.size = size
        self._ready = ready
        self._table = table
        self._heads = ReadySet()
        self._end = 0
        self._num_ready = np.zeros(0, dtype=np.int32)  # of the unit whose first row this is
        self._chained = np.zeros(0, dtype=np.int32)

    def first(self, count: int | None = None) -> list[list[int]]:
        """The indexes of the first groups; none if there are fewer. None: all."""
        wanted = self._table.size if count is None else count
        while self._end < self._table.size and self._heads.count < wanted:
            self._examine_more()
        if count is not None and self._heads.count < count:
            return []
        rows = self._heads.first(wanted)[:, None] + np.arange(self.size)
        groups: list[list[int]] = self._table.column("index")[rows].tolist()
        return groups

    def _examine_more(self) -> None:
        rows = self._ready.first(_STEP, self._end)
        self._end = int(rows[-1]) + 1 if len(rows) == _STEP else self._table.size
        missing = self._end - len(self._chained)
        if missing > 0:
            more = np.zeros(max(missing, len(self._chained)), dtype=np.int32)
            self._num_ready = np.concatenate([self._num_ready, more])
            self._chained = np.concatenate([self._chained, more + _NOT_WHOLE])
        self._count(rows, 1)

    def changed(self, rows: Rows, present: bool) -> None:
        """These rows, ascending, are ready now, or not any more."""
        self._count(rows[: rows.searchsorted(self._end)], 1 if present else -1)

    def _count(self, rows: Rows, sign: int) -> None:
        numbers, offsets = self._table.column("put_number"), self._table.column("put_offset")
        lengths = self._table.column("put_size")[rows].clip(1, self.size)
        within = offsets[rows] % lengths
        heads = np.maximum(rows - within, 0)
        # The first sample of a unit may be gone, and another unit may have its row.
        known = (numbers[heads] == numbers[rows]) & (offsets[heads] + within == offsets[rows])
        heads, lengths = heads[known], lengths[known]
        if not len(heads):
            return
        starts = np.concatenate([[0], (heads[1:] != heads[:-1]).nonzero()[0] + 1])
        counts = np.diff(starts, append=len(heads))
        heads, lengths = heads[starts], lengths[starts]
        before = self._num_ready[heads]
        self._num_ready[heads] = after = before + sign * counts
        turned = (before == lengths) | (after == lengths)
        is_group = lengths == self.size
        self._change(heads[turned & is_group], sign > 0)
        self._chain(heads[turned & ~is_group].tolist())

    def _change(self, heads: Rows, present: bool) -> None:
        if present:
            self._heads.add(heads)
        else:
            self._heads.discard(heads)

    def _chain(self, heads: list[int]) -> None:
        """Chain small puts anew from each of these on, until what follows is as it was."""
        column, groups = self._table.column, dict[int, bool]()
        index, offset, put_size = column("index"), column("put_offset"), column("put_size")
        for row in heads:
            chain = self._before(row)
            while row < self._end and offset[row] == 0 and (length := max(int(put_size[row]), 1)) < self.size:
                chain = chain + length if chain + length <= self.size else length
                chain = chain % self.size if self._num_ready[row] == length else _NOT_WHOLE
                was, self._chained[row] = int(self._chained[row]), chain
                if was == chain:
                    break
                if 0 in (was, chain):
                    groups[row + length - self.size] = chain == 0
                row += length
                if row >= self._end or index[row] != index[row - 1] + 1:
                    break
                chain = max(chain, 0)
        for present in (False, True) if groups else ():
            found = [head for head, is_made in groups.items() if is_made is present]
            self._change(np.array(found, dtype=np.intp), present)

    def _before(self, row: int) -> int:
        """The number of samples in the chain that this row's put may continue."""
        index, number = self._table.column("index"), self._table.column("put_number")
        head = row - 1 - int(self._table.column("put_offset")[row - 1])
        continues = head >= 0 and index[row] == index[row - 1] + 1 and number[head] == number[row - 1]
        return max(int(self._chained[head]), 0) if continues else 0
