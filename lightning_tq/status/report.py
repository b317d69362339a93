# SPDX-License-Identifier: Apache-2.0
"""QueueSnapshot: a queue's statistics at one moment. Two snapshots give a report with rates."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from transfer_queue import TransferQueueClient
from transfer_queue.errors import TransferQueueError

Numbers = dict[str, Any]

Holdings = dict[str, int]
_NOTHING: Holdings = dict.fromkeys(
    ("connections", "reservations", "reserved", "leases", "pins", "freezes", "leaves", "parked", "unreceived"), 0
)

_UNITS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """Statistics of the controller and of each storage unit, as plain data."""

    stats: Numbers
    units: list[Numbers]
    taken_at: float
    """Monotonic seconds."""
    units_error: str | None = None
    """Why ``units`` is empty although units may exist."""


async def take_snapshot(client: TransferQueueClient) -> QueueSnapshot:
    """Ask the controller and every storage unit once. It changes nothing in the queue."""
    stats = await client.async_get_stats()
    stats["clients"] = others(stats)
    del stats["asked_by"]
    units: list[Numbers] = []
    error = None
    try:
        answers = await asyncio.wait_for(client.async_get_storage_stats(), _UNITS_TIMEOUT_S)
        # "path" describes this client's own route for values, and it moves none.
        units = [{name: number for name, number in unit.items() if name != "path"} for unit in answers]
    except asyncio.TimeoutError:
        error = f"no answer from every unit within {_UNITS_TIMEOUT_S:g} s"
    except TransferQueueError as failure:  # the controller's numbers are still useful
        error = str(failure)
    return QueueSnapshot(stats, units, time.monotonic(), error)


def others(stats: Numbers) -> dict[str, Holdings]:
    """What each client of the queue holds, but for the one that asked for these statistics: it only looks."""
    return {name: {**_NOTHING, **held} for name, held in stats["clients"].items() if name != stats["asked_by"]}


def make_report(address: str, now: QueueSnapshot, before: QueueSnapshot | None = None) -> Numbers:
    """What ``--json`` prints: the statistics of ``now``, and rates for partitions that ``before`` also has.

    ``put_per_s``: samples that became readable. ``consumed_per_s``, per task: samples that it consumed, or that were
    cleared before it could. Both are None without an earlier value.
    """
    partitions = {}
    for name, partition in now.stats["partitions"].items():
        earlier = None if before is None else before.stats["partitions"].get(name)
        seconds = 0.0 if before is None else now.taken_at - before.taken_at
        partitions[name] = _with_rates(partition, earlier, seconds)
    return {
        "address": address, **now.stats, "partitions": partitions, "units": now.units, "units_error": now.units_error
    }  # fmt: skip


def _with_rates(partition: Numbers, earlier: Numbers | None, seconds: float) -> Numbers:
    known = earlier or {"tasks": {}}
    tasks = {}
    for name, task in partition["tasks"].items():
        was = known["tasks"].get(name)
        done_before = None if was is None else _done(known, was)
        tasks[name] = {**task, "consumed_per_s": _rate(_done(partition, task), done_before, seconds)}
    put_per_s = _rate(partition["published"], known.get("published"), seconds)
    return {**partition, "put_per_s": put_per_s, "tasks": tasks}


def _done(partition: Numbers, task: Numbers) -> int:
    """Samples that the task is done with. Unlike "samples" and "consumed", clearing does not lower it."""
    return int(partition["published"] - (partition["samples"] - task["consumed"]))


def _rate(now: int, before: int | None, seconds: float) -> float | None:
    if before is None or now < before or seconds <= 0:  # a new partition with this name, or a reset
        return None
    return (now - before) / seconds
