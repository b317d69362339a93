# SPDX-License-Identifier: Apache-2.0
"""Free ranges of an address space: the smallest that fits is taken, and neighbours merge. Numbers only."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeList:
    """No two ranges touch."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), ascending
        self._sizes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self.total = 0

    def __len__(self) -> int:
        return len(self._by_size)

    def ranges(self) -> list[tuple[int, int]]:
        """(start, size) by address."""
        return sorted(self._sizes.items())

    def take(self, size: int) -> int | None:
        """Return the start of a range of this size, which is no longer free; None if none is large enough."""
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Make a range free; it must not overlap a free one."""
        end = start + size
        before = self._starts.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._sizes:
            end += self._remove(end)
        self._insert(start, end - start)

    def take_largest(self, total: int) -> list[tuple[int, int]]:
        """Take this much free space in total from as few ranges as possible: (start, size), the largest first."""
        taken = []
        while total:
            found, start = self._by_size[-1]
            size = min(found, total)
            self._remove(start)
            if found > size:
                self._insert(start + size, found - size)
            taken.append((start, size))
            total -= size
        return taken

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._sizes[start], self._starts[start + size] = size, start
        self.total += size

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.total -= size
        return size
