# SPDX-License-Identifier: Apache-2.0
"""The storage units of the queue: which ones there are, and which have ended."""

from __future__ import annotations

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, UnitLostError

_MOST_LOST = 100
"""Lost units that are remembered, the latest ones."""


class UnitTable:
    """Numbers start at 1 and are never reused. Number 0 is the unit in the controller's process, if there is one."""

    def __init__(self) -> None:
        self.version = 0
        self.lost: dict[int, str] = {}
        """Names of units that have ended, by number."""
        self.by_number: dict[int, p.UnitInfo] = {}
        """The units that are there."""
        self._next = 1

    def add_own(self, name: str, host: str, addresses: list[str], capacity_nbytes: int | None) -> None:
        """The unit in the controller's process. It lives as long as the controller."""
        self._add(p.UnitInfo(0, name, host, addresses, capacity_nbytes))

    def join(self, request: p.JoinUnit) -> int:
        """Add a unit. Returns its number."""
        if not request.addresses:
            raise InvalidRequestError(f"storage unit {request.name!r} joins without an address.")
        number, self._next = self._next, self._next + 1
        self._add(p.UnitInfo(number, request.name, request.host, request.addresses, request.capacity_nbytes))
        return number

    def _add(self, unit: p.UnitInfo) -> None:
        self.by_number[unit.number] = unit
        self.version += 1

    def remove(self, number: int) -> None:
        """The unit has ended."""
        self.lost[number] = self.by_number.pop(number).name
        while len(self.lost) > _MOST_LOST:
            del self.lost[next(iter(self.lost))]
        self.version += 1

    def check(self, spec: p.FieldSpec) -> None:
        """Raises UnitLostError if values lie in a unit that has ended."""
        for number, _ in spec.units or ():
            if number and number not in self.by_number:
                name = self.lost.get(number, "unknown")
                raise UnitLostError(f"storage unit {number} ({name}) has ended: put these values again.")
