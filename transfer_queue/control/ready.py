# SPDX-License-Identifier: Apache-2.0
"""Samples ready for one (task, fields): kept by each publish, read in O(batch), never rescanned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import Rows

_BLOCK = 1024


class ReadySet:
    """A bit per row and a count per block of rows, so that finding the first ready ones skips empty blocks."""

    def __init__(self, size: int = 0) -> None:
        self._mask = np.zeros(max(_BLOCK, size), dtype=np.bool_)
        self._counts = np.zeros(len(self._mask) // _BLOCK + 1, dtype=np.int64)
        self.count = 0
        self._hidden: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Rows become ready; those that are already, stay so. A row named twice counts once."""
        if not len(rows):
            return
        top = int(rows.max()) + 1
        if top > len(self._mask):
            self._grow(top)
        self._change(rows[~self._mask[rows]], present=True)

    def discard(self, rows: Rows) -> None:
        """Rows are no longer ready; those that weren't, stay so."""
        rows = rows[rows < len(self._mask)]
        self._change(rows[self._mask[rows]], present=False)

    def hide(self, rows: Rows) -> None:
        """Discard rows until ``unhide``: promised to one rank while the others' shares are drawn."""
        hidden = rows[self.contains(rows)]
        self._change(hidden, present=False)
        self._hidden.append(hidden)

    def unhide(self) -> None:
        for rows in self._hidden:
            self._change(rows, present=True)
        self._hidden.clear()

    def _change(self, rows: Rows, present: bool) -> None:
        if not len(rows):
            return
        if (rows[1:] <= rows[:-1]).any():
            rows = np.unique(rows)
        self._mask[rows] = present
        first, last = int(rows[0]) // _BLOCK, int(rows[-1]) // _BLOCK
        sign = 1 if present else -1
        if first == last:
            self._counts[first] += sign * len(rows)
        else:
            self._counts[first : last + 1] += sign * np.bincount(rows // _BLOCK - first)
        self.count += sign * len(rows)

    def _grow(self, needed: int) -> None:
        size = max(needed, 2 * len(self._mask))
        mask = np.zeros(size, dtype=np.bool_)
        mask[: len(self._mask)] = self._mask
        counts = np.zeros(size // _BLOCK + 1, dtype=np.int64)
        counts[: len(self._counts)] = self._counts
        self._mask, self._counts = mask, counts

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of the rows are ready."""
        inside = rows < len(self._mask)
        return inside & self._mask[np.where(inside, rows, 0)]

    def blocks(self) -> Iterator[Rows]:
        """Ready rows, ascending, a block at a time."""
        for block in np.flatnonzero(self._counts):
            start = int(block) * _BLOCK
            yield np.flatnonzero(self._mask[start : start + _BLOCK]) + start


class ReadyView(Sequence[int]):
    """What a sampler sees: the global indexes that are ready, ascending. Cheap at its front.

    Valid while the sampler runs.
    """

    def __init__(self, ready: ReadySet, index_column: npt.NDArray[np.int64]) -> None:
        self._ready = ready
        self._index = index_column

    def __len__(self) -> int:
        return self._ready.count

    def _blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        for rows in self._ready.blocks():
            yield self._index[rows]

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks():
            yield from block.tolist()

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            start, stop, step = position.indices(len(self))
            if step < 0:
                return list(self)[position]
            return self._first(stop)[start::step]
        wanted = position + len(self) if position < 0 else position
        if not 0 <= wanted < len(self):
            raise IndexError(f"position {position} of {len(self)} ready samples")
        return self._first(wanted + 1)[wanted]

    def _first(self, count: int) -> list[int]:
        found: list[int] = []
        for block in self._blocks():
            if len(found) >= count:
                break
            found.extend(block[: count - len(found)].tolist())
        return found
