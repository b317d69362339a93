# SPDX-License-Identifier: Apache-2.0
"""Free ranges of an address space: the smallest that fits is taken, neighbours grow together. Numbers only."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeList:
    """Every range carries the time it was last given back; a range made of several carries the latest."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), ascending
        self._sizes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self._since: dict[int, float] = {}  # start -> time
        self.total = 0

    def __len__(self) -> int:
        return len(self._by_size)

    def ranges(self) -> list[tuple[int, int]]:
        """(start, size) by address."""
        return sorted(self._sizes.items())

    def take(self, size: int) -> int | None:
        """The start of a range of this size, no longer free; None when no range is large enough."""
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        since = self._since[start]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size, since)
        return start

    def give(self, start: int, size: int, now: float = 0.0) -> None:
        """Make a range free; it must not overlap one that is."""
        end = start + size
        before = self._starts.get(start)
        if before is not None:
            now = max(now, self._since[before])
            self._remove(before)
            start = before
        if end in self._sizes:
            now = max(now, self._since[end])
            end += self._remove(end)
        self._insert(start, end - start, now)

    def take_older(self, than: float) -> list[tuple[int, int]]:
        """Take all ranges that were given back at that time or before."""
        old = [(start, self._sizes[start]) for start, since in self._since.items() if since <= than]
        for start, _ in old:
            self._remove(start)
        return old

    def _insert(self, start: int, size: int, since: float) -> None:
        insort(self._by_size, (size, start))
        self._sizes[start], self._starts[start + size], self._since[start] = size, start, since
        self.total += size

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size], self._since[start]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.total -= size
        return size
