# SPDX-License-Identifier: Apache-2.0
"""Which unit holds which sample: a formula that clients and servers share, so that nobody has to look it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from transfer_queue.storage.pieces import IntArray, Positions
from transfer_queue.storage.selection import groups
from transfer_queue.transport.base import Peer

Shares: TypeAlias = list[tuple[int, Positions]]
"""(unit, positions of its own indexes); the whole as a slice where one unit has them all."""

ROUTING_RUN = 64
"""Neighbouring indexes share a unit in runs of this many: a put is cut into few slices, yet spreads over all units."""
LONG_RUN = 1 << 20
"""The same where spreading gains nothing: units that share a process, and memory without a limit of its own. What one
arena recycles is faster to write than pages of another one that nobody has touched yet."""


def unit_of(indexes: IntArray, num_units: int, run: int = ROUTING_RUN) -> IntArray:
    """Which unit holds each index. Every process must answer the same, so it depends on nothing else."""
    return (indexes // run) % num_units


def peers_of(settings: Mapping[str, Any]) -> list[Peer]:
    """The units, in the order that all processes share."""
    units = settings["units"]
    return [Peer(unit["name"], unit["address"], unit.get("pid"), unit.get("pid_namespace")) for unit in units]


def routing_run(settings: Mapping[str, Any]) -> int:
    """How many neighbouring indexes share a unit: whoever started the units has said so where they are."""
    return int(settings["units"][0].get("run") or ROUTING_RUN)


def best_run(together: bool, capacity_bytes: int | None) -> int:
    """For units that are started now. ``together``: they share a process."""
    return LONG_RUN if together and capacity_bytes is None else ROUTING_RUN


def shares_of(indexes: Sequence[int] | IntArray, num_units: int, run: int) -> Shares:
    """Units without any index left out."""
    if not len(indexes):
        return []
    if isinstance(indexes, np.ndarray):
        lowest, highest = int(indexes.min()), int(indexes.max())
    else:
        lowest, highest = min(indexes), max(indexes)
    if lowest // run == highest // run:
        return [(lowest // run % num_units, slice(0, len(indexes)))]
    return list(groups(unit_of(np.asarray(indexes, np.int64), num_units, run)))
