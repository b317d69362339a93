# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for room in a storage unit, in the order they came: one that fits never overtakes an earlier one,
or large ones would starve."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transfer_queue.storage.pieces import IntArray
from transfer_queue.storage.simple.messages import Hold
from transfer_queue.transport.base import Envelope, Outgoing


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """``nbytes`` is what it needs, less what values of these fields of these indexes take now: it replaces them.

    ``hold`` or ``attempt`` names it to its client.
    """

    envelope: Envelope
    indexes: IntArray
    fields: Sequence[str]
    nbytes: int
    since: float
    deadline: float
    carry_out: Callable[[], list[Outgoing]]
    hold: Hold | None = None
    attempt: int = 0


class Parking:
    """First in, first out."""

    def __init__(self) -> None:
        self._parked: deque[Parked] = deque()

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked)

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def nbytes(self) -> int:
        return sum(parked.nbytes for parked in self._parked)

    def add(self, parked: Parked) -> None:
        self._parked.append(parked)

    def first(self) -> Parked | None:
        return self._parked[0] if self._parked else None

    def remove(self, parked: Parked) -> None:
        self._parked.remove(parked)

    def forget(self, which: Callable[[Parked], bool]) -> None:
        self._parked = deque(parked for parked in self._parked if not which(parked))

    def take_late(self, now: float) -> list[Parked]:
        """Those whose deadline has passed, no longer parked."""
        late = [parked for parked in self._parked if parked.deadline <= now]
        if late:
            self.forget(lambda parked: parked.deadline <= now)
        return late

    def next_deadline(self) -> float | None:
        return min(parked.deadline for parked in self._parked) if self._parked else None
