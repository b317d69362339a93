# SPDX-License-Identifier: Apache-2.0
"""What attached clients keep from being recycled: leases they write into, pins they read from. Numbers and memory only.

A hold is named by its client, so that it can be let go also when the answer that granted it was never seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transfer_queue.storage.pieces import ByteArray

AHEAD_S = 2.0
"""A lease for a put to come is good for so long, counted by its client from the request that asked for it."""
_MARGIN_S = 0.1
_REMEMBERED = 1024


@dataclass(slots=True)
class Lease:
    """``expires`` is None once its client writes, or for a lease that was asked for on its own."""

    extent: ByteArray
    expires: float | None = None
    warned: bool = False


class Holds:
    """Per attached client."""

    def __init__(self) -> None:
        self._leases: dict[tuple[int, int], Lease] = {}
        self._pins: dict[tuple[int, int], list[ByteArray]] = {}
        self._clients: set[int] = set()
        # Let go before it was granted: the request that wants it is still on its way, and nobody waits for it.
        self._early: dict[tuple[int, int], None] = {}

    def enter(self, client: int) -> None:
        self._clients.add(client)

    def leave(self, client: int) -> None:
        """All holds of this client fall."""
        self._clients.discard(client)
        for holds in (self._leases, self._pins, self._early):
            for key in [key for key in holds if key[0] == client]:
                del holds[key]

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    @property
    def leased_nbytes(self) -> int:
        return sum(lease.extent.nbytes for lease in self._leases.values())

    def may(self, client: int, number: int) -> bool:
        """May this client have a hold of this number? Not once it let go of it, or ended."""
        if self._early.pop((client, number), 0) is None:
            return False
        return client in self._clients

    def lease(self, client: int, number: int, extent: ByteArray, expires: float | None = None) -> None:
        self._leases[client, number] = Lease(extent, None if expires is None else expires + _MARGIN_S)

    def pin(self, client: int, number: int, memory: Iterable[ByteArray]) -> None:
        self._pins[client, number] = list(memory)

    def take_lease(self, client: int, number: int) -> ByteArray | None:
        """The lease's memory, no longer a hold; None when there is no such lease."""
        lease = self._leases.pop((client, number), None)
        return None if lease is None else lease.extent

    def let_go(self, client: int, number: int) -> None:
        """The client has no more use for it."""
        key = (client, number)
        if self._leases.pop(key, None) is None and self._pins.pop(key, None) is None and client in self._clients:
            self._early[key] = None
            if len(self._early) > _REMEMBERED:
                del self._early[next(iter(self._early))]

    def begin(self, client: int, number: int) -> None:
        """The client said that it writes into this lease now."""
        lease = self._leases.get((client, number))
        if lease is not None:
            lease.expires = None

    def expire(self, now: float) -> bool:
        """Take back leases that nobody began to write into; True when there were any.

        A client says "begin" and then looks at its clock, so what it said in time is here in time, if not read yet:
        hence a second look, a turn of the server later.
        """
        taken = False
        for key, lease in list(self._leases.items()):
            if lease.expires is None or lease.expires > now:
                continue
            if lease.warned:
                del self._leases[key]
                taken = True
            else:
                lease.warned, lease.expires = True, now + _MARGIN_S
        return taken

    def next_deadline(self) -> float | None:
        if not self._leases:
            return None
        return min((lease.expires for lease in self._leases.values() if lease.expires is not None), default=None)
