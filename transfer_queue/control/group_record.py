# SPDX-License-Identifier: Apache-2.0
"""Records: a group that work has begun on, who works on it, what was drawn of it; and the tags that say its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from transfer_queue.calls import Alarm, Holding, Until
from transfer_queue.errors import InvalidRequestError
from transfer_queue.protocol import Tags, Terms

WAITING: Final = "waiting"
RUNNING: Final = "running"
CLOSED: Final = "closed"
READY: Final = "ready"
DRAWN: Final = "drawn"
TRAINED: Final = "trained"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
REJECTED: Final = "rejected"
STALE: Final = "stale"
LEFT: Final = (FAILED, EXPIRED, REJECTED, STALE)
UNDER_WORK: Final = (WAITING, RUNNING)
GONE: Final = "gone"
RESERVED: Final = "group."
"""How the names of the tags begin that only the queue sets."""
MOST_REASONS: Final = 8
LONGEST_REASON: Final = 200


class Worker(Holding):
    """A session that has leases, until it ends. ``leases``: those that it holds, by token."""

    until = Until.SESSION

    def __init__(self, client: str, on_end: Callable[[Worker, bool], None]) -> None:
        self.client, self.on_end = client, on_end
        self.leases: dict[int, HeldLease] = {}
        self.alarm: Alarm
        """At its next lease that may not be renewed in time."""

    def end(self, died: bool) -> None:
        self.on_end(self, died)


@dataclass(slots=True, eq=False)
class HeldLease:
    """``is_held``: it has not ended. ``since``: when it was granted. ``renewed``: when its worker last said that work
    goes on.
    """

    token: int
    worker: Worker
    partition: str
    group: Group
    lease_s: float
    since: float
    renewed: float = 0.0
    is_held: bool = False

    def parts(self) -> list[int]:
        """Those that it has to close. No later lease has them."""
        group = self.group
        return [part for part, own in group.holders.items() if own is self and part not in group.closed]


@dataclass(slots=True, eq=False)
class Drawn:
    """What a task's reader was given in one batch. ``groups``: those that it has not trained, by index.

    ``reader``: a rank, or the client of a reader without one. ``step``: the one that trains them.
    """

    partition: str
    reader: Hashable
    number: int
    step: int
    groups: dict[int, Group]


@dataclass(slots=True, eq=False)
class Group:
    """A group that work has begun on. ``seq``: the token of its first lease, which is its place in their order.

    ``holders``: by part, the lease that has it, or had it last. ``members``: by part, the indexes of its rows.
    ``left``: the state in which it left. ``is_complete``: no more members will come. ``passed``: no gate is against it,
    so it may be drawn. ``is_ready``: some task could draw it now. ``drawn``: tasks that were given it, each with its
    batch; None once it has trained it. ``acked``: tasks. ``skipped``: those of them that went on
    without it. ``arrivals``: by task, its place in the order in which groups became ready. ``patience_ends``: when its
    deadline is, in the plane's seconds.
    """

    index: int
    terms: Terms
    seq: int
    version: int | None
    state: str = WAITING
    left: str = ""
    attempts: int = 0
    worker_attempts: int = 0
    num_members: int = 0
    patience_ends: float = math.inf
    is_complete: bool = False
    is_charged: bool = False
    passed: bool = False
    is_ready: bool = False
    acked: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    closed: set[int] = field(default_factory=set)
    holders: dict[int, HeldLease] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    drawn: dict[str, Drawn | None] = field(default_factory=dict)

    def next_state(self) -> str:
        """The state that its record says."""
        if self.left:
            return self.left
        if not self.is_complete:
            return RUNNING if any(own.is_held for own in self.holders.values()) else WAITING
        if not self.drawn or not self.passed:  # tasks that have gone on count as if they had drawn it
            return READY if self.is_ready else CLOSED
        if None not in self.drawn.values():
            return DRAWN
        trained = [task for task, batch in self.drawn.items() if batch is None]
        return TRAINED if self.is_done_by_all(trained) else DRAWN

    @property
    def is_under_work(self) -> bool:
        """Whether members may still come."""
        return not self.is_complete and not self.left

    @property
    def has_failed(self) -> bool:
        """Whether its attempts are used up."""
        return self.attempts >= self.terms.attempts or self.worker_attempts >= self.terms.worker_attempts

    @property
    def attempt(self) -> int:
        return 1 + self.attempts + self.worker_attempts

    def is_for(self, task: str) -> bool:
        """Whether this task trains it: any does where its terms name none."""
        return not self.terms.tasks or task in self.terms.tasks

    def is_done_by_all(self, tasks: Collection[str]) -> bool:
        """Whether all tasks that train it are among these, and one at least."""
        return bool(tasks) and (not self.terms.tasks or not set(self.terms.tasks).difference(tasks))

    def all_members(self) -> list[int]:
        """Ascending within each part."""
        return list(chain.from_iterable(map(self.members.__getitem__, sorted(self.members))))

    def members_of(self, parts: Iterable[int]) -> list[int]:
        return [index for part in parts for index in self.members.get(part, ())]

    def open_parts(self) -> list[int]:
        parts, closed = range(self.terms.parts), self.closed
        return [part for part in parts if part not in closed] if closed else list(parts)

    @property
    def has_free_part(self) -> bool:
        """Whether ``free_parts`` has one; mostly known without looking at each part."""
        closed = self.closed
        for part, own in self.holders.items():
            if not own.is_held and part not in closed:
                return True
        return len(self.holders) < self.terms.parts and bool(self.free_parts())

    def free_parts(self) -> list[int]:
        """Open parts that no lease has."""
        parts, holders = self.open_parts(), self.holders
        return [part for part in parts if (own := holders.get(part)) is None or not own.is_held] if holders else parts

    def leases(self) -> list[HeldLease]:
        """Those of workers that are at it."""
        return [own for own in dict.fromkeys(self.holders.values()) if own.is_held]

    def note(self, reason: str) -> None:
        """Why an attempt has failed, or why it leaves. The last attempt may have said so already."""
        self.reasons = [*self.reasons, reason[:LONGEST_REASON]][-MOST_REASONS:]

    def tags(self) -> Tags:
        """What filters, watches and checkpoints see."""
        tags: Tags = {
            "group.state": self.state, "group.attempt": self.attempt, "group.closed": len(self.closed),
            "group.record": [self.seq, self.attempts, self.worker_attempts, int(self.passed), *sorted(self.closed)],
        }  # fmt: skip
        if self.version is not None:
            tags["group.version"] = self.version
        if self.reasons:
            tags["group.reason"] = self.reasons
        return tags


def check_terms(terms: Terms) -> None:
    """Raises InvalidRequestError for terms that contradict themselves."""
    if terms.min_parts is not None and terms.min_parts > terms.parts:
        raise InvalidRequestError(f"min_parts must be at most parts ({terms.parts}), got {terms.min_parts}.")
    if len(set(terms.tasks)) < len(terms.tasks):
        raise InvalidRequestError(f"tasks must be different ones, got {list(terms.tasks)}.")
    if terms.min_parts is not None and terms.deadline_s is None:
        raise InvalidRequestError(
            f"min_parts={terms.min_parts} says what is enough at the deadline: give deadline_s, too."
        )


def check_tags(tags: Iterable[Any]) -> None:
    """Raises InvalidRequestError for reserved tags from a client."""
    for own in tags:
        for name in own:
            if name.startswith(RESERVED):
                raise InvalidRequestError(
                    f"tag {name!r} can't be set: names that begin with {RESERVED!r} belong to the queue. Rename it."
                )
