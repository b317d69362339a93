# SPDX-License-Identifier: Apache-2.0
"""A second, simpler account of groups: what each call must answer, and where each group must be after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LEFT = ("failed", "expired", "rejected", "stale")
GONE = ("done", "cleared")


@dataclass
class Own:
    """One lease. ``renewed``: when; ``parts``: those it has not closed."""

    token: int
    worker: str
    head: int
    parts: list[int]
    lease_s: float
    renewed: float


@dataclass
class Group:
    """``holder``: by part, the token of the last lease that had it. ``drawn``, ``trained``, ``acked``: tasks."""

    head: int
    terms: Any
    state: str = "waiting"
    begun: int = 0
    version: int | None = None
    deadline: float | None = None
    attempts: int = 0
    worker_attempts: int = 0
    charged: bool = False
    passed: bool = False
    closed: set[int] = field(default_factory=set)
    holder: dict[int, int] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)

    def rows(self) -> list[int]:
        return [index for part in sorted(self.members) for index in self.members[part]]

    @property
    def is_live(self) -> bool:
        return self.state not in (*LEFT, *GONE)

    @property
    def is_under_work(self) -> bool:
        return self.state in ("waiting", "running")

    def is_for(self, task: str) -> bool:
        return not self.terms.tasks or task in self.terms.tasks


class Model:
    """``budgets``: slots by task. ``gates``: by task, what must hold of the rewards of a group's rows."""

    def __init__(self, budgets: dict[str, int], gates: dict[str, Any]) -> None:
        self.budgets, self.gates = budgets, gates
        self.groups: dict[int, Group] = {}
        self.leases: dict[int, Own] = {}
        self.lost: dict[str, dict[int, float]] = {}
        self.rewards: dict[int, int] = {}
        self.version: int | None = None
        self.num_begun = 0
        self.have_drawers = False
        """Whether a task that draws groups has asked for some."""

    # ---- questions ----

    def room(self, group: Group) -> bool:
        return all(self.charged(task) < self.budgets[task] for task in group.terms.tasks)

    def charged(self, task: str) -> int:
        return sum(group.charged for group in self.groups.values() if task in group.terms.tasks)

    def free_parts(self, group: Group) -> list[int]:
        if not group.is_under_work:
            return []
        return [
            part for part in range(group.terms.parts)
            if part not in group.closed and group.holder.get(part) not in self.leases
        ]  # fmt: skip

    def leasable(self) -> list[Group]:
        """What a lease would get, if it asked for everything of one group; begun ones first."""
        begun = [group for group in self.groups.values() if group.begun and self.free_parts(group)]
        fresh = [group for group in self.groups.values() if group.state == "waiting" and not group.begun]
        return begun + [group for group in fresh if self.room(group)]

    def drawable(self, task: str) -> list[Group]:
        """Oldest first."""
        found = [
            group for group in self.groups.values()
            if group.is_live and not group.is_under_work and group.passed and group.is_for(task)
            and task not in group.drawn and group.rows()
        ]  # fmt: skip
        return sorted(found, key=lambda group: (-1 if group.version is None else group.version, group.begun))

    def num_rows(self) -> int:
        return sum(len(group.rows()) for group in self.groups.values())

    # ---- leases ----

    def granted(self, worker: str, lease: Any, lease_s: float, keep: str, now: float) -> None:
        """Raises AssertionError if this lease may not be."""
        group = self.groups[lease.head]
        parts = list(lease.parts)
        assert parts, "a lease has a part"
        assert set(parts) <= set(self.free_parts(group)), "a part has one lease, and is open"
        if not group.begun:
            assert self.room(group), "the budget has a slot for it"
            self.num_begun += 1
            group.begun, group.version, group.charged = self.num_begun, self.version, bool(group.terms.tasks)
            if group.terms.deadline_s is not None:
                group.deadline = now + group.terms.deadline_s
        if keep == "none" and group.closed and not self.holders(group):
            raise AssertionError("closed parts begin anew, so the caller forgets them first")
        if keep != "all":
            for part in parts:
                group.members.pop(part, None)
        assert lease.attempt == 1 + group.attempts + group.worker_attempts
        assert lease.version == group.version
        assert set(lease.members) == {part for part in parts if group.members.get(part)}
        for part in parts:
            group.holder[part] = lease.token
        group.state = "running"
        self.leases[lease.token] = Own(lease.token, worker, group.head, parts, lease_s, now)

    def begins_anew(self, group: Group) -> None:
        group.closed.clear()
        group.members.clear()

    def holders(self, group: Group) -> list[Own]:
        return [lease for lease in self.leases.values() if lease.head == group.head]

    def refuses(self, worker: str, token: int, head: int, parts: Iterable[int]) -> str | None:
        """The error of a put or an end of such a lease."""
        own, group = self.leases.get(token), self.groups[head]
        if not group.is_under_work:
            return "LeaseLostError"
        for part in parts:
            if group.holder.get(part) != token:
                return "LeaseLostError"
            if part in group.closed:
                return "GroupStateError"
        return "LeaseLostError" if own is not None and own.worker != worker else None

    def put(self, worker: str, token: int, head: int, parts: list[int], rows: list[int], closes: bool, now: float):
        group, size = self.groups[head], len(rows) // len(parts)
        for at, part in enumerate(parts):
            group.members.setdefault(part, []).extend(rows[at * size : (at + 1) * size])
        own = self.leases.get(token)
        if own is None and not closes and token in self.lost.get(worker, {}):
            lease_s = self.lost[worker].pop(token)
            mine = [part for part in range(group.terms.parts) if group.holder.get(part) == token]
            parts_left = [part for part in mine if part not in group.closed]
            self.leases[token] = Own(token, worker, head, parts_left, lease_s, now)
        if closes:
            group.closed |= set(parts)
            if own is not None:
                own.parts = [part for part in own.parts if part not in group.closed]
                if not own.parts:
                    del self.leases[token]
        if len(group.closed) == group.terms.parts:
            self.close(group)
        else:
            self.rest(group)

    def rest(self, group: Group) -> None:
        if group.is_under_work:
            group.state = "running" if self.holders(group) else "waiting"

    def close(self, group: Group) -> None:
        group.state = "closed"
        for lease in self.holders(group):
            del self.leases[lease.token]
        if not group.rows():
            self.leaves(group, "rejected")
        else:
            self.judge(group)

    def judge(self, group: Group) -> None:
        tasks = group.terms.tasks or tuple(self.gates)
        gates = [gate for task in tasks if (gate := self.gates[task]) is not None]
        if gates and any(index not in self.rewards for index in group.rows()):
            return
        if all(gate([self.rewards[index] for index in group.rows()]) for gate in gates):
            group.passed = True
        else:
            self.leaves(group, "rejected")

    def rewarded(self, index: int, reward: int) -> None:
        self.rewards[index] = reward
        for group in self.groups.values():
            if group.state == "closed" and not group.passed and index in group.rows():
                self.judge(group)

    def ends(self, token: int, blame: str, is_lost: bool) -> None:
        """Its attempt has failed. ``is_lost``: its worker may come late."""
        own = self.leases.pop(token)
        group = self.groups[own.head]
        if is_lost:
            self.lost.setdefault(own.worker, {})[token] = own.lease_s
        else:
            group.holder = {part: at for part, at in group.holder.items() if at != token or part in group.closed}
        group.attempts += blame == "sample"
        group.worker_attempts += blame == "worker"
        if group.attempts >= group.terms.attempts or group.worker_attempts >= group.terms.worker_attempts:
            self.leaves(group, "failed")
        else:
            self.rest(group)

    def worker_gone(self, worker: str) -> None:
        self.lost.pop(worker, None)
        blamed: set[int] = set()  # one death counts once per group
        for token in [own.token for own in self.leases.values() if own.worker == worker]:
            if token in self.leases:
                head = self.leases[token].head
                self.ends(token, "nobody" if head in blamed else "worker", is_lost=True)
                blamed.add(head)
        self.lost.pop(worker, None)

    def pass_time(self, now: float) -> None:
        """Up to now: deadlines and leases that nobody renewed, in their order."""
        blamed: set[tuple[float, str, int]] = set()
        while True:
            due = [(own.renewed + own.lease_s, 0, own.token) for own in self.leases.values()]
            due += [(at.deadline, 1, at.head) for at in self.groups.values() if at.deadline and self.may_expire(at)]
            first = min(due, default=None)
            if first is None or first[0] > now:
                return
            if first[1] == 0:
                own = self.leases[first[2]]
                event = (first[0], own.worker, own.head)
                self.ends(own.token, "nobody" if event in blamed else "worker", is_lost=True)
                blamed.add(event)
                continue
            group = self.groups[first[2]]
            if not group.is_under_work or len(group.closed) < (group.terms.min_parts or group.terms.parts):
                self.leaves(group, "expired")
            else:
                group.members = {part: own for part, own in group.members.items() if part in group.closed}
                self.close(group)
                group.deadline = first[0] + group.terms.deadline_s

    @staticmethod
    def may_expire(group: Group) -> bool:
        """Whether it is worked on, or lacks the tags of a gate."""
        return group.is_under_work or bool(group.state == "closed" and not group.passed and group.terms.tasks)

    def loses_rows(self, lost: set[int], read: set[int], is_over: bool, now: float) -> list[int]:
        """Values of these rows are gone. Returns those that stay, because a task was given their group.

        ``read``: rows that a task was given which draws no groups. ``is_over``: somebody was told that nothing comes.
        """
        stay: list[int] = []
        for group in self.groups.values():
            rows = set(group.rows())
            if not lost & rows:
                continue
            if group.drawn or (not group.terms.tasks and not self.have_drawers and read & rows):
                stay += sorted(lost & rows)
                continue
            if is_over:
                self.leaves(group, "failed")
                continue
            group.worker_attempts += group.state == "closed" or bool(self.holders(group))
            group.charged = bool(group.terms.tasks)
            for lease in self.holders(group):
                del self.leases[lease.token]
            if group.state == "closed" and group.terms.deadline_s is not None:
                group.deadline = now + group.terms.deadline_s
            self.begins_anew(group)
            group.holder.clear()
            group.state, group.passed = "waiting", False
            if group.worker_attempts >= group.terms.worker_attempts:
                self.leaves(group, "failed")
        return stay

    # ---- draws ----

    def draws(self, task: str, group: Group) -> None:
        assert task not in group.drawn, "no task draws a group twice"
        group.drawn.add(task)
        if group.state == "closed":
            group.state = "drawn"

    def trains(self, task: str, group: Group) -> None:
        if not group.is_live:
            return
        group.trained.add(task)
        if group.state == "drawn" and group.trained >= set(group.terms.tasks):
            group.state, group.charged = "trained", False

    def acks(self, task: str, group: Group) -> None:
        self.trains(task, group)
        group.acked.add(task)
        if group.state == "trained" and group.terms.tasks and group.acked >= set(group.terms.tasks):
            self.goes(group, "done")

    # ---- ends ----

    def leaves(self, group: Group, state: str) -> None:
        self.goes(group, state)

    def goes(self, group: Group, state: str) -> None:
        group.state, group.charged = state, False
        group.members.clear()
        for lease in self.holders(group):
            del self.leases[lease.token]

    def retried(self, group: Group) -> None:
        assert group.state in LEFT
        self.groups[group.head] = Group(group.head, group.terms)
