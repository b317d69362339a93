# SPDX-License-Identifier: Apache-2.0
"""Leases of groups, the slots that admit them, and the version that trains: what the partitions of a plane share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Final

from transfer_queue.calls import Alarm, Call, Calls
from transfer_queue.control.group_record import Drawn, Group, HeldLease, Worker
from transfer_queue.errors import GroupStateError
from transfer_queue.protocol import Terms
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.group_sampler import GroupSampler

LEASES = "leases"
"""A wait queue for each (partitions, filter, by part): what is first there gets the next group."""
RENEWALS = "renewals"
"""A wait queue for each session: it is to hear of leases that are lost."""
_MOST_SEEN = 32
_MOST_ENDED = 1024
STARVED_AFTER: Final = 10
"""A task's fetches fail after so many steps of groups were rejected in a row."""


@dataclass(slots=True, eq=False)
class Trainer:
    """A task that draws groups: the slots that are taken, and what it has drawn and not trained yet.

    ``batches``: by partition and reader. ``last_step``: the last one that it has trained, as far as it has said.
    ``rejected``: groups in a row; ``seen``: what the gate saw of them.
    """

    charged: int = 0
    rejected: int = 0
    last_step: int = -1
    batches: dict[tuple[str, Hashable], list[Drawn]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def open_batches(self) -> list[Drawn]:
        """Those of which it has not trained all."""
        return [batch for own in self.batches.values() for batch in own]

    def has_drawn(self, partition: str, reader: Hashable, number: int | None, step: int, own: list[Group]) -> Drawn:
        """``number`` None: the reader's next batch."""
        batches = self.batches.setdefault((partition, reader), [])
        number = (batches[-1].number + 1 if batches else 0) if number is None else number
        batches.append(Drawn(partition, reader, number, step, {group.index: group for group in own}))
        return batches[-1]

    def has_trained(self, batch: Drawn | None) -> None:
        """Its step is done. ``batch`` None: that is known."""
        if batch is not None:
            self.last_step = max(self.last_step, batch.step)

    def is_over(self, group: Group, batch: Drawn | None) -> None:
        """It has trained this group of the batch, or the group is gone, or nobody got it. Batches end with their last.

        ``batch`` None: it has trained the group before.
        """
        if batch is None:
            return
        del batch.groups[group.index]
        if not batch.groups:
            batches = self.batches[batch.partition, batch.reader]
            batches.remove(batch)
            if not batches:
                del self.batches[batch.partition, batch.reader]

    def rejects(self, seen: Iterable[str]) -> None:
        self.rejected += 1
        for text in seen:
            self.seen[text if text in self.seen or len(self.seen) < _MOST_SEEN else "others"] += 1

    def accepts(self) -> None:
        self.rejected = 0
        self.seen.clear()


class Leases:
    def __init__(self, calls: Calls, sampler_of: Callable[[str], BaseSampler]) -> None:
        """``sampler_of``: that of a task."""
        self.calls = calls
        self._sampler_of = sampler_of
        self.lost: Callable[[HeldLease, str, str | None], None]
        """Called with a lease whose worker is gone, or silent; the reason; and whose attempt that counts as."""
        self.next_token = 1
        self.workers: dict[str, Worker] = {}
        """By session."""
        self.trainers: defaultdict[str, Trainer] = defaultdict(Trainer)
        """By task."""
        self.versions: dict[str, int] = {}
        """By name or pattern of partitions."""
        self.went_back = False
        """Whether a version was ever lower than one before it, so that older groups may have higher ones."""
        self._ended: dict[str, None] = {}

    # ---- budgets ----

    def sampler(self, task: str) -> GroupSampler | None:
        """None: the task does not draw groups, or is not registered."""
        sampler = self._sampler_of(task)
        return sampler if isinstance(sampler, GroupSampler) else None

    def room(self, terms: Terms) -> int:
        """How many more groups of these terms may begin."""
        room = 2**31
        for task in terms.tasks:
            sampler = self.sampler(task)
            room = min(room, 0 if sampler is None else sampler.budget - self.trainers[task].charged)
        return max(room, 0)

    def check_budgets(self, tasks: Iterable[str]) -> None:
        """Raises GroupStateError for tasks that would wait for each other for ever."""
        samplers = {task: sampler for task in tasks if (sampler := self.sampler(task)) is not None}
        for task, own in samplers.items():
            for other, its in samplers.items():
                if own.budget < its.groups:
                    raise GroupStateError(
                        f"task {other!r} trains {its.groups} groups per step, and task {task!r}, which trains the same "
                        f"groups, admits {own.budget} at a time: neither would ever step. Raise its groups or ahead."
                    )

    def charge(self, group: Group, by: int = 1) -> None:
        """Work on it begins; -1: its slot is free."""
        if group.is_charged != (by > 0):
            group.is_charged = by > 0
            for task in group.terms.tasks:
                self.trainers[task].charged += by

    # ---- versions ----

    def version_of(self, partition: str) -> int | None:
        """The version that trains there; None: nobody has said so."""
        own = [version for name, version in self.versions.items() if is_of(partition, name)]
        return max(own, default=None)

    def step_of(self, task: str, partition: str) -> int | None:
        """The step for which the task draws next."""
        version, trainer = self.version_of(partition), self.trainers[task]
        if version is None:
            return None
        steps = {batch.step for batch in trainer.open_batches()}
        return max(version + len(steps), max([*steps, trainer.last_step]) + 1)

    def advance(self, partition: str, version: int, resumed: bool) -> None:
        others = [each for each in self.versions if is_of(each, partition) or is_of(partition, each)]
        later = [each for each in others if version < self.versions[each]]
        if later and not resumed:
            raise GroupStateError(
                f"version {self.versions[later[0]]} trains in {later[0]!r}, so version {version} can't be next in "
                f"{partition!r}. A trainer that goes on from an earlier checkpoint says so: advance(..., resumed=True)."
            )
        self.went_back |= bool(later)
        self.versions |= dict.fromkeys(later, version)
        if resumed:
            for trainer in self.trainers.values():
                trainer.last_step = min(trainer.last_step, version - 1)
        self.versions[partition] = version

    # ---- leases ----

    def restored(self, versions: Mapping[str, int], next_token: int) -> None:
        """Other groups are there now. Leases of those before are lost, and their tokens are below ``next_token``."""
        for lease in self.all_held():
            self.abort(lease)
        self.trainers.clear()
        self.versions = dict(versions)
        self.next_token = max(self.next_token, next_token)

    def all_held(self) -> list[HeldLease]:
        return [lease for worker in self.workers.values() for lease in worker.leases.values()]

    def oldest_of(self, partition: str) -> HeldLease | None:
        """Of the leases there, the one that was granted first."""
        own = (lease for lease in self.all_held() if lease.partition == partition)
        return min(own, key=attrgetter("token"), default=None)

    def grant(self, call: Call, partition: str, group: Group, parts: list[int], lease_s: float) -> HeldLease:
        """These parts are the session's."""
        worker = self.workers.get(call.client)
        if worker is None:
            worker = self.workers[call.client] = Worker(call.client, self.worker_gone)
            worker.alarm = Alarm(self.calls, partial(self._look_at, worker))
            self.calls.hold(call, worker)
        lease = HeldLease(self.next_token, worker, partition, group, lease_s, since=self.calls.now)
        self.next_token += 1
        group.holders.update(dict.fromkeys(parts, lease))
        self._hold(lease)
        return lease

    def revive(self, lease: HeldLease) -> None:
        """A lease that was lost goes on with what nobody else has of its parts: its worker has put rows."""
        if self.workers.get(lease.worker.client) is lease.worker:
            self._hold(lease)

    def _hold(self, lease: HeldLease) -> None:
        lease.worker.leases[lease.token] = lease
        lease.is_held, lease.renewed = True, self.calls.now
        lease.worker.alarm.set(self.calls.now + lease.lease_s)

    def _look_at(self, worker: Worker) -> None:
        """Leases that were not renewed in time are lost."""
        late = [lease for lease in worker.leases.values() if lease.renewed + lease.lease_s <= self.calls.now]
        self._lose(late, lambda lease: f"worker {worker.client!r} did not renew its lease for {lease.lease_s:.4g} s")
        if worker.leases:
            worker.alarm.set(min(lease.renewed + lease.lease_s for lease in worker.leases.values()))

    def worker_gone(self, worker: Worker, died: bool) -> None:
        """Its session has ended."""
        del self.workers[worker.client]
        how = "died" if died else "left without closing it"
        self._lose(list(worker.leases.values()), lambda lease: f"worker {worker.client!r} {how}")

    def _lose(self, leases: list[HeldLease], why: Callable[[HeldLease], str]) -> None:
        """Their parts are for others. They may still be closed while nobody has them.

        One worker is lost once for each of its groups, however many parts it had leased.
        """
        blamed = set[int]()
        for lease in leases:
            if self.abort(lease):
                self.lost(lease, why(lease), None if lease.group.index in blamed else "worker")
            blamed.add(lease.group.index)

    def end(self, lease: HeldLease) -> bool:
        """It is over. Returns whether it was not before."""
        lease.is_held = False
        return lease.worker.leases.pop(lease.token, None) is not None

    def abort(self, lease: HeldLease) -> bool:
        """Its work is of no use any more, and its worker hears of it. Returns whether it was not over before."""
        was_held = self.end(lease)
        if was_held:
            self.calls.waits.wake((RENEWALS, lease.worker.client))
        return was_held

    def abort_all(self, group: Group) -> None:
        """Work on this group is of no use any more."""
        for lease in group.leases():
            self.abort(lease)

    def dismiss(self, group: Group) -> None:
        """The group goes: its slot is free, and nobody works on it."""
        self.abort_all(group)
        self.charge(group, by=-1)
        for task, batch in group.drawn.items():
            self.trainers[task].is_over(group, batch)

    # ---- ends of partitions ----

    def partition_ended(self, name: str) -> None:
        """A sealed partition with groups was cleared."""
        self._ended[name] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, name: str) -> bool:
        """Whether such a partition was there, by name or pattern."""
        return name in self._ended or (is_pattern(name) and any(is_of(each, name) for each in self._ended))

    def partition_made(self, name: str) -> None:
        self._ended.pop(name, None)


def is_pattern(name: str) -> bool:
    """Whether it may match several partitions."""
    return any(character in name for character in "*?[")


def is_of(partition: str, name: str) -> bool:
    """Whether a partition has this name, or matches this pattern."""
    return partition == name or fnmatchcase(partition, name)
