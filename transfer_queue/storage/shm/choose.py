# SPDX-License-Identifier: Apache-2.0
"""The storage units of a queue, as its controller lists them to the client, and in which order to choose among them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence

from transfer_queue.errors import UnitLostError
from transfer_queue.protocol import ListUnits, UnitInfo, Units
from transfer_queue.storage.shm.connect import UnitConnection
from transfer_queue.transport.base import Peer
from transfer_queue.transport.session import Session
from transfer_queue.utils.machine import host_id

_FRESH_S = 5.0
"""A list of units that is older is asked for again, where a newer one could help."""
_NEWS_S = 2.0
_SPREAD = 0x9E3779B1
"""2**32 times the golden ratio: its multiples are spread evenly, also those of every eighth sample."""
_FEW = 5


class UnitDirectory:
    """Connections by the number of the unit. Number 0 is the unit in the controller's process, if there is one."""

    def __init__(self, session: Session, peers: Sequence[Peer], shared: bool) -> None:
        """``peers``: as configured. A single one is unit 0; the controller lists several. ``shared``: map arenas."""
        self._session = session
        self._shared = shared
        self._connections: dict[int, UnitConnection] = {}
        self._infos: dict[int, UnitInfo] = {}
        self._version = 0
        self._listed_at = float("-inf")
        self._turn = 0
        if len(peers) == 1:
            self._connections[0] = UnitConnection(peers[0], shared)
        is_own = len(peers) == 1 and peers[0].address == session.controller.address
        self.own = self._connections[0] if is_own else None
        """The unit in the controller's process, which is there for as long as the queue is; None: none is there."""

    @property
    def is_fixed(self) -> bool:
        """Whether the only unit is one of its own, so no controller lists any."""
        return 0 in self._connections and not self._infos and self.own is None

    @property
    def had_others(self) -> bool:
        """Whether a unit has ever been listed beside the controller's own, which may hold what was replaced there."""
        return self._version > 1

    async def connection(self, number: int) -> UnitConnection:
        """Raises UnitLostError for a unit that has ended."""
        if number not in self._connections:
            await self.refresh()
        found = self._connections.get(number)
        if found is None:
            raise UnitLostError(f"storage unit {number} has ended, and the values that it held are lost.")
        return found

    def known(self, number: int) -> UnitConnection | None:
        """The connection, if this client has used the unit and it was there when the units were listed last."""
        return self._connections.get(number)

    async def all(self, fresh: bool = True) -> list[tuple[int, UnitConnection]]:
        """Every unit that is there, in the order of their numbers."""
        if fresh or time.monotonic() > self._listed_at + _FRESH_S:
            await self.refresh()
        return sorted(self._connections.items())

    def outdate(self) -> None:
        """One of them may have ended: list them before they are used again."""
        self._listed_at = float("-inf")

    async def lost_among(self, numbers: Iterable[int]) -> list[int]:
        """Those of these units that have ended. Where one does not answer, the controller may learn of it a little
        later than its clients.
        """
        numbers = list(numbers)
        for wait_s in (0.0, _NEWS_S):
            await self.refresh(wait_s)
            lost = [number for number in numbers if number not in self._connections]
            if lost or self.is_fixed:
                return lost
        return []

    async def refresh(self, wait_s: float = 0.0) -> None:
        """Ask the controller which units there are, if there is one that lists them. ``wait_s``: for news."""
        if self.is_fixed:
            return
        listed = await self._session.ask(ListUnits, Units, self._version if wait_s else None, wait_s, wait_s=wait_s)
        self._version = listed.version
        self._listed_at = time.monotonic()
        self._infos = {info.number: info for info in listed.units}
        for number in [number for number in self._connections if number not in self._infos]:
            self._connections.pop(number).close()
        for number, info in self._infos.items():
            if number not in self._connections:
                self._connections[number] = UnitConnection(Peer(info.name, reachable(info)), self._shared)

    async def to_write_to(self, sample: int | None = None) -> list[int]:
        """Units for a write, the preferred ones first: those of this host take turns, then the others do.

        ``sample``: the first one, if it may have values. Those that are replaced stay in one unit then: what a value
        that moves leaves behind takes room until the sample is cleared.
        """
        units = await self.all(fresh=not self._connections)
        own = [number for number, unit in units if self._is_near(number, unit)]
        self._turn += 1
        others = [number for number, _ in units if number not in own]
        return _rotated(own, self._turn, sample) + _rotated(others, self._turn, sample)

    async def has_near(self) -> bool:
        """Whether some unit is reached through this host's sockets."""
        return any(self._is_near(number, unit) for number, unit in await self.all(fresh=False))

    def _is_near(self, number: int, unit: UnitConnection) -> bool:
        return unit.peer.address.startswith("ipc://") and (
            number not in self._infos or self._infos[number].host == host_id()
        )

    def least_capacity(self, units: Sequence[int]) -> int | None:
        """The capacity in bytes of the smallest of these units; None: unlimited."""
        infos = [self._infos[unit] for unit in units if unit in self._infos]
        return min((info.capacity_nbytes for info in infos if info.capacity_nbytes is not None), default=None)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def values_lost(by_field: Mapping[str, Sequence[int]]) -> UnitLostError:
    """The error that names values which were lost: samples by field."""
    each = [f"field {name!r} of {len(some)} samples, first {list(some[:_FEW])}" for name, some in by_field.items()]
    return UnitLostError(
        f"values were lost with a storage unit that has ended: {'; '.join(each)}. They count as not produced: their "
        f"producers must put them again. client.get_lost_samples(partition) names all."
    )


def _rotated(numbers: list[int], turn: int, sample: int | None) -> list[int]:
    """Another one first at each turn; for a sample always the same one."""
    count = len(numbers)
    at = turn % (count or 1) if sample is None else (sample * _SPREAD % 2**32 * count) >> 32
    return numbers[at:] + numbers[:at]


def reachable(info: UnitInfo) -> str:
    """The address at which this process reaches a unit: its socket on the same host, else the one for other hosts."""
    local = [address for address in info.addresses if address.startswith("ipc://")]
    remote = [address for address in info.addresses if not address.startswith("ipc://")]
    here = info.host == host_id() and any(os.path.exists(address.removeprefix("ipc://")) for address in local)
    return (local + remote if here else remote + local)[0]
