# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for room. The order neither starves a large request nor lets it block all others.

Requests are admitted in order of arrival. One that fits may overtake those that don't fit.
What has overtaken a request never exceeds its own size in total. So it is admitted once twice its size has become free.
"""

# Sizes are samples here, bytes there. Deadlines are the caller's monotonic seconds: this file must not read a clock.

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Waiting(Generic[T]):
    item: T
    size: int
    deadline: float
    overtaken: int = 0


class WaitQueue(Generic[T]):
    """Items are distinguished by identity."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting[T]] = {}  # by identity, in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, size: int, deadline: float) -> None:
        """Add an item at the end; it must not be queued yet."""
        self._waiting[id(item)] = _Waiting(item, size, deadline)

    def resize(self, item: T, size: int) -> None:
        """Change the amount of room that the item needs."""
        self._waiting[id(item)].size = size

    def remove(self, item: T) -> bool:
        """Remove the item. Returns whether it was queued."""
        return self._waiting.pop(id(item), None) is not None

    def items(self) -> list[T]:
        """The items in order of arrival."""
        return [each.item for each in self._waiting.values()]

    def admit(self, free: int, most: int | None = None) -> list[T]:
        """Remove and return up to ``most`` items that may go now, in order; their sizes sum to at most ``free``."""
        admitted: list[T] = []
        in_front: list[_Waiting[T]] = []
        allowed = free  # what may still overtake all of those in front
        for key, each in list(self._waiting.items()):
            if len(admitted) == most:
                break
            if each.size > min(free, allowed):
                in_front.append(each)
                allowed = min(allowed, each.size - each.overtaken)
                continue
            for other in in_front:
                other.overtaken += each.size
            free, allowed = free - each.size, allowed - each.size
            del self._waiting[key]
            admitted.append(each.item)
        return admitted

    def expired(self, now: float) -> list[T]:
        """Remove and return the items past their deadline, in order of arrival."""
        late = [key for key, each in self._waiting.items() if each.deadline <= now]
        return [self._waiting.pop(key).item for key in late]

    def next_deadline(self) -> float | None:
        return min((each.deadline for each in self._waiting.values()), default=None)
