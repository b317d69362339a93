# SPDX-License-Identifier: Apache-2.0
"""What workers and trainers of groups ask of the controller."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transfer_queue.protocol.request_parts import (
    LONGEST_WAIT_S,
    MOST_ROWS,
    Call,
    FewIndexes,
    Position,
    Request,
    Seconds,
    Size,
)


class Terms(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How groups are worked on: see ``add_groups``. ``tasks``: those that train them, and whose budgets admit them."""

    parts: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1
    min_parts: Annotated[int, msgspec.Meta(ge=1, le=2**16)] | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_WAIT_S)] | None = None
    attempts: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 2
    worker_attempts: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 5
    tasks: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()


class Members(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New samples become rows of a leased group, dealt evenly to these parts, in order. ``closes``: no more will come.

    ``head``: the index of the group's own row.
    """

    lease: Call
    head: Position
    parts: Annotated[list[Size], msgspec.Meta(max_length=2**16)]
    closes: bool = False


Role = Terms | Members
"""What new samples are besides: heads of new groups, or members of a leased one."""


class LeaseGroups(Request, frozen=True):
    """The right to work on up to ``count`` groups, or parts of groups. It waits until there is one.

    ``partitions``: names and patterns, the preferred ones first. ``keep``: what earlier holders' rows the client goes
    on with, "all", those of "closed" parts, or "none". ``waited_s``: how long the caller has waited
    before this request.
    """

    partitions: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 1
    by_part: bool = False
    where: str | None = None
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_WAIT_S)] = 60.0
    keep: Literal["all", "closed", "none"] = "closed"
    wait_s: Seconds = 0.0
    waited_s: Seconds = 0.0


class EndLease(Request, frozen=True):
    """The work on a group, or part, ends without further rows: it is closed, for another attempt, or rejected."""

    partition: str
    members: Members
    how: Literal["close", "release", "reject"]
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    blame: Literal["worker", "sample", "nobody"] = "worker"


class RenewLeases(Request, frozen=True):
    """Work on these leases goes on. Done with the tokens of those that are lost.

    It waits up to ``wait_s`` for one that is lost.
    """

    leases: Annotated[list[Call], msgspec.Meta(max_length=MOST_ROWS)]
    wait_s: Seconds = 0.0


class Advance(Request, frozen=True):
    """The policy version that trains now, in the partitions of this name or pattern.

    ``resumed``: a trainer goes on from an earlier version. Otherwise versions never go back.
    """

    partition: str
    version: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    resumed: bool = False


class Trained(Request, frozen=True):
    """A reader's steps with its batches below ``before`` are done. It may still ask for them, until they are acked."""

    partition: str
    task: str
    before: Position
    dp_rank: Position = 0


class MoveOn(Request, frozen=True):
    """A task draws groups of this partition from here on, and no more of those that it has left.

    There this reader trains no more of what it was given.
    """

    partition: str
    task: str
    left: Annotated[list[str], msgspec.Meta(max_length=MOST_ROWS)] = []
    dp_rank: Position = 0


class RetryGroups(Request, frozen=True):
    """Groups that have left, and whose heads match the filter, are waiting again. Done with their number."""

    partition: str
    where: str | None = None


class RejectGroups(Request, frozen=True):
    """A trainer has no use for the groups of these samples. Done with the number of groups."""

    partition: str
    indexes: FewIndexes
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""
