# SPDX-License-Identifier: Apache-2.0
"""The storage units of the queue: which ones there are, and what becomes of samples whose unit has ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, UnitLostError

if TYPE_CHECKING:
    from transfer_queue.control.state import PlaneState

WATCHERS = "\0units"
"""Wait queue of clients that wait for a change of the units."""
_MOST_TOLD = 100
"""Lost units that are remembered, the latest ones."""


class UnitTable:
    """Numbers start at 1 and are never reused. Number 0 is the unit in the controller's process, if there is one."""

    def __init__(self) -> None:
        self.version = 0
        self.lost: dict[int, str] = {}
        """Names of units that have ended, by number."""
        self._units: dict[int, p.UnitInfo] = {}
        self._sessions: dict[int, str] = {}
        self._next = 1

    def add_own(self, name: str, host: str, addresses: list[str], capacity_nbytes: int | None) -> None:
        """The unit in the controller's process. It lives as long as the controller."""
        self._units[0] = p.UnitInfo(0, name, host, addresses, capacity_nbytes)
        self.version += 1

    def join(self, client: str, request: p.JoinUnit) -> int:
        """Add the unit of this session. Returns its number."""
        if not request.addresses:
            raise InvalidRequestError(f"storage unit {request.name!r} joins without an address.")
        number, self._next = self._next, self._next + 1
        self._units[number] = p.UnitInfo(
            number, request.name, request.host, request.addresses, request.capacity_nbytes
        )  # fmt: skip
        self._sessions[number] = client
        self.version += 1
        return number

    def of(self, client: str) -> list[int]:
        """The units of this session."""
        return [number for number, session in self._sessions.items() if session == client]

    def remove(self, number: int) -> None:
        """The unit has ended."""
        self.lost[number] = self._units.pop(number).name
        del self._sessions[number]
        while len(self.lost) > _MOST_TOLD:
            del self.lost[next(iter(self.lost))]
        self.version += 1

    def infos(self) -> list[p.UnitInfo]:
        """The units that are there."""
        return list(self._units.values())

    def check(self, specs: Iterable[p.FieldSpec]) -> None:
        """Raises UnitLostError if values lie in a unit that has ended."""
        for spec in specs:
            for number, _ in spec.units or ():
                if number and number not in self._units:
                    name = self.lost.get(number, "unknown")
                    raise UnitLostError(f"storage unit {number} ({name}) has ended: put these values again.")


def join(state: PlaneState, client: str, request: p.JoinUnit) -> p.Reply:
    """A storage unit is there from now on."""
    return p.Done(request.id, state.units.join(client, request))


def list_units(state: PlaneState, client: str, request: p.ListUnits, now: float) -> p.Reply | None:
    """The units; parked until they are others than the client knows."""
    if request.known == state.units.version and request.wait_s > 0:
        state.waiters.park(client, request, now, now + request.wait_s, WATCHERS, 0.0)
        return None
    return listing(state, request)


def listing(state: PlaneState, request: p.ListUnits) -> p.Units:
    """The units as they are."""
    return p.Units(request.id, state.units.version, state.units.infos())


def take_watchers(state: PlaneState) -> list[tuple[str, p.Units]]:
    """Remove and answer the clients that waited for a change."""
    changed = [each for each in state.waiters.waiting_in(WATCHERS) if each.request.known != state.units.version]
    for parked in changed:
        state.waiters.remove(parked)
    return [(parked.client, listing(state, parked.request)) for parked in changed]


def lose(state: PlaneState, client: str) -> None:
    """The session has ended: the values in its units are gone, so their fields aren't produced any more."""
    for number in state.units.of(client):
        state.units.remove(number)
        for name, partition in state.partitions.items():
            if partition.lose_unit(number):
                state.mark_dirty(name)
