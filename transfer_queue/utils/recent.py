# SPDX-License-Identifier: Apache-2.0
"""The sizes of the latest few in a series, and how much to make ready for the next one."""

from __future__ import annotations

_REMEMBERED = 32
_SPARE = 1.25  # sizes that vary seldom go beyond the largest of the latest by more
_MOST_OF_MEAN = 3  # what the others don't need is waste, so one that is far larger than they must ask for itself


class RecentSizes:
    """Any thread may use it: at worst two that note at the same time count as one."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()

    def __len__(self) -> int:
        """So many are remembered, at most 32."""
        return len(self._sizes)

    def note(self, size: int) -> None:
        """There was one of this size."""
        if self._sizes.count(size) < _REMEMBERED:
            self._sizes = (*self._sizes[1 - _REMEMBERED :], size)

    @property
    def room(self) -> int:
        """Exactly their size where all were alike; else a quarter more than the largest, at most three times the mean.

        There must have been one.
        """
        sizes = self._sizes
        if sizes.count(sizes[0]) == len(sizes):
            return sizes[0]
        return min(int(_SPARE * max(sizes)), _MOST_OF_MEAN * sum(sizes) // len(sizes))
