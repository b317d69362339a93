# SPDX-License-Identifier: Apache-2.0
"""What statistics and wait reports say of a partition's groups: numbers by state, the oldest work, gates, slots."""

from __future__ import annotations

from itertools import islice
from typing import Any

from transfer_queue.control.gate import parse_gate
from transfer_queue.control.group_record import CLOSED, REJECTED
from transfer_queue.control.groups import Groups
from transfer_queue.control.partition import Partition
from transfer_queue.control.state import PlaneState

_LOOKED_AT = 8


def group_numbers(state: PlaneState, partition: Partition, now: float) -> dict[str, Any]:
    """Empty if the partition has no groups.

    ``added``: those that ever were. ``states``: how many are in each. ``oldest``: of the leases here, the one that was
    granted first. ``rejected``: by gate, or reason. ``left``: by state and reason. ``slots``: by task that trains them,
    how many it has, uses, and uses for groups that are here, and which options of its sampler bound them; its ``gate``,
    the tags of that gate that some rows of closed groups lack (``untagged``), and other tags that they have
    (``tagged``).
    """
    groups, leases = partition.groups, state.leases
    if groups is None:
        return {}
    tasks = sorted(groups.tasks() | {task for task in partition.consumers if leases.sampler(task) is not None})
    slots: dict[str, dict[str, Any]] = {}
    for task in tasks:
        sampler = leases.sampler(task)
        budget, per_step = (0, 0) if sampler is None else (sampler.budget, sampler.groups)
        here = sum(group.is_charged and task in group.terms.tasks for group in groups.live.values())
        own = slots[task] = {
            "used": leases.trainers[task].charged, "here": here, "budget": budget, "per_step": per_step
        }  # fmt: skip
        if sampler is not None:
            own["limits"] = [name for name, admitted in sampler.admitted.items() if admitted == budget]
            if sampler.gate is not None:
                own["gate"] = sampler.gate
                own["untagged"], own["tagged"] = _tags_of_closed(groups, parse_gate(sampler.gate).tags)
    first = leases.oldest_of(partition.name)
    oldest = None if first is None else {
        "worker": first.worker.client, "key": partition.keys.key_of(first.group.index), "age_s": now - first.since,
    }  # fmt: skip
    return {
        "added": partition.num_heads, "states": groups.numbers(), "oldest": oldest,
        "rejected": dict(groups.why_left[REJECTED]), "slots": slots,
        "left": {left: dict(reasons) for left, reasons in groups.why_left.items() if reasons},
    }  # fmt: skip


def _tags_of_closed(groups: Groups, wanted: frozenset[str]) -> tuple[list[str], list[str]]:
    """Which of these tags a row of the first closed groups lacks, and the other tags that their rows have."""
    closed = (group for group in groups.live.values() if group.state == CLOSED)
    some = islice(closed, min(groups.counts[CLOSED], _LOOKED_AT))
    rows = [tags for group in some for tags in groups.tags_of_members(group)]
    lacking = {tag for tag in wanted if not all(tag in own for own in rows)}
    return sorted(lacking), sorted(set().union(*rows) - lacking)
