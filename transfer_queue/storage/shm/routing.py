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


def unit_of(indexes: IntArray, num_units: int, run: int = ROUTING_RUN) -> IntArray:
    """Which unit holds each index. Every process must answer the same, so it depends on nothing else."""
    return (indexes // run) % num_units


def peers_of(settings: Mapping[str, Any]) -> list[Peer]:
    """The units, in the order that all processes share."""
    units = settings["units"]
    return [Peer(unit["name"], unit["address"]) for unit in units]


def shares_of(indexes: Sequence[int] | IntArray, num_units: int, run: int = ROUTING_RUN) -> Shares:
    """Units without any index left out."""
    if not len(indexes):
        return []
    if num_units == 1:
        return [(0, slice(0, len(indexes)))]
    if isinstance(indexes, np.ndarray):
        lowest, highest = int(indexes.min()), int(indexes.max())
    else:
        lowest, highest = min(indexes), max(indexes)
    if lowest // run == highest // run:
        return [(lowest // run % num_units, slice(0, len(indexes)))]
    return list(groups(unit_of(np.asarray(indexes, np.int64), num_units, run)))
