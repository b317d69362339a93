# SPDX-License-Identifier: Apache-2.0
"""Balanced partitioning: splits items into k sets of nearly equal sum, by largest differencing."""
# The method (Karmarkar and Karp, en.wikipedia.org/wiki/Largest_differencing_method) keeps states of k disjoint sets.
# It repeatedly joins the two states with the widest spread of sums: the largest set of one with the smallest of the
# other.
# If each state starts with one item, two shortcuts avoid many states with mostly empty sets and give the same result.
# First, while only single items are on top, joining them makes one state of the next k items.
# Second, joining a full state with a single item adds that item to the state's smallest set.

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import repeat

from transfer_queue.errors import InvalidRequestError

# (sum, number of items, first item): the order of sets. The first item breaks ties and names the set.
_Set = tuple[float, int, int]
# Negated, so that the smallest key is joined next: (spread, and sum, count and first item of the largest set).
_Key = tuple[float, float, int, int]
# The sets are ascending, or at least a heap with the smallest on top.
_State = tuple[_Key, list[_Set]]

_EMPTY: _Set = (0, 0, -1)


class PartitionInputError(InvalidRequestError, AssertionError):
    """Items that can't be split as asked."""


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split items into sets with sums that are close together.

    Args:
        seqlen_list: [N] weights, finite and >= 0.
        k_partitions: Number of sets.
        equal_size: Every set gets N / k_partitions items.
    Returns:
        Positions into ``seqlen_list``, ascending within a set; sets by descending sum. Deterministic.
        Fewer items than sets leave sets empty.
    Raises:
        PartitionInputError: Is a ValueError and an AssertionError.
    """
    values = _checked(seqlen_list, k_partitions, equal_size)
    if k_partitions == 1:
        return [list(range(len(values)))]
    # Equal values are ordered by descending position, as ties are everywhere else.
    order = sorted(range(len(values)), key=values.__getitem__)[::-1]
    joining = _Joining([values[position] for position in order], order, k_partitions)
    return joining.members(joining.rows() if equal_size else joining.items())


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """``karmarkar_karp`` without empty sets: fewer items than sets raise PartitionInputError."""
    if len(seqlen_list) < k_partitions:
        raise PartitionInputError(
            f"{len(seqlen_list)} items can't fill {k_partitions} partitions: give more items, or split less."
        )
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def _checked(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[float]:
    # tolist() makes plain numbers from an array or tensor; its own scalars are slow and may overflow.
    values: list[float] = seqlen_list.tolist() if hasattr(seqlen_list, "tolist") else list(seqlen_list)
    if k_partitions < 1:
        raise PartitionInputError(f"k_partitions must be at least 1, got {k_partitions}.")
    if equal_size and len(values) % k_partitions:
        raise PartitionInputError(
            f"{len(values)} items can't be split into {k_partitions} partitions of equal size: "
            f"use a multiple of {k_partitions} items, or equal_size=False."
        )
    try:
        lowest, total = min(values, default=0), sum(values)
    except TypeError as error:
        raise PartitionInputError(f"seqlen_list must hold numbers only ({error}).") from error
    if lowest < 0 or not math.isfinite(total):
        raise PartitionInputError(f"weights must be finite and >= 0; the lowest is {lowest}, their sum {total}.")
    return values


class _Joining:
    """One run of the method, over items in descending order."""

    def __init__(self, values: list[float], order: list[int], k: int) -> None:
        self._values = values
        self._order = order
        self._k = k
        self._heap: list[_State] = []
        # By first item: the set that a set was joined to. The last slot is for the empty set, with item -1.
        self._joined_to = list(range(len(values) + 1))

    def rows(self) -> list[_Set]:
        """Start from states of k neighbours each, so that every set of a state has the same number of items."""
        heap = self._heap = [self._row(at, at + self._k) for at in range(0, len(self._values), self._k)]
        heapq.heapify(heap)
        while len(heap) > 1:
            self._join_top_two()
        return heap[0][1] if heap else [_EMPTY] * self._k

    def items(self) -> list[_Set]:
        """Start from one item per state. Single items wait in ``_values``, full states in ``_heap``."""
        heap, at = self._heap, 0
        while at < len(self._values):
            if not heap or self._single(at) < heap[0][0]:
                end = self._end_of_row(at)
                row = self._row(at, end)
                if end - at == self._k:
                    heapq.heappush(heap, row)
                elif heap:
                    heapq.heapreplace(heap, self._joined(row[1], heap[0][1]))
                else:
                    return row[1]
                at = end
            elif added := self._add_items(at):
                at += added
            else:
                self._join_top_two()
        while len(heap) > 1:
            self._join_top_two()
        return heap[0][1] if heap else [_EMPTY] * self._k

    def members(self, sets: list[_Set]) -> list[list[int]]:
        """The items of each set, ascending; sets by descending sum."""
        joined_to = self._joined_to
        members: dict[int, list[int]] = {first: [] for _, _, first in sorted(sets, reverse=True) if first >= 0}
        for item in range(len(self._values)):
            first = item
            while joined_to[first] != first:
                # Path halving shortens later look-ups: near-constant on average.
                joined_to[first] = first = joined_to[joined_to[first]]
            members[first].append(item)
        return [*members.values(), *([] for _ in range(self._k - len(members)))]

    def _end_of_row(self, start: int) -> int:
        """The end of the single items from ``start`` on that are joined before a full state's turn."""
        end = min(start + self._k, len(self._values))
        if not self._heap or self._values[end - 1] > -self._heap[0][0][0]:
            return end
        return next(at for at in range(start + 1, end + 1) if at == end or self._single(at) > self._heap[0][0])

    def _add_items(self, start: int) -> int:
        """Add single items to the top state while those are the two to join. Returns how many."""
        heap, values = self._heap, self._values
        key, sets = heapq.heappop(heap)
        rival = heap[0][0] if heap else (1, 0, 0, 0)
        rival_spread = -rival[0]
        top = (-key[1], -key[2], -key[3])
        at = start
        while at < len(values):
            value = values[at]
            low_sum, low_count, low_first = sets[0]
            # Spreads decide unless they tie; only then are whole keys compared.
            if not top[0] - low_sum > value > rival_spread and not _key(sets[0], top) < self._single(at) < rival:
                break
            self._joined_to[self._order[at]] = low_first
            grown = (low_sum + value, low_count + 1, low_first)
            heapq.heapreplace(sets, grown)
            top = max(top, grown)
            at += 1
        heapq.heappush(heap, (_key(sets[0], top), sets))
        return at - start

    def _join_top_two(self) -> None:
        first = heapq.heappop(self._heap)[1]
        heapq.heapreplace(self._heap, self._joined(first, self._heap[0][1]))

    def _joined(self, into: list[_Set], other: list[_Set]) -> _State:
        joined_to = self._joined_to
        sets = []
        into.sort()
        other.sort(reverse=True)
        for (a_sum, a_count, a_first), (b_sum, b_count, b_first) in zip(into, other, strict=True):
            first = a_first if a_count else b_first
            joined_to[b_first] = first
            sets.append((a_sum + b_sum, a_count + b_count, first))
        sets.sort()
        return _key(sets[0], sets[-1]), sets

    def _row(self, start: int, end: int) -> _State:
        sets = [_EMPTY] * (self._k - end + start)
        sets += zip(self._values[start:end][::-1], repeat(1), self._order[start:end][::-1])
        return _key(sets[0], sets[-1]), sets

    def _single(self, at: int) -> _Key:
        return -self._values[at], -self._values[at], -1, -self._order[at]


def _key(lowest: _Set, top: _Set) -> _Key:
    return lowest[0] - top[0], -top[0], -top[1], -top[2]
