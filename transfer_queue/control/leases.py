# SPDX-License-Identifier: Apache-2.0
"""Leases of groups, the slots that admit them, and the version that trains: what the partitions of a plane share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Final

from transfer_queue.calls import Call, Calls, Holding, Until, Wait
from transfer_queue.control.group_record import Group
from transfer_queue.control.partition import Partition
from transfer_queue.errors import GroupStateError
from transfer_queue.protocol import Done, RenewLeases, Reply, Terms
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.group_sampler import GroupSampler

LEASES = "leases"
"""A wait queue for each (partitions, filter, by part): what is first there gets the next group."""
_RENEWALS = "renewals"
_MOST_SEEN = 32
_TOKENS_SINCE_A_SAVE = 2**32
"""More than a queue grants after it was saved."""
_MOST_ENDED = _MOST_LOST = 1024
STARVED_AFTER: Final = 10
"""A task's fetches fail after so many steps of groups were rejected in a row."""


@dataclass(slots=True, eq=False)
class HeldLease:
    """``parts``: those that it has not closed. ``since``: when it was granted. ``renewed``: when its worker last said
    that work goes on.
    """

    token: int
    worker: Worker
    partition: Partition
    group: Group
    parts: list[int]
    lease_s: float
    since: float = 0.0
    renewed: float = 0.0


class Worker(Holding):
    """A session that has leases, until it ends. ``lost``: by token, leases that it may still put rows of."""

    until = Until.SESSION
    __slots__ = ("_leases", "client", "lost", "wakes_at")

    def __init__(self, leases: Leases, client: str) -> None:
        self._leases, self.client = leases, client
        self.lost: dict[int, HeldLease] = {}
        self.wakes_at = 0.0

    def end(self, died: bool) -> bool:
        self._leases.worker_gone(self, died)
        return False


class Trainer:
    """A task that draws groups: the slots that are taken, and what it has drawn and not trained yet.

    ``rounds``: by step, the indexes of heads. ``rejected``: groups in a row; ``seen``: what the gate saw of them.
    """

    __slots__ = ("charged", "last_step", "rejected", "rounds", "seen")

    def __init__(self) -> None:
        self.charged = self.rejected = 0
        self.last_step = -1
        self.rounds: dict[int, set[int]] = {}
        self.seen: Counter[str] = Counter()

    def has_drawn(self, step: int, drawn: Iterable[int]) -> None:
        self.rounds.setdefault(step, set()).update(drawn)
        self.last_step = max(self.last_step, step)

    def is_over(self, index: int) -> None:
        """It has trained this group, or the group is gone, or nobody got it."""
        for step, drawn in list(self.rounds.items()):
            drawn.discard(index)
            if not drawn:
                del self.rounds[step]

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
        self.held: dict[int, HeldLease] = {}
        """By token."""
        self._workers: dict[str, Worker] = {}
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

    def charge(self, group: Group) -> None:
        """Work on it begins."""
        group.is_charged = True
        for task in group.terms.tasks:
            self.trainers[task].charged += 1

    def free(self, group: Group) -> None:
        """It was trained, or has left. One that waits for a slot may have it."""
        for task in group.drawn_by:
            self.trainers[task].is_over(group.index)
        if group.is_charged:
            group.is_charged = False
            for task in group.terms.tasks:
                self.trainers[task].charged -= 1
            self.calls.waits.wake_first((LEASES,))

    # ---- versions ----

    def version_of(self, partition: str) -> int | None:
        """The version that trains there; None: nobody has said so."""
        own = [version for name, version in self.versions.items() if is_of(partition, name)]
        return max(own, default=None)

    def step_of(self, task: str, partition: str) -> int | None:
        """The step for which the task draws next."""
        version, trainer = self.version_of(partition), self.trainers[task]
        return None if version is None else max(version + len(trainer.rounds), trainer.last_step + 1)

    def advance(self, partition: str, version: int, resumed: bool) -> None:
        known = self.versions.get(partition)
        if known is not None and version < known and not resumed:
            raise GroupStateError(
                f"version {known} trains in {partition!r}, so version {version} can't be next. A trainer that goes on "
                f"from an earlier checkpoint says so: advance(..., resumed=True)."
            )
        self.went_back |= known is not None and version < known
        if resumed:
            for trainer in self.trainers.values():
                trainer.last_step = min(trainer.last_step, version - 1)
        self.versions[partition] = version

    # ---- leases ----

    def restored(self, versions: Mapping[str, int], next_token: int) -> None:
        """Other groups are there now. Leases of those before are lost, and their tokens are never used again."""
        for lease in list(self.held.values()):
            self.abort(lease)
        self.trainers.clear()
        self.versions = dict(versions)
        self.next_token = max(self.next_token, next_token + _TOKENS_SINCE_A_SAVE)

    def grant(self, call: Call, partition: Partition, group: Group, parts: list[int], lease_s: float) -> HeldLease:
        """These parts are the session's."""
        worker, now = self.worker(call), self.calls.now
        lease = HeldLease(self.next_token, worker, partition, group, parts, lease_s, since=now)
        self.next_token += 1
        self._hold(lease)
        return lease

    def revive(self, call: Call, token: int) -> None:
        """A lease that was lost goes on with what nobody else has of its parts: its worker has put rows."""
        lease = self.worker(call).lost.pop(token, None)
        if lease is not None:
            own = lease.group.tokens
            lease.parts = [part for part in lease.group.open_parts() if own.get(part) == token]
            self._hold(lease)

    def _hold(self, lease: HeldLease) -> None:
        self.held[lease.token], lease.renewed = lease, self.calls.now
        self._watch(lease.worker, self.calls.now + lease.lease_s)

    def worker(self, call: Call) -> Worker:
        """The call's session."""
        worker = self._workers.get(call.client)
        if worker is None:
            worker = self._workers[call.client] = Worker(self, call.client)
            self.calls.hold(call, worker)
        return worker

    def _watch(self, worker: Worker, at: float) -> None:
        if worker.wakes_at <= self.calls.now or at < worker.wakes_at:
            worker.wakes_at = at
            self.calls.at(at, partial(self._look_at, worker))

    def _look_at(self, worker: Worker) -> None:
        """Leases that were not renewed in time are lost."""
        now = self.calls.now
        if worker.wakes_at > now:
            return
        ends = {lease: lease.renewed + lease.lease_s for lease in self._of(worker)}
        for lease, blame in _blamed_once(lease for lease, end in ends.items() if end <= now):
            text = f"worker {worker.client!r} did not renew its lease for {lease.lease_s:.4g} s"
            self.lose(lease, text, blame)
        if left := [end for end in ends.values() if end > now]:
            self._watch(worker, min(left))

    def _of(self, worker: Worker) -> list[HeldLease]:
        return [lease for lease in self.held.values() if lease.worker is worker]

    def end(self, lease: HeldLease) -> bool:
        """It is over. Returns whether it was not before."""
        return self.held.pop(lease.token, None) is not None

    def abort(self, lease: HeldLease) -> bool:
        """Its work is of no use any more, and its worker hears of it. Returns whether it was not over before."""
        was_held = self.end(lease)
        if was_held:
            self.calls.waits.wake((_RENEWALS, lease.worker.client))
        return was_held

    def abort_all(self, group: Group) -> None:
        """Work on this group is of no use any more."""
        for lease in self.holders(group):
            self.abort(lease)

    def dismiss(self, group: Group) -> None:
        """The group goes: its slot is free, and nobody works on it."""
        self.abort_all(group)
        self.free(group)

    def lose(self, lease: HeldLease, reason: str, blame: str | None) -> None:
        """Its parts are for others. It may still close them while nobody has them."""
        if not self.abort(lease):
            return
        lost = lease.worker.lost
        lost[lease.token] = lease
        if len(lost) > _MOST_LOST:
            del lost[next(iter(lost))]
        self.lost(lease, reason, blame)

    def worker_gone(self, worker: Worker, died: bool) -> None:
        """Its session has ended."""
        del self._workers[worker.client]
        how = "died" if died else "left without closing it"
        for lease, blame in _blamed_once(self._of(worker)):
            if self.end(lease):
                self.lost(lease, f"worker {worker.client!r} {how}", blame)

    def holders(self, group: Group) -> list[HeldLease]:
        """Who works on it."""
        return [lease for token in set(group.tokens.values()) if (lease := self.held.get(token)) is not None
                and lease.group is group]  # fmt: skip

    def oldest_of(self, partition: Partition) -> HeldLease | None:
        """Of the leases there, the one that was granted first."""
        own = (lease for lease in self.held.values() if lease.partition is partition)
        return min(own, key=attrgetter("token"), default=None)

    def free_parts(self, group: Group) -> list[int]:
        """Open parts that no lease has."""
        if not group.tokens:
            return group.open_parts()
        return [part for part in group.open_parts() if self.held.get(group.tokens.get(part, 0)) is None]

    def renew(self, call: Call, request: RenewLeases) -> Reply | Wait:
        """Work on these leases goes on. It waits for one that is lost."""
        worker = self._workers.get(call.client)

        def own() -> dict[int, HeldLease]:
            found = map(self.held.get, request.leases)
            return {lease.token: lease for lease in found if lease is not None and lease.worker is worker}

        for lease in own().values():
            lease.renewed = self.calls.now

        def answer(wait: Wait | None, has_turn: bool) -> Reply | None:
            held = own()
            lost = [token for token in request.leases if token not in held]
            return Done(request.id, lost) if lost or (wait is not None and wait.late) else None

        return answer(None, True) or Wait((_RENEWALS, call.client), self.calls.now + request.wait_s, answer)

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


def _blamed_once(leases: Iterable[HeldLease]) -> list[tuple[HeldLease, str | None]]:
    """One worker is lost once for each of its groups, however many parts it had leased."""
    found: dict[int, HeldLease] = {}
    return [(lease, "worker" if found.setdefault(lease.group.index, lease) is lease else None) for lease in leases]


def is_pattern(name: str) -> bool:
    """Whether it may match several partitions."""
    return any(character in name for character in "*?[")


def is_of(partition: str, name: str) -> bool:
    """Whether a partition has this name, or matches this pattern."""
    return partition == name or fnmatchcase(partition, name)
