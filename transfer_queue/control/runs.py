# SPDX-License-Identifier: Apache-2.0
"""A set of whole numbers stored as runs: its size depends on the number of gaps, not of members."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


class Runs:
    """Numbers from 0 on, as disjoint runs [start, stop), ascending and not touching."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        """The number of runs."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def below(self, number: int) -> int:
        """One more than the largest member below ``number``; 0 if there is none."""
        at = bisect_right(self._starts, number - 1) - 1
        return 0 if at < 0 else min(number, self._stops[at])

    def end(self) -> int:
        """One more than the largest member; 0 if there is none."""
        return self._stops[-1] if self._stops else 0

    @property
    def edges(self) -> tuple[list[int], list[int]]:
        """(starts, stops), as ``of_edges`` takes them."""
        return list(self._starts), list(self._stops)

    @classmethod
    def of_edges(cls, starts: Sequence[int], stops: Sequence[int]) -> Runs:
        """Raises ValueError unless the runs are disjoint, ascending and not touching."""
        edges = [edge for run in zip(starts, stops, strict=True) for edge in run]
        if edges and (edges[0] < 0 or any(left >= right for left, right in pairwise(edges))):
            raise ValueError(f"runs of numbers must ascend, got {edges[:10]}")
        runs = cls()
        runs._starts, runs._stops = list(starts), list(stops)
        return runs

    def add(self, number: int) -> None:
        at = bisect_right(self._starts, number)
        if at and number < self._stops[at - 1]:
            return
        joins_left = at > 0 and self._stops[at - 1] == number
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = number + 1
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
