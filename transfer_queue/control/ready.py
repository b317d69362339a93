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

    def add(self, rows: Rows) -> None:
        """Rows become ready; those that are already, stay so."""
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

    def _change(self, rows: Rows, present: bool) -> None:
        rows = np.unique(rows)
        self._mask[rows] = present
        blocks, counts = np.unique(rows // _BLOCK, return_counts=True)
        self._counts[blocks] += counts if present else -counts
        self.count += len(rows) if present else -len(rows)

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

    Valid while the sampler runs; ``without`` are rows already promised to other ranks of the same round.
    """

    def __init__(self, ready: ReadySet, index_column: npt.NDArray[np.int64], without: Rows | None = None) -> None:
        self._ready = ready
        self._index = index_column
        self._without = without if without is not None and len(without) else None
        self._len = ready.count - (0 if self._without is None else int(ready.contains(self._without).sum()))

    def __len__(self) -> int:
        return self._len

    def _blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        for rows in self._ready.blocks():
            kept = rows if self._without is None else rows[~np.isin(rows, self._without)]
            if len(kept):
                yield self._index[kept]

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks():
            yield from block.tolist()

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            start, stop, step = position.indices(self._len)
            if step < 0:
                return list(self)[position]
            return self._first(stop)[start::step]
        wanted = position + self._len if position < 0 else position
        if not 0 <= wanted < self._len:
            raise IndexError(f"position {position} of {self._len} ready samples")
        return self._first(wanted + 1)[wanted]

    def _first(self, count: int) -> list[int]:
        found: list[int] = []
        for block in self._blocks():
            if len(found) >= count:
                break
            found.extend(block[: count - len(found)].tolist())
        return found
