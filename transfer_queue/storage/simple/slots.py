# SPDX-License-Identifier: Apache-2.0
"""Where an index lives in a unit's tables: index -> slot, in pages of 64, recycled when nothing of a page is kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.pieces import IntArray

_PAGE_BITS = 6  # = the run that routing keeps together, so a full run costs one dictionary entry
_PAGE = 1 << _PAGE_BITS


class Slots:
    """Indexes only grow, so an array over all of them would too; pages keep the tables as large as what is kept."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pages: dict[int, int] = {}
        self._free: list[int] = []
        self._names: list[int] = []
        self._kept: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """One more than the largest slot handed out so far, rounded up: the length tables need."""
        return len(self._kept) << _PAGE_BITS

    def find(self, indexes: IntArray) -> IntArray:
        """The slot of each index, -1 where its page is unknown."""
        names = indexes >> _PAGE_BITS
        if len(names) and (names == names[0]).all():  # one sample, or its neighbours: most small requests
            pages = np.full(len(names), self._pages.get(int(names[0]), -1), np.int64)
        else:
            names, inverse = np.unique(names, return_inverse=True)
            pages = np.array([self._pages.get(name, -1) for name in names.tolist()], np.int64)[inverse]
        return np.where(pages < 0, -1, (pages << _PAGE_BITS) | (indexes & (_PAGE - 1)))

    def claim(self, indexes: IntArray) -> None:
        """Give these indexes slots. Follow it with ``keep``: a page without values would stay for ever."""
        for name in np.unique(indexes >> _PAGE_BITS).tolist():
            if name not in self._pages:
                self._pages[name] = page = self._free.pop() if self._free else len(self._names)
                self._names[page : page + 1] = [name]
                if page >= len(self._kept):
                    self._kept = np.append(self._kept, np.zeros(max(16, len(self._kept)), np.int64))

    def keep(self, slots: IntArray) -> None:
        """One value more in each of these slots."""
        np.add.at(self._kept, slots >> _PAGE_BITS, 1)

    def release(self, slots: IntArray) -> None:
        """One value less in each of these slots; pages without any are recycled."""
        pages = slots >> _PAGE_BITS
        np.subtract.at(self._kept, pages, 1)
        for page in np.unique(pages[self._kept[pages] == 0]).tolist():
            del self._pages[self._names[page]]
            self._free.append(page)
        if not self._pages:
            self._reset()
