# SPDX-License-Identifier: Apache-2.0
"""Arena memory that sessions protect from reuse: leases to write, pins to read. Each is named by its call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from transfer_queue.storage.pieces import ByteArray

T = TypeVar("T")


class Leases:
    """Leases and pins per client and call. All of a client's end with its session."""

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, ByteArray]] = {}
        self._pins: dict[str, dict[int, list[ByteArray]]] = {}

    @property
    def num_pins(self) -> int:
        return sum(map(len, self._pins.values()))

    @property
    def leased_nbytes(self) -> int:
        return sum(extent.nbytes for own in self._leases.values() for extent in own.values())

    def lease(self, client: str, call: int, extent: ByteArray) -> None:
        self._leases.setdefault(client, {})[call] = extent

    def pin(self, client: str, call: int, extents: Iterable[ByteArray]) -> None:
        self._pins.setdefault(client, {})[call] = list(extents)

    def leased(self, client: str, call: int) -> ByteArray | None:
        """The memory of this lease; None if there is no such lease."""
        return self._leases.get(client, {}).get(call)

    def take(self, client: str, call: int) -> ByteArray | None:
        """Remove the lease and return its memory; None if there is no such lease."""
        return _take(self._leases, client, call)

    def release(self, client: str, call: int) -> bool:
        """End the lease or pin of this call. Returns whether there was one."""
        lease, pin = _take(self._leases, client, call), _take(self._pins, client, call)
        return lease is not None or pin is not None

    def memory_of(self, client: str) -> list[ByteArray]:
        """All memory that the client has leased or pinned."""
        pinned = self._pins.get(client, {}).values()
        return [*self._leases.get(client, {}).values(), *(extent for extents in pinned for extent in extents)]

    def end(self, client: str) -> bool:
        """The client's session has ended. Returns whether it had a lease or a pin."""
        lease, pin = self._leases.pop(client, None), self._pins.pop(client, None)
        return bool(lease or pin)

    def held_by(self) -> dict[str, tuple[int, int]]:
        """Per client, the number of its leases and of its pins."""
        clients = {**self._leases, **self._pins}
        return {client: (len(self._leases.get(client, ())), len(self._pins.get(client, ()))) for client in clients}


def _take(held: dict[str, dict[int, T]], client: str, call: int) -> T | None:
    own = held.get(client)
    found = None if own is None else own.pop(call, None)
    if own is not None and not own:
        del held[client]
    return found
