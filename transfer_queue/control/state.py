# SPDX-License-Identifier: Apache-2.0
"""The state that the plane's verbs share: partitions, tasks, sessions; and parked requests in their wait queues."""

# Deadlines are the caller's monotonic seconds, passed in: this file must not read a clock.

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transfer_queue.config import FullConfig
from transfer_queue.control.draw import Tasks
from transfer_queue.control.dropped import Dropped
from transfer_queue.control.filtered import TurnBudget
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import IndexAllocator
from transfer_queue.control.run_table import RunTable
from transfer_queue.control.sessions import Calls, Freezes, Producers
from transfer_queue.control.units import UnitTable
from transfer_queue.errors import UnknownPartitionError, to_wire
from transfer_queue.protocol import Failed, Fetch, Indexes, Reply
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.utils.wait_queue import WaitQueue

_SLICE = 10_000
"""Keys and tags freed at a time, which takes a few milliseconds."""


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: Reply


def reply_or_error(call: int, answer: Callable[[], Reply | None]) -> Reply | None:
    """An error of one request is the answer to that request only."""
    try:
        return answer()
    except Exception as error:  # the plane's guard: neither user code nor a bug of ours may lose the replies to others
        return Failed(call, *to_wire(error))


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """The plane's settings.

    ``capacity``: most samples stored at once, None unlimited. ``preallocate``: the fewest samples a new partition makes
    room for.
    ``producer_grace_s``: how long a dead producer may be replaced before fetches of its fields fail.
    """

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    sampler_modules: tuple[str, ...] = ()
    capacity: int | None = None
    preallocate: int = 1
    producer_grace_s: float = 5.0


def plane_config(config: FullConfig, sampler: Any, preallocate: int) -> PlaneConfig:
    """The plane's part of a queue's configuration. ``sampler``: a name, a spec, an instance or a class."""
    controller = config.controller
    return PlaneConfig(
        sampler=resolve(sampler, controller.sampler_modules),
        sampler_modules=tuple(controller.sampler_modules),
        capacity=config.backend.SimpleStorage.total_storage_size,
        preallocate=preallocate,
        producer_grace_s=controller.producer_grace_s,
    )


Line = tuple[str, str | None]
"""A task and a filter, whose fetches don't overtake each other; of writers, their partition."""
NO_LINE: Line = ("", None)
LAST = (math.inf, math.inf)
"""The rank behind all others."""


@dataclass(slots=True, eq=False)
class Parked:
    """One waiting request. ``rank`` orders requests of one wait queue: lower first, then by arrival."""

    client: str
    request: Any
    since: float
    deadline: float
    queue: str
    rank: tuple[float, int]
    line: Line = NO_LINE
    done: bool = False


_rank = attrgetter("rank")


class _Pass(NamedTuple):
    """A pass over the requests of a line: what it began with, how far it came, and whether it is to go on."""

    stamp: object
    last: tuple[float, float]
    was_interrupted: bool


def line_of(fetch: Fetch) -> Line:
    return fetch.task, fetch.where


class Waiters:
    """Parked requests by wait queue (a partition's name, or a special queue), and the earliest deadline of all."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[Line, list[Parked]]] = {}  # by wait queue and line, in order of rank
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._by_call: dict[str, dict[int, Parked]] = {}  # by client and call
        self._looked: dict[tuple[str, Line], _Pass] = {}
        self._arrivals = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(
        self, client: str, request: Any, now: float, deadline: float, queue: str, order: float, line: Line = NO_LINE
    ) -> Parked:
        """Add a request; ``waiting_in`` returns it until ``remove``."""
        parked = Parked(client, request, now, deadline, queue, (order, next(self._arrivals)), line)
        self._add(parked)
        if len(self._deadlines) > 64 + 2 * self._count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        return parked

    def _add(self, parked: Parked) -> None:
        line = self._queues.setdefault(parked.queue, {}).setdefault(parked.line, [])
        insort(line, parked, key=_rank)
        self._by_call.setdefault(parked.client, {})[parked.request.id] = parked
        self._count += 1
        heapq.heappush(self._deadlines, (parked.deadline, parked.rank[1], parked))

    def find(self, client: str, call: int) -> Parked | None:
        """This call of the client, if it is parked."""
        own = self._by_call.get(client)
        return None if own is None else own.get(call)

    def of(self, client: str) -> list[Parked]:
        """All parked requests of this client."""
        return list(self._by_call.get(client, {}).values())

    def waiting_in(self, queue: str) -> list[Parked]:
        """The requests of a wait queue in order; a copy."""
        lines = self._queues.get(queue)
        return sorted(itertools.chain(*lines.values()), key=_rank) if lines else []

    def lines_of(self, queue: str) -> list[Line]:
        """The lines of a wait queue, in the order of their first requests."""
        lines = self._queues.get(queue)
        return sorted(lines, key=lambda line: lines[line][0].rank) if lines else []

    def first_of(self, queue: str, line: Line = NO_LINE) -> Parked | None:
        """The request in front of a line."""
        lines = self._queues.get(queue)
        waiting = lines.get(line) if lines else None
        return waiting[0] if waiting else None

    def is_first(self, queue: str, line: Line, rank: tuple[float, float]) -> bool:
        """Return whether no request of the line waits in front of this rank."""
        first = self.first_of(queue, line)
        return first is None or first.rank >= rank

    def unexamined(self, first: Parked, stamp: object) -> tuple[object, list[Parked]]:
        """The stamp that this pass began with, and the requests behind the first of a line that it has to examine now.

        A pass that was interrupted goes on to the end whatever changed, so that the last ones get their turn.
        """
        waiting = self._queues[first.queue][first.line]
        began, last, was_interrupted = self._looked.get((first.queue, first.line), (stamp, first.rank, False))
        if began != stamp and not was_interrupted:
            began, last = stamp, first.rank
        return began, waiting[bisect_right(waiting, max(last, first.rank), key=_rank) :]

    def unexamine(self, parked: Parked) -> None:
        """This request was parked without a look at it."""
        looked = self._looked.get((parked.queue, parked.line))
        if looked is not None:
            before = (parked.rank[0], parked.rank[1] - 1)
            self._looked[parked.queue, parked.line] = looked._replace(last=min(looked.last, before))

    def examined(self, first: Parked, stamp: object) -> None:
        """The requests of this line can't be answered before the stamp changes."""
        self._looked[first.queue, first.line] = _Pass(stamp, LAST, False)

    def interrupted(self, first: Parked, stamp: object, last: tuple[float, float]) -> None:
        """Those up to ``last`` were examined in a pass that began with this stamp; it goes on in another turn."""
        self._looked[first.queue, first.line] = _Pass(stamp, last, True)

    def queues(self) -> list[str]:
        """The wait queues that are not empty."""
        return list(self._queues)

    def remove(self, parked: Parked) -> None:
        """Remove a request that was answered or cancelled."""
        if parked.done:
            return
        parked.done = True
        self._count -= 1
        own, lines = self._by_call[parked.client], self._queues[parked.queue]
        del own[parked.request.id]
        if not own:
            del self._by_call[parked.client]
        waiting = lines[parked.line]
        del waiting[bisect_left(waiting, parked.rank, key=_rank)]
        if not waiting:
            del lines[parked.line]
            self._looked.pop((parked.queue, parked.line), None)
        if not lines:
            del self._queues[parked.queue]

    def put_back(self, parked: Parked) -> None:
        """Let a request that ``expired`` returned wait on, in its old place."""
        parked.done = False
        self._add(parked)

    def remove_queue(self, queue: str) -> list[Parked]:
        """Remove and return every request of a wait queue, in order of arrival."""
        found = sorted(self.waiting_in(queue), key=lambda parked: parked.rank[1])
        for parked in found:
            self.remove(parked)
        return found

    def expired(self, now: float, most: int) -> list[Parked]:
        """Remove and return up to ``most`` requests past their deadline, in order within each wait queue."""
        due: list[Parked] = []
        while len(due) < most and self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
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
        return [parked for lines in self._queues.values() for line in lines.values() for parked in line]


_KEYS = "\0keys "


def keys_queue(partition: str) -> str:
    """The wait queue of requests that wait for keys of this partition."""
    return _KEYS + partition


class PlaneState:
    """The verbs change it. After a request, only dirty partitions are examined again."""

    def __init__(self, config: PlaneConfig) -> None:
        self.config = config
        self.partitions: dict[str, Partition] = {}
        self.tasks = Tasks(config.sampler, config.sampler_modules)
        self.allocator = IndexAllocator()
        self.waiters = Waiters()
        self.writers: WaitQueue[Parked] = WaitQueue()
        """The parked requests that need room for samples."""
        self.writers_saw: tuple[object, dict[str, object]] = (None, {})
        """The room and their number, and what they depended on in their partitions, when they were last examined."""
        self.writers_left = False
        """Some of them may be admitted in the next turn."""
        self.producers = Producers(config.producer_grace_s)
        self.dirty: dict[str, str | None] = {}
        self.upheavals = 0
        """Changes that may decide any parked fetch."""
        self.cut_off: list[Parked] = []
        self.unused: list[Indexes] = []
        """Values to be deleted: they may be in storage, and belong to no sample any more."""
        self._discarded: list[Partition] = []
        self.incarnations = 0
        self.freezes = Freezes()
        self.snapshots: set[object] = set()
        """Those of which slices are still to be made."""
        self.calls = Calls()
        self.units = UnitTable()
        self.runs = RunTable()
        self.dropped = Dropped()
        self.budget = TurnBudget()

    def mark_dirty(self, partition: str, task: str | None = None) -> None:
        """Mark a partition as dirty: a parked fetch of this task (None: of any) may be decided now.

        So may requests that wait for its keys.
        """
        self.dirty[partition] = task if self.dirty.get(partition, task) == task else None

    def mark_all_dirty(self, task: str | None = None) -> None:
        """Examine all parked fetches again, of this task or of all tasks."""
        self.upheavals += 1
        for queue in self.waiters.queues():
            partition = queue.removeprefix(_KEYS)
            if not partition.startswith("\0"):
                self.mark_dirty(partition, task)

    def get(self, name: str) -> Partition:
        """Raises UnknownPartitionError that names the existing ones."""
        partition = self.partitions.get(name)
        if partition is None:
            known = ", ".join(map(repr, list(self.partitions)[:10])) or "none yet"
            raise UnknownPartitionError(f"partition {name!r} not found; it was cleared or never used. Known: {known}.")
        return partition

    def create(self, name: str, num_samples: int | None = None) -> Partition:
        """Create a partition; the name must be free."""
        self.incarnations += 1
        partition = Partition(name, self.incarnations, self.allocator, self.config.preallocate, num_samples)
        self.partitions[name] = partition
        return partition

    def find(self, name: str, serial: int) -> Partition | None:
        """The partition with this serial; None if it was cleared or replaced since."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.serial == serial else None

    def get_or_create(self, name: str) -> Partition:
        return self.partitions.get(name) or self.create(name)

    def discard(self, partition: Partition) -> None:
        """Free a deleted partition. Many keys and tags are freed in slices, so that no client waits for it."""
        if partition.table.size > _SLICE and partition.has_objects():
            self._discarded.append(partition)

    def tidy(self) -> None:
        """Free a slice of the partitions that are gone."""
        if not self.is_tidy and not self._discarded[-1].shrink(_SLICE):
            self._discarded.pop()

    @property
    def is_tidy(self) -> bool:
        return not self._discarded or bool(self.snapshots)  # these may still read what is gone

    def delete(self, indexes: Indexes) -> None:
        """Delete the values of these samples, none of which is in a partition now."""
        if len(indexes):
            self.unused.append(indexes)

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes are in some partition."""
        found = np.zeros(len(indexes), dtype=np.bool_)
        if not len(indexes):
            return found
        first, last = int(indexes.min()), int(indexes.max())
        for partition in self.partitions.values():
            if partition.table.spans(first, last):
                found |= partition.table.find(indexes)[1]
        return found

    def room(self) -> int | None:
        """The number of samples that may still be inserted; None: unlimited."""
        return None if self.config.capacity is None else self.config.capacity - self.allocator.num_used
