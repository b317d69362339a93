# SPDX-License-Identifier: Apache-2.0
"""Group: one prompt that work has begun on, its states, and the reserved tags that are its record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

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
DRAWABLE: Final = (CLOSED, READY)
COMPLETE: Final = (CLOSED, READY, DRAWN, TRAINED)
RESERVED: Final = "group."
"""How the names of the tags begin that only the queue sets."""
_NOBODY: frozenset[str] = frozenset()


class Group:
    """A group that work has begun on. ``seq``: the token of its first lease, which is its place in their order.

    ``tokens``: by part, of the lease that has it, or had it last. ``members``: by part, the indexes of its rows.
    ``drawn_by``, ``trained_by``, ``acked_by``: tasks. ``passed``: no gate is against it. ``arrivals``: by task, its
    place in the order in which groups became ready.
    """

    __slots__ = ("acked_by", "arrivals", "attempts", "closed", "drawn_by", "index", "is_charged", "members",
                 "num_members", "passed", "reasons", "seq", "state", "terms", "tokens", "trained_by", "version",
                 "worker_attempts")  # fmt: skip

    def __init__(self, index: int, terms: Terms, seq: int, version: int | None) -> None:
        self.index, self.terms, self.seq, self.version = index, terms, seq, version
        self.state = WAITING
        self.attempts = self.worker_attempts = self.num_members = 0
        self.closed: set[int] = set()
        self.tokens: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}
        self.arrivals: dict[str, int] = {}
        self.reasons: list[str] = []
        self.is_charged = self.passed = False
        self.drawn_by = self.trained_by = self.acked_by = _NOBODY

    @property
    def is_under_work(self) -> bool:
        """Whether members may still come."""
        return self.state in UNDER_WORK

    @property
    def attempt(self) -> int:
        return 1 + self.attempts + self.worker_attempts

    def is_for(self, task: str) -> bool:
        """Whether this task trains it: any does where its terms name none."""
        return not self.terms.tasks or task in self.terms.tasks

    def is_done_by_all(self, tasks: frozenset[str]) -> bool:
        """Whether all tasks that train it are among these, and one at least."""
        return bool(tasks) and tasks.issuperset(self.terms.tasks)

    def all_members(self) -> list[int]:
        """Ascending within each part."""
        return [index for part in sorted(self.members) for index in self.members[part]]

    def void(self, token: int) -> None:
        """This lease has been given up: nothing can come of it any more."""
        self.tokens = {part: own for part, own in self.tokens.items() if own != token or part in self.closed}

    def open_parts(self) -> list[int]:
        return [part for part in range(self.terms.parts) if part not in self.closed]

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
