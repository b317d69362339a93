# SPDX-License-Identifier: Apache-2.0
"""Look: a queue's own numbers at one moment; two of them give rates."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from transfer_queue import TransferQueueClient
from transfer_queue.errors import TransferQueueError

Numbers = dict[str, Any]

_UNITS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Look:
    """What the controller says, and each storage unit; plain data both."""

    stats: Numbers
    units: list[Numbers]
    taken_at: float
    """Monotonic seconds."""
    units_error: str | None = None
    """Why ``units`` is empty although there may be some."""


async def take_look(client: TransferQueueClient) -> Look:
    """Ask the controller and every storage unit once. Changes nothing in the queue."""
    stats = await client.async_get_stats()
    units: list[Numbers] = []
    error = None
    try:
        told = await asyncio.wait_for(client.async_get_storage_stats(), _UNITS_TIMEOUT_S)
        # Which way values go is each client's own, and this one moves none: "attached" counts those that map the arena.
        units = [{name: number for name, number in unit.items() if name != "path"} for unit in told]
    except asyncio.TimeoutError:
        error = f"no answer from every unit within {_UNITS_TIMEOUT_S:g} s"
    except TransferQueueError as failure:  # what the controller knows is worth showing all the more
        error = str(failure)
    return Look(stats, units, time.monotonic(), error)


def report(address: str, now: Look, before: Look | None = None) -> Numbers:
    """What ``--json`` prints: the numbers of ``now``, and rates since ``before`` where both looks know a partition.

    ``put_per_s``: samples that became readable. ``consumed_per_s``, per task: samples that it consumed, or that were
    cleared before it could. None where there is nothing to compare with.
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
    """Samples that the task has behind it. Clearing lowers "samples" and "consumed", but not this."""
    return int(partition["published"] - (partition["samples"] - task["consumed"]))


def _rate(now: int, before: int | None, seconds: float) -> float | None:
    if before is None or now < before or seconds <= 0:  # a new partition of that name, or a reset
        return None
    return (now - before) / seconds
