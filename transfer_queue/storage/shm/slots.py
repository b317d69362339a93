# SPDX-License-Identifier: Apache-2.0
"""Maps indexes to slots of a unit's tables, in pages of 64 that are recycled once they hold no values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.pieces import IntArray
from transfer_queue.storage.selection import as_run

_PAGE_BITS = 6  # at most the run that routing keeps together, so a full page costs one dictionary entry
_PAGE = 1 << _PAGE_BITS


class Slots:
    """Indexes only grow, so an array over all of them would grow forever. Pages bound the tables by what is kept."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pages: dict[int, int] = {}
        self._free: list[int] = []
        self._names: list[int] = []
        self._kept: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """The length that tables need: one more than the largest slot used so far, rounded up."""
        return len(self._kept) << _PAGE_BITS

    def find(self, indexes: IntArray) -> IntArray:
        """The slot of each index, -1 if its page is unknown."""
        name = _one_page(indexes)
        if name is not None:
            page = self._pages.get(name, -1)
            return indexes - ((name - page) << _PAGE_BITS) if page >= 0 else np.full(len(indexes), -1, np.int64)
        names = indexes >> _PAGE_BITS
        if len(names) and isinstance(as_run(indexes), slice):  # most puts
            own = range(names.item(0), names.item(-1) + 1)
            pages = self._pages_of(own)[names - own.start]
        elif 4 * len(cuts := np.flatnonzero(names[1:] != names[:-1]) + 1) < len(names):  # mostly neighbours
            first = np.concatenate((np.zeros(1, np.int64), cuts))
            pages = np.repeat(self._pages_of(names[first].tolist()), np.diff(np.append(first, len(names))))
        else:
            names, inverse = np.unique(names, return_inverse=True)
            pages = self._pages_of(names.tolist())[inverse]
        return np.where(pages < 0, -1, (pages << _PAGE_BITS) | (indexes & (_PAGE - 1)))

    def _pages_of(self, names: Iterable[int]) -> IntArray:
        return np.array([self._pages.get(name, -1) for name in names], np.int64)

    def find_one(self, index: int) -> int:
        """``find`` for a single index."""
        page = self._pages.get(index >> _PAGE_BITS, -1)
        return -1 if page < 0 else (page << _PAGE_BITS) | (index & (_PAGE - 1))

    def claim(self, indexes: IntArray) -> None:
        """Give these indexes slots. ``keep`` must follow, because a page without values would never be released."""
        one = _one_page(indexes)
        for name in dict.fromkeys((indexes >> _PAGE_BITS).tolist()) if one is None else (one,):
            if name not in self._pages:
                self._pages[name] = page = self._free.pop() if self._free else len(self._names)
                self._names[page : page + 1] = [name]
                if page >= len(self._kept):
                    self._kept = np.append(self._kept, np.zeros(max(16, len(self._kept)), np.int64))

    def keep(self, slots: IntArray) -> None:
        """Add one value to each of these slots."""
        page = _one_page(slots)
        if page is None:
            np.add.at(self._kept, slots >> _PAGE_BITS, 1)
        else:
            self._kept[page] += len(slots)

    def release(self, slots: IntArray) -> None:
        """Remove one value from each of these slots; pages without any are recycled."""
        pages = slots >> _PAGE_BITS
        np.subtract.at(self._kept, pages, 1)
        for page in np.unique(pages[self._kept[pages] == 0]).tolist():
            del self._pages[self._names[page]]
            self._free.append(page)
        if not self._pages:
            self._reset()


def _one_page(numbers: IntArray) -> int | None:
    """The page that all numbers are on; None if there are several pages or no numbers."""
    if len(numbers) == 1:  # most small requests
        return int(numbers[0]) >> _PAGE_BITS
    if len(numbers) == 0:
        return None
    pages = numbers >> _PAGE_BITS
    return int(pages[0]) if (pages == pages[0]).all() else None
