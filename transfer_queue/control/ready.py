# SPDX-License-Identifier: Apache-2.0
"""Ready samples for one (task, fields): updated by each publish, read in O(batch), never rescanned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from transfer_queue.calls import Turn
from transfer_queue.control.rows import Rows, ascending

_BLOCK = 1024


class Follower(Protocol):
    """What keeps something up to date with a ready set."""

    def changed(self, rows: Rows, present: bool) -> None:
        """These rows, ascending and at least one, are ready now, or not any more."""


class ReadySet:
    """A bit per row. The first one that is set is remembered, so that a search passes over what was drawn."""

    def __init__(self, ready: npt.NDArray[np.bool_] | None = None) -> None:
        """``ready``: the rows that are ready from the start."""
        self._mask: npt.NDArray[np.bool_] = np.empty(0, np.bool_) if ready is None else ready.copy()
        self.count = int(np.count_nonzero(self._mask))
        self._first = 0  # no row below it is ready
        self._hidden: list[Rows] = []
        self.follower: Follower | None = None
        self.listed: list[int] | None = None
        """The indexes of all ready samples, once a reader has made this list. A change deletes it."""

    def add(self, rows: Rows) -> None:
        """Make rows ready. Ready rows stay ready, and repeated rows count once."""
        if not len(rows):
            return
        rows = ascending(rows)
        if rows[-1] >= len(self._mask):
            self._grow(int(rows[-1]) + 1)
        self._change(rows[~self._mask[rows]], present=True)

    def discard(self, rows: Rows) -> None:
        """Make rows not ready."""
        self._change(self._those_ready(rows), present=False)

    def hide(self, rows: Rows) -> None:
        """Make rows not ready until ``unhide``: they are one rank's share while the other shares are drawn."""
        hidden = self._those_ready(rows)
        self._change(hidden, present=False)
        self._hidden.append(hidden)

    def unhide(self) -> None:
        for rows in self._hidden:
            self._change(rows, present=True)
        self._hidden.clear()

    def _change(self, rows: Rows, present: bool) -> None:
        if not len(rows):
            return
        self._mask[rows] = present
        if present:
            self._first = min(self._first, int(rows[0]))
        self.count += len(rows) if present else -len(rows)
        self.listed = None
        if self.follower is not None:
            self.follower.changed(rows, present)

    def _those_ready(self, rows: Rows) -> Rows:
        rows = ascending(rows)
        if len(rows) and rows[-1] >= len(self._mask):
            rows = rows[rows < len(self._mask)]
        return rows[self._mask[rows]]

    def _grow(self, needed: int) -> None:
        mask = np.zeros(max(needed + _BLOCK, 2 * len(self._mask)), dtype=np.bool_)
        mask[: len(self._mask)] = self._mask
        self._mask = mask

    def blocks(self, start: int = 0) -> Iterator[Rows]:
        """Ready rows from ``start`` on, ascending, a block at a time."""
        at, leading = max(self._first, start), start <= self._first
        while at < len(self._mask):
            at += int(self._mask[at:].argmax())
            if not self._mask[at]:
                return
            if leading:
                self._first, leading = at, False
            yield self._mask[at : at + _BLOCK].nonzero()[0] + at
            at += _BLOCK

    def first(self, count: int, start: int = 0) -> Rows:
        """The first ready rows from ``start`` on, ascending; fewer if there are fewer."""
        found, missing = [np.empty(0, dtype=np.intp)], count
        for rows in self.blocks(start):
            found.append(rows[:missing])
            missing -= len(found[-1])
            if missing <= 0:
                break
        return np.concatenate(found)

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)] Which of these rows are ready."""
        found = np.zeros(len(rows), dtype=np.bool_)
        known = rows < len(self._mask)
        found[known] = self._mask[rows[known]]
        return found

    def all_rows(self) -> Rows:
        """Every ready row, ascending."""
        return self.first(self.count)

    def finish(self, turn: Turn) -> bool:
        """Whether it is known of all rows whether they are ready, or could be found out in this turn."""
        return True

    def check_invariants(self, rows: Rows) -> None:
        """Raise AssertionError unless these are all rows that were added; for tests."""
        assert np.array_equal(self.all_rows(), rows), "all of them are ready"
        assert self.count == len(rows), "they are counted"


class ReadyView(Sequence[int]):
    """What a sampler sees: the global indexes that are ready, ascending. Access near the front is cheap.

    It is valid while the sampler runs.
    """

    def __init__(self, ready: ReadySet, index_column: npt.NDArray[np.int64]) -> None:
        self.ready = ready
        self._index = index_column

    def __len__(self) -> int:
        return self.ready.count

    def __iter__(self) -> Iterator[int]:
        for rows in self.ready.blocks():
            yield from self._index[rows].tolist()

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            start, stop, step = position.indices(self.ready.count)
            if step < 0:
                return list(self)[position]
            several: list[int] = self._index[self.ready.first(stop)[start::step]].tolist()
            return several
        wanted = position + len(self) if position < 0 else position
        if not 0 <= wanted < len(self):
            raise IndexError(f"position {position} of {len(self)} ready samples")
        one: int = self._index[self.ready.first(wanted + 1)[wanted]].item()
        return one
