# SPDX-License-Identifier: Apache-2.0
"""Wait: what a call waits for. Waits stand in queues, and are examined when something wakes them, or at their deadline.

A wait that has its turn may take what it waits for. In a queue without sizes that is only the first one; the others are
examined, too, when they are woken. In a queue with sizes it is each one that fits. One that fits may overtake others,
but what has overtaken a wait never exceeds its own size. So a large one is admitted once twice its size is free.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from transfer_queue.protocol import Reply

Name = tuple[Hashable, ...]
"""The name of a queue. Names that users choose are parts of it, never joined into one string. A beginning of it names a
group of queues."""


class More:
    """The answer is not known yet, because its work takes more turns."""


MORE: Final = More()
Decide = Callable[["Wait", bool], "Reply | More | None"]
"""(the wait, whether it has its turn) -> the answer; None: not yet. A late wait must get an answer, or ``MORE``."""
_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Wait:
    """One call's wait."""

    queue: Name
    deadline: float
    """In the caller's monotonic seconds. At that time it is examined as late."""
    answer: Decide
    order: float = 0.0
    """Waits with a lower one stand in front."""
    size: int = 0
    """How much room it takes, in a queue with sizes."""
    keys: tuple[Hashable, ...] = ()
    """What else wakes it."""
    due: bool = False
    """It is to be examined at once."""
    rank: tuple[float, int] = field(init=False)
    """Its place in the queue: by order, and then by arrival."""
    since: float = field(init=False, default=0.0)
    overtaken: int = field(init=False, default=0)
    """The size of all that has overtaken it."""
    late: bool = field(init=False, default=False)
    """Its deadline is over."""
    done: bool = field(init=False, default=False)
    owner: Any = field(init=False, default=None)
    """The call."""


class _Queue:
    """Waits by rank. ``room``: how much is free, for a queue with sizes.

    Those that are due are examined as they were woken. One that is woken again is behind all others that are due, so
    that the last ones get their turn whatever happens meanwhile.
    """

    def __init__(self, room: Callable[[], int] | None, make_room: Callable[[], bool] | None) -> None:
        self.waits: list[Wait] = []
        self.room = room
        self._make_room = make_room
        self._due: deque[Wait] = deque()

    def add_due(self, wait: Wait) -> None:
        if not wait.due:
            wait.due = True
            self._due.append(wait)

    def first_changed(self) -> None:
        """Another wait may have its turn now. With sizes, that is looked for whenever nothing is due."""
        if self.room is None:
            self.add_due(self.waits[0])

    def next(self) -> tuple[Wait, bool] | None:
        """The next wait to be examined, and whether it has its turn."""
        while self._due:
            wait = self._due.popleft()
            if not wait.done:
                wait.due = False
                return wait, self.room is None and self.waits[0] is wait
        return None if self.room is None else self._fitting(self.room)

    def _fitting(self, room: Callable[[], int]) -> tuple[Wait, bool] | None:
        allowed = room()  # what is free, and may still overtake all of those in front
        in_front: list[Wait] = []
        for wait in self.waits:
            if wait.size <= allowed:
                for other in in_front:
                    other.overtaken += wait.size
                return wait, True
            in_front.append(wait)
            allowed = min(allowed, wait.size - wait.overtaken)
        if self._make_room is not None and self._make_room():
            return self._fitting(room)
        return None


class Waits:
    """All waits of a server process: by queue, by key, by deadline."""

    def __init__(self) -> None:
        self._queues: dict[Name, _Queue] = {}
        self._rooms: dict[Name, tuple[Callable[[], int], Callable[[], bool] | None]] = {}
        self.occupied: dict[Name, dict[Name, None]] = {}
        """The queues in which something waits, by each beginning of their names."""
        self._by_key: dict[Hashable, dict[Wait, None]] = {}
        self._deadlines: list[tuple[float, int, Wait]] = []
        self.active: dict[Name, None] = {}
        """Queues in which something may be due; none of them: all waits are at rest."""
        self._arrivals = itertools.count(1)
        self.count = 0
        """The number of all waits."""

    def __iter__(self) -> Iterator[Wait]:
        for queue in self._queues.values():
            yield from queue.waits

    def with_sizes(self, queue: Name, room: Callable[[], int], make_room: Callable[[], bool] | None = None) -> None:
        """This queue admits what fits into the room that is free. Where nothing does, ``make_room`` may help."""
        self._rooms[queue] = room, make_room

    def park(self, owner: Any, wait: Wait, now: float) -> None:
        """The call ``owner`` waits."""
        wait.owner, wait.since, wait.rank = owner, now, (wait.order, next(self._arrivals))
        queue = self._queues.get(wait.queue)
        if queue is None:
            queue = self._queues[wait.queue] = _Queue(*self._rooms.get(wait.queue, (None, None)))
            for end in range(1, len(wait.queue) + 1):
                self.occupied.setdefault(wait.queue[:end], {})[wait.queue] = None
        insort(queue.waits, wait, key=_rank)
        for key in wait.keys:
            self._by_key.setdefault(key, {})[wait] = None
        self.count += 1
        heapq.heappush(self._deadlines, (wait.deadline, wait.rank[1], wait))
        if len(self._deadlines) > 64 + 2 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        if wait.due:
            wait.due = False
            self.examine(wait)
        if queue.room is not None:
            self.active[wait.queue] = None

    def remove(self, wait: Wait) -> None:
        """It was answered, or is not needed any more. The next one of its queue may have its turn."""
        wait.done = True
        self.count -= 1
        queue = self._queues[wait.queue]
        at = bisect_left(queue.waits, wait.rank, key=_rank)
        del queue.waits[at]
        for key in wait.keys:
            self._drop(self._by_key, key, wait)
        if not queue.waits:
            del self._queues[wait.queue]
            self.active.pop(wait.queue, None)
            for end in range(1, len(wait.queue) + 1):
                self._drop(self.occupied, wait.queue[:end], wait.queue)
        elif at == 0 or queue.room is not None:
            queue.first_changed()
            self.active[wait.queue] = None

    @staticmethod
    def _drop(table: dict[Any, dict[Any, None]], key: Hashable, member: Any) -> None:
        members = table[key]
        del members[member]
        if not members:
            del table[key]

    # ---- waking ----

    def wake_first(self, group: Name) -> None:
        """In the queues whose names begin so, those that may have their turn are examined."""
        for name in self.occupied.get(group, ()):
            self._queues[name].first_changed()
            self.active[name] = None

    def wake(self, group: Name) -> None:
        """All waits of the queues whose names begin so are examined."""
        for name in self.occupied.get(group, ()):
            for wait in self._queues[name].waits:
                self.examine(wait)

    def wake_key(self, key: Hashable) -> None:
        """The waits with this key are examined."""
        for wait in self._by_key.get(key, ()):
            self.examine(wait)

    def examine(self, wait: Wait) -> None:
        """This wait is examined in this turn or a later one."""
        self._queues[wait.queue].add_due(wait)
        self.active[wait.queue] = None

    def resize(self, wait: Wait, size: int) -> None:
        """It takes so much room now."""
        wait.size = size
        self.active[wait.queue] = None

    def decide(self, waits: Iterable[Wait], answer: Decide) -> None:
        """They get this answer."""
        for wait in waits:
            wait.answer = answer
            self.examine(wait)

    def wake_late(self, now: float) -> None:
        """Waits past their deadline are examined as late."""
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            wait = heapq.heappop(self._deadlines)[2]
            if not wait.done:
                wait.late = True
                self.examine(wait)

    def next(self) -> tuple[Wait, bool] | None:
        """The next wait to be examined, of each queue in turn, and whether it has its turn. None: all are at rest."""
        while self.active:
            name = next(iter(self.active))
            del self.active[name]
            queue = self._queues.get(name)
            found = None if queue is None else queue.next()
            if found is not None:
                self.active[name] = None
                return found
        return None

    # ---- questions ----

    def may_be_due(self, now: float) -> bool:
        """Whether ``next`` may find a wait."""
        return bool(self.active or (self._deadlines and self._deadlines[0][0] <= now))

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def of(self, group: Name) -> list[Wait]:
        """The waits of the queues whose names begin so, queue by queue."""
        return [wait for name in self.occupied.get(group, ()) for wait in self._queues[name].waits]

    def is_first(self, wait: Wait) -> bool:
        """Whether none is in front of it."""
        return self._queues[wait.queue].waits[0] is wait

    def would_be_first(self, queue: Name, order: float) -> bool:
        """Whether a new wait of this order would have its turn at once."""
        found = self._queues.get(queue)
        return found is None or found.waits[0].rank[0] > order
