# SPDX-License-Identifier: Apache-2.0
"""How the rows of a batch are cut into micro-batches: by tokens, and anew where some of the rows have left. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, compress, pairwise


def starts_within(lengths: Sequence[float], most: float) -> list[int]:
    """Where micro-batches of consecutive rows begin, if each takes as many rows as fit."""
    starts, tokens = [0], 0.0
    for row, length in enumerate(lengths):
        if tokens + length > most and row > starts[-1]:
            starts.append(row)
            tokens = 0.0
        tokens += length
    return starts


def refined(lengths: Sequence[float], starts: Sequence[int], count: int) -> list[int]:
    """The sizes of so many micro-batches: the longest ones that can be halved are."""
    sums, bounds = list(accumulate(lengths, initial=0.0)), [*starts, len(lengths)]
    wide: list[tuple[float, int, int]] = []

    def add(start: int, stop: int) -> None:
        if stop - start > 1:
            heappush(wide, (sums[start] - sums[stop], start, stop))  # the longest one comes first

    for part in pairwise(bounds):
        add(*part)
    while len(bounds) <= count:
        _, start, stop = heappop(wide)
        middle = (sums[start] + sums[stop]) / 2
        at = bisect_left(sums, middle, start + 1, stop - 1)
        half = at - 1 if at > start + 1 and middle - sums[at - 1] <= sums[at] - middle else at
        bounds.append(half)
        add(start, half)
        add(half, stop)
    return [stop - start for start, stop in pairwise(sorted(bounds))]


def spread(sizes: Sequence[int]) -> list[int]:
    """As many micro-batches of as many rows, none of them empty: those without a row get one of the next ones."""
    total, ends = sum(sizes), [0]
    for number, end in enumerate(accumulate(sizes), 1):
        ends.append(min(max(end, ends[-1] + 1), total - len(sizes) + number))
    return [end - start for start, end in pairwise(ends)]


def cut_of_rest(cut: Sequence[int], remains: Sequence[bool]) -> list[int]:
    """The cut of a batch of which some rows have left: each micro-batch has some of the others, if there are enough."""
    left = [sum(remains[stop - size : stop]) for size, stop in zip(cut, accumulate(cut), strict=True)]
    if all(left) or sum(left) < len(left):
        return list(cut)
    rest = list(compress(range(len(remains)), remains))
    bounds = [0, *(rest[end] for end in list(accumulate(spread(left)))[:-1]), len(remains)]
    return [stop - start for start, stop in pairwise(bounds)]
