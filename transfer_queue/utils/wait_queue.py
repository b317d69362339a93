# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for room. A small one that fits may overtake a large one, but never so often that it starves."""

# Deadlines are the caller's monotonic seconds, passed in: this file must not read a clock.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    size: int
    deadline: float
    overtaken: int = 0


class WaitQueue(Generic[T]):
    """In order of arrival. What overtakes an item never adds up to more than the item's own size."""

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    @property
    def size(self) -> int:
        """What all waiting items need together."""
        return sum(entry.size for entry in self._entries)

    def add(self, item: T, size: int, deadline: float) -> None:
        """Wait behind everything that waits already."""
        self._entries.append(_Entry(item, size, deadline))

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """Remove and return the first item that fits and may go now; None when there is none."""
        for position, entry in enumerate(self._entries):
            ahead = self._entries[:position]
            if any(other.overtaken + entry.size > other.size for other in ahead):
                continue
            if fits(entry.item):
                for other in ahead:
                    other.overtaken += entry.size
                del self._entries[position]
                return entry.item
        return None

    def remove(self, which: Callable[[T], bool]) -> list[T]:
        """Remove and return every item that meets the condition."""
        removed = [entry.item for entry in self._entries if which(entry.item)]
        if removed:
            self._entries = [entry for entry in self._entries if not which(entry.item)]
        return removed

    def expired(self, now: float) -> list[T]:
        """Remove and return the items whose deadline has come."""
        late = [entry.item for entry in self._entries if entry.deadline <= now]
        if late:
            self._entries = [entry for entry in self._entries if entry.deadline > now]
        return late

    def next_deadline(self) -> float | None:
        return min((entry.deadline for entry in self._entries), default=None)
