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
from bisect import bisect_left
from collections.abc import Sequence

from transfer_queue.errors import InvalidRequestError

# (sum, number of items, first item, items): the order of sets. No two have the same first item, which breaks ties.
_Set = tuple[float, int, int, list[int]]
# Negated, so that the smallest key is joined next: (spread, and sum, count and first item of the largest set).
_Key = tuple[float, float, int, int]
# The sets are ascending, or at least a heap with the smallest on top.
_State = tuple[_Key, list[_Set]]

_EMPTY: _Set = (0, 0, -1, [])


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
    singles: list[_Set] = [(values[item], 1, item, [item]) for item in order]
    states = _rows(singles, k_partitions) if equal_size else _full_states(singles, k_partitions)
    while len(states) > 1:
        _join_top_two(states)
    sets = states[0][1] if states else [_EMPTY] * k_partitions
    return [sorted(items) for *_, items in sorted(sets, reverse=True)]


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


def _rows(singles: list[_Set], k: int) -> list[_State]:
    """Start from states of k neighbours each, so that every set of a state has the same number of items."""
    rows = [_row(singles[at : at + k], k) for at in range(0, len(singles), k)]
    heapq.heapify(rows)
    return rows


def _full_states(singles: list[_Set], k: int) -> list[_State]:
    """Start from one item per state, until all items are in states of k sets."""
    heap: list[_State] = []
    at = 0
    while at < len(singles):
        if heap and heap[0][0] < _single(singles[at]):
            start, at = at, _add_items(heap, singles, at)
            if at == start:
                _join_top_two(heap)
            continue
        end = min(at + k, len(singles))
        if heap:  # items that are joined before a full state's turn
            end = bisect_left(singles, heap[0][0], at, end, key=_single)
        heapq.heappush(heap, _row(singles[at:end], k))
        at = end
    return heap


def _add_items(heap: list[_State], singles: list[_Set], at: int) -> int:
    """Add single items to the top state while those are the two to join. Returns which item is next."""
    key, sets = heapq.heappop(heap)
    rival: _Key = heap[0][0] if heap else (1, 0, 0, 0)
    top = (-key[1], -key[2], -key[3])
    while at < len(singles) and key < _single(singles[at]) < rival:
        value, _, item, _ = singles[at]
        low, count, first, items = sets[0]
        items.append(item)
        grown = (low + value, count + 1, first, items)
        heapq.heapreplace(sets, grown)
        top = max(top, grown[:3])
        key = _key(sets[0], top)
        at += 1
    heapq.heappush(heap, (key, sets))
    return at


def _join_top_two(heap: list[_State]) -> None:
    first = heapq.heappop(heap)[1]
    heapq.heapreplace(heap, _joined(first, heap[0][1]))


def _joined(into: list[_Set], other: list[_Set]) -> _State:
    sets: list[_Set] = []
    for one, two in zip(sorted(into), sorted(other, reverse=True), strict=True):
        more, fewer = (one[3], two[3]) if one[1] >= two[1] else (two[3], one[3])
        more += fewer
        sets.append((one[0] + two[0], one[1] + two[1], one[2] if one[1] else two[2], more))
    sets.sort()
    return _key(sets[0], sets[-1][:3]), sets


def _row(singles: list[_Set], k: int) -> _State:
    sets = [_EMPTY] * (k - len(singles)) + singles[::-1]
    return _key(sets[0], sets[-1][:3]), sets


def _single(item: _Set) -> _Key:
    return _key(_EMPTY, item[:3])


def _key(lowest: _Set, top: tuple[float, int, int]) -> _Key:
    return lowest[0] - top[0], -top[0], -top[1], -top[2]
