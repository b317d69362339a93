# SPDX-License-Identifier: Apache-2.0
"""Parked requests: which client waits, for what, until when. Within one task a later, smaller fetch never overtakes."""

# Deadlines are the caller's monotonic seconds, passed in: this file must not read a clock.

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Parked:
    """One waiting request. ``rank`` orders requests of one wait queue: lower first, then by arrival."""

    client: str
    request: Any
    since: float
    deadline: float
    queue: str
    rank: tuple[float, int]
    done: bool = False


class Waiters:
    """Parked requests by wait queue (a partition's name, or a special queue), and the earliest deadline of all."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, Parked]] = {}  # by arrival
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._by_call: dict[tuple[str, int], Parked] = {}
        self._arrivals = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(self, client: str, request: Any, now: float, deadline: float, queue: str, order: float) -> Parked:
        """Add a request; ``queue`` returns it until ``remove``."""
        arrival = next(self._arrivals)
        parked = Parked(client, request, now, deadline, queue, (order, arrival))
        self._queues.setdefault(queue, {})[arrival] = parked
        self._by_call[client, request.id] = parked
        self._count += 1
        heapq.heappush(self._deadlines, (deadline, arrival, parked))
        if len(self._deadlines) > 64 + 2 * self._count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        return parked

    def find(self, client: str, call: int) -> Parked | None:
        """This call of the client, if it is parked."""
        return self._by_call.get((client, call))

    def of(self, client: str) -> list[Parked]:
        """All parked requests of this client."""
        return [parked for (name, _), parked in self._by_call.items() if name == client]

    def waiting_in(self, queue: str) -> list[Parked]:
        """The requests of a wait queue in order; a copy."""
        waiting = self._queues.get(queue)
        return sorted(waiting.values(), key=lambda parked: parked.rank) if waiting else []

    def first_come(self, queue: str) -> Parked | None:
        """The request that has waited longest in a wait queue."""
        return next(iter(self._queues.get(queue, {}).values()), None)

    def is_first(self, queue: str, task: str, rank: tuple[float, float]) -> bool:
        """Return whether no request of the task waits in front of this rank."""
        waiting = self._queues.get(queue)
        return not waiting or all(other.rank >= rank or other.request.task != task for other in waiting.values())

    def queues(self) -> list[str]:
        """The wait queues that are not empty."""
        return list(self._queues)

    def remove(self, parked: Parked) -> None:
        """Remove a request that was answered or cancelled."""
        if parked.done:
            return
        parked.done = True
        self._count -= 1
        del self._by_call[parked.client, parked.request.id]
        waiting = self._queues[parked.queue]
        del waiting[parked.rank[1]]
        if not waiting:
            del self._queues[parked.queue]

    def remove_queue(self, queue: str) -> list[Parked]:
        """Remove and return every request of a wait queue, in order of arrival."""
        found = list(self._queues.get(queue, {}).values())
        for parked in found:
            self.remove(parked)
        return found

    def expired(self, now: float) -> list[Parked]:
        """Remove and return the requests past their deadline, in order within each wait queue."""
        due: list[Parked] = []
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            parked = heapq.heappop(self._deadlines)[2]
            if not parked.done:
                self.remove(parked)
                due.append(parked)
        return sorted(due, key=lambda parked: parked.rank)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def all(self) -> list[Parked]:
        return [parked for waiting in self._queues.values() for parked in waiting.values()]
