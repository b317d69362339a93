# SPDX-License-Identifier: Apache-2.0
"""Leases of groups, the slots that admit them, and the version that trains: what the partitions of a plane share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Final

from transfer_queue.calls import Call, Calls, Holding, Until, Wait
from transfer_queue.control.group_record import Group
from transfer_queue.control.groups import Groups
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


Reader = tuple[int, Hashable]
"""(serial of the partition, rank, or the client of a reader without one)"""


@dataclass(slots=True, eq=False)
class HeldLease:
    """``parts``: those that it has not closed. ``since``: when it was granted. ``renewed``: when its worker last said
    that work goes on.
    """

    token: int
    client: str
    groups: Groups
    group: Group
    parts: list[int]
    lease_s: float
    since: float = 0.0
    renewed: float = 0.0


class Worker(Holding):
    """A session that has leases, until it ends. ``lost``: by token of leases that it may still put rows of, lease_s."""

    until = Until.SESSION
    __slots__ = ("_leases", "client", "leases", "lost", "wakes_at")

    def __init__(self, leases: Leases, client: str) -> None:
        self._leases, self.client = leases, client
        self.leases: dict[int, HeldLease] = {}
        self.lost: dict[int, float] = {}
        self.wakes_at = 0.0

    def end(self, died: bool) -> bool:
        self._leases.worker_gone(self, died)
        return False


class Trainer:
    """A task that draws groups: the slots that are taken, and what it has drawn and not trained yet.

    ``rounds``: by step, (index, its groups). ``batches``: by reader and batch, the same. ``rejected``: groups in a row;
    ``seen``: what the gate saw of them.
    """

    __slots__ = ("batches", "charged", "drawn", "last_reason", "last_step", "rejected", "rounds", "seen")

    def __init__(self) -> None:
        self.charged = self.rejected = 0
        self.last_step = -1
        self.drawn: dict[int, list[int]] = {}
        """By serial of the partition, places of drawn groups that may lie behind undrawn ones, ascending."""
        self.last_reason = ""
        self.rounds: dict[int, dict[int, Groups]] = {}
        self.batches: dict[Reader, dict[int, list[tuple[Groups, Group]]]] = {}
        self.seen: dict[str, Counter[str]] = {}

    def step(self, version: int) -> int:
        """The step for which it draws next."""
        return max(version + len(self.rounds), self.last_step + 1)

    def has_drawn(self, step: int, reader: Reader, batch: int | None, drawn: list[tuple[Groups, Group]]) -> None:
        """``batch`` None: the reader's next one."""
        self.rounds.setdefault(step, {}).update((group.index, groups) for groups, group in drawn)
        self.last_step = max(self.last_step, step)
        batches = self.batches.setdefault(reader, {})
        batches[max(batches, default=-1) + 1 if batch is None else batch] = drawn

    def take_trained(self, reader: Reader, before: int | None) -> list[tuple[Groups, Group]]:
        """What this reader was given in its batches before this one; None: in all."""
        batches = self.batches.get(reader, {})
        over = [number for number in batches if before is None or number < before]
        drawn = [each for number in over for each in batches.pop(number)]
        if not batches:
            self.batches.pop(reader, None)
        return drawn

    def gives_back(self, index: int) -> None:
        """Nobody got this group, so it is not trained."""
        self.is_over(index)
        for batches in self.batches.values():
            for number, drawn in batches.items():
                batches[number] = [(groups, group) for groups, group in drawn if group.index != index]

    def partition_gone(self, serial: int) -> None:
        self.batches = {reader: batches for reader, batches in self.batches.items() if reader[0] != serial}
        self.drawn.pop(serial, None)

    def undrawn(self, serial: int, seq: int) -> None:
        """The group of this place in the order of first leases may be drawn again."""
        if seq in self.drawn.get(serial, ()):
            self.drawn[serial].remove(seq)

    def is_over(self, index: int) -> None:
        """It has trained this group, or the group is gone."""
        for step, groups in list(self.rounds.items()):
            if groups.pop(index, None) is not None and not groups:
                del self.rounds[step]

    def rejects(self, seen: dict[str, float], reason: str) -> None:
        self.rejected += 1
        self.last_reason = reason
        for name, value in seen.items():
            counter = self.seen.setdefault(name, Counter())
            shown = f"{value:.3g}"
            counter[shown if shown in counter or len(counter) < _MOST_SEEN else "others"] += 1

    def accepts(self) -> None:
        self.rejected = 0
        self.seen.clear()


class Leases:
    """``lost``: called with a lease whose worker is gone, or silent; the reason; and whose attempt that counts as."""

    def __init__(self, calls: Calls, sampler_of: Callable[[str], BaseSampler]) -> None:
        """``sampler_of``: that of a task."""
        self.calls = calls
        self._sampler_of = sampler_of
        self.lost: Callable[[HeldLease, str, str | None], None] = _nothing
        self.next_token = self._next_seq = 1
        self._by_token: dict[int, HeldLease] = {}
        self._workers: dict[str, Worker] = {}
        self._trainers: dict[str, Trainer] = {}
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

    def trainer(self, task: str) -> Trainer:
        found = self._trainers.get(task)
        if found is None:
            found = self._trainers[task] = Trainer()
        return found

    def trainers(self) -> list[tuple[str, Trainer]]:
        """By task."""
        return list(self._trainers.items())

    def room(self, terms: Terms) -> int:
        """How many more groups of these terms may begin."""
        room = 2**31
        for task in terms.tasks:
            sampler = self.sampler(task)
            room = min(room, 0 if sampler is None else sampler.budget - self.trainer(task).charged)
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
            self.trainer(task).charged += 1

    def free(self, group: Group) -> None:
        """It was trained, or has left. One that waits for a slot may have it."""
        for task in group.terms.tasks:
            trainer = self.trainer(task)
            trainer.charged -= group.is_charged
            trainer.is_over(group.index)
        if group.is_charged:
            group.is_charged = False
            self.calls.waits.wake_first((LEASES,))

    # ---- versions ----

    def version_of(self, partition: str) -> int | None:
        """The version that trains there; None: nobody has said so."""
        own = [version for name, version in self.versions.items() if is_of(partition, name)]
        return max(own, default=None)

    def step_of(self, task: str, partition: str) -> int | None:
        """The step for which the task draws next."""
        version = self.version_of(partition)
        return None if version is None else self.trainer(task).step(version)

    def advance(self, partition: str, version: int, resumed: bool) -> None:
        known = self.versions.get(partition)
        if known is not None and version < known and not resumed:
            raise GroupStateError(
                f"version {known} trains in {partition!r}, so version {version} can't be next. A trainer that goes on "
                f"from an earlier checkpoint says so: advance(..., resumed=True)."
            )
        self.went_back |= known is not None and version < known
        if resumed:
            for trainer in self._trainers.values():
                trainer.last_step = min(trainer.last_step, version - 1)
        self.versions[partition] = version

    # ---- leases ----

    def next_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    def restored(self, versions: Mapping[str, int], next_token: int, last_seq: int) -> None:
        """Other groups are there now. Leases of those before are lost, and their tokens are never used again."""
        for lease in list(self._by_token.values()):
            self.abort(lease)
        self._trainers.clear()
        self.versions = dict(versions)
        self.next_token = max(self.next_token, next_token + _TOKENS_SINCE_A_SAVE)
        self._next_seq = max(self._next_seq, last_seq + 1)

    def get(self, token: int) -> HeldLease | None:
        return self._by_token.get(token)

    def grant(self, call: Call, groups: Groups, group: Group, parts: list[int], lease_s: float) -> HeldLease:
        """These parts are the session's."""
        lease = HeldLease(self.next_token, call.client, groups, group, parts, lease_s, since=self.calls.now)
        self.next_token += 1
        self._hold(call, lease)
        return lease

    def revive(self, call: Call, token: int, groups: Groups, group: Group) -> None:
        """A lease that was lost goes on with what nobody else has of its parts: its worker has put rows."""
        lease_s = self.worker(call).lost.pop(token, None)
        parts = [part for part in group.open_parts() if group.tokens.get(part) == token]
        if lease_s is not None and parts:
            self._hold(call, HeldLease(token, call.client, groups, group, parts, lease_s))

    def _hold(self, call: Call, lease: HeldLease) -> None:
        self._by_token[lease.token], lease.renewed = lease, self.calls.now
        worker = self.worker(call)
        worker.leases[lease.token] = lease
        self._watch(worker, self.calls.now + lease.lease_s)

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
        late = [lease for lease in worker.leases.values() if lease.renewed + lease.lease_s <= now]
        for lease, blame in _blamed_once(late):
            text = f"worker {worker.client!r} did not renew its lease for {lease.lease_s:.4g} s"
            self.lose(lease, text, blame)
        if worker.leases:
            self._watch(worker, min(lease.renewed + lease.lease_s for lease in worker.leases.values()))

    def end(self, lease: HeldLease) -> bool:
        """It is over. Returns whether it was not before."""
        if self._by_token.pop(lease.token, None) is None:
            return False
        worker = self._workers.get(lease.client)
        if worker is not None:
            worker.leases.pop(lease.token, None)
        return True

    def abort(self, lease: HeldLease) -> bool:
        """Its work is of no use any more, and its worker hears of it. Returns whether it was not over before."""
        was_held = self.end(lease)
        if was_held:
            self.calls.waits.wake((_RENEWALS, lease.client))
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
        worker = self._workers.get(lease.client)
        if worker is not None:
            worker.lost[lease.token] = lease.lease_s
            if len(worker.lost) > _MOST_LOST:
                del worker.lost[next(iter(worker.lost))]
        self.lost(lease, reason, blame)

    def worker_gone(self, worker: Worker, died: bool) -> None:
        """Its session has ended."""
        del self._workers[worker.client]
        how = "died" if died else "left without closing it"
        # Its timer may still come, and must not find them: a later session may have the same name.
        leases, worker.leases = list(worker.leases.values()), {}
        for lease, blame in _blamed_once(leases):
            if self.end(lease):
                self.lost(lease, f"worker {worker.client!r} {how}", blame)

    def holders(self, group: Group) -> list[HeldLease]:
        """Who works on it."""
        return [lease for token in set(group.tokens.values()) if (lease := self._by_token.get(token)) is not None
                and lease.group is group]  # fmt: skip

    def oldest_of(self, groups: Groups) -> HeldLease | None:
        """Of the leases of these groups, the one that was granted first."""
        own = (lease for lease in self._by_token.values() if lease.groups is groups)
        return min(own, key=attrgetter("token"), default=None)

    def free_parts(self, group: Group) -> list[int]:
        """Open parts that no lease has."""
        if not group.tokens:
            return group.open_parts()
        return [part for part in group.open_parts() if self._by_token.get(group.tokens.get(part, 0)) is None]

    def renew(self, call: Call, request: RenewLeases) -> Reply | Wait:
        """Work on these leases goes on. It waits for one that is lost."""
        for token in request.leases:
            lease = self._by_token.get(token)
            if lease is not None and lease.client == call.client:
                lease.renewed = self.calls.now

        def answer(wait: Wait | None, has_turn: bool) -> Reply | None:
            own = self._workers.get(call.client)
            lost = [token for token in request.leases if own is None or token not in own.leases]
            return Done(request.id, lost) if lost or (wait is not None and wait.late) else None

        return answer(None, True) or Wait((_RENEWALS, call.client), self.calls.now + request.wait_s, answer)

    # ---- ends of partitions ----

    def partition_ended(self, name: str) -> None:
        """A sealed partition with groups was cleared."""
        self._ended.pop(name, None)
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


def queue_of(partitions: list[str], where: str | None, by_part: bool) -> tuple[Hashable, ...]:
    """The wait queue of such leases."""
    return (LEASES, tuple(partitions), where, by_part)


def _nothing(lease: HeldLease, reason: str, blame: str | None) -> None:
    """There is no plane."""
