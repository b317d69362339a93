# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for room: which may go next, so that a large one is neither starved nor holds up all others.

They go in order of arrival. One that fits may overtake those that don't, as long as what has overtaken each of them is
together no more than its own size. So a large request waits for at most twice its size to come free.
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
    """Items are told apart by identity."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting[T]] = {}  # by identity, in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, size: int, deadline: float) -> None:
        """The last in the queue; it must not be there yet."""
        self._waiting[id(item)] = _Waiting(item, size, deadline)

    def resize(self, item: T, size: int) -> None:
        """The item needs another amount of room now."""
        self._waiting[id(item)].size = size

    def remove(self, item: T) -> bool:
        """The item waits no longer. Returns whether it did."""
        return self._waiting.pop(id(item), None) is not None

    def items(self) -> list[T]:
        """In order of arrival."""
        return [each.item for each in self._waiting.values()]

    def admit(self, free: int) -> list[T]:
        """Remove and return those that may go now, in order; together they are no larger than ``free``."""
        admitted: list[T] = []
        in_front: list[_Waiting[T]] = []
        allowed = free  # what may still overtake all of those in front
        for key, each in list(self._waiting.items()):
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
        """Remove and return those whose deadline has come, in order of arrival."""
        late = [key for key, each in self._waiting.items() if each.deadline <= now]
        return [self._waiting.pop(key).item for key in late]

    def next_deadline(self) -> float | None:
        return min((each.deadline for each in self._waiting.values()), default=None)
