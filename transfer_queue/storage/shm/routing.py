# SPDX-License-Identifier: Apache-2.0
"""Which unit holds which sample: a formula that clients and servers share, so that no lookup is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from transfer_queue.storage.pieces import IntArray, Positions
from transfer_queue.storage.selection import groups
from transfer_queue.transport.base import Peer

Shares: TypeAlias = list[tuple[int, Positions]]
"""(unit, positions of its indexes); a slice if one unit has them all."""

ROUTING_RUN = 64
"""This many neighbouring indexes share a unit, so a put is cut into few slices, yet spreads over all units."""


def unit_of(indexes: IntArray, num_units: int, run: int = ROUTING_RUN) -> IntArray:
    """Return the unit of each index. It depends on nothing else, because every process must get the same result."""
    return (indexes // run) % num_units


def peers_of(settings: Mapping[str, Any]) -> list[Peer]:
    """The units, in the order that all processes share."""
    units = settings["units"]
    return [Peer(unit["name"], unit["address"]) for unit in units]


def shares_of(indexes: Sequence[int] | IntArray, num_units: int, run: int = ROUTING_RUN) -> Shares:
    """Units that hold none of the indexes are left out."""
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
