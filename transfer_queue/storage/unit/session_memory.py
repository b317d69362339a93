# SPDX-License-Identifier: Apache-2.0
"""Memory of clients' sessions, in the server: leases to write, pins to read, uncommitted writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from transfer_queue.storage.messages import FieldColumns
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.wire import ByteArray, IntArray, Positions, WireColumn, as_run, cut

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

    def release(self, client: str, call: int) -> None:
        """End the lease or pin of this call, if there is one."""
        _take(self._leases, client, call)
        _take(self._pins, client, call)

    def memory_of(self, client: str) -> list[ByteArray]:
        """All memory that the client has leased or pinned."""
        pinned = self._pins.get(client, {}).values()
        return [*self._leases.get(client, {}).values(), *(extent for extents in pinned for extent in extents)]

    def end(self, client: str) -> None:
        """The client's session has ended."""
        self._leases.pop(client, None)
        self._pins.pop(client, None)

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


_REMEMBERED = 1024


class UncommittedWrite(NamedTuple):
    """Rows for these indexes, as received. ``leased``: some columns lie in memory that was leased for them."""

    indexes: IntArray
    columns: FieldColumns
    leased: bool = False

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for _, _, column in self.columns)

    def count_into(self, totals: dict[str, int], arena: Arena | None) -> None:
        """Add its bytes to those that came in messages (``message``) and in leased memory of the arena (``memory``)."""
        memory = 0
        if arena is not None and self.leased:
            memory = sum(each.data.nbytes for _, _, each in self.columns if arena.offset_of(each.data) >= 0)
        totals["memory"] += memory
        totals["message"] += self.nbytes - memory

    def holds(self, values: Mapping[str, IntArray]) -> bool:
        """Return whether it has one of these values. ``values``: indexes by field."""
        return any(
            name in values and bool(np.isin(self.indexes[at], values[name]).any()) for name, at, _ in self.columns
        )

    def without(self, indexes: IntArray) -> UncommittedWrite:
        """The same write without the rows of these indexes."""
        kept = ~np.isin(self.indexes, indexes)
        columns = [(name, where, rest) for name, at, column in self.columns for where, rest in _kept(at, column, kept)]
        return self._replace(columns=columns)


def _kept(at: Positions, column: WireColumn, kept: NDArray[np.bool_]) -> list[tuple[Positions, WireColumn]]:
    """The rows of a column that are kept, and their positions. ``kept``: by position."""
    rows = np.flatnonzero(kept[at])
    if len(rows) == column.rows:
        return [(at, column)]
    if not len(rows):
        return []
    positions = (np.arange(at.start, at.stop) if isinstance(at, slice) else at)[rows]
    return [(as_run(positions[where]), rest) for where, rest in cut(column, as_run(rows))]


class Uncommitted:
    """By client and call. Ended clients are remembered, because one of their messages may still arrive."""

    def __init__(self) -> None:
        self._writes: dict[str, dict[int, UncommittedWrite]] = {}
        self._ended: dict[str, None] = {}
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._writes)

    def has_ended(self, client: str) -> bool:
        return client in self._ended

    def add(self, client: str, call: int, write: UncommittedWrite) -> None:
        self.take(client, call)
        self._writes.setdefault(client, {})[call] = write
        self.nbytes += write.nbytes

    def take(self, client: str, call: int) -> UncommittedWrite | None:
        """Remove the write of this call, to commit or to abort it."""
        own = self._writes.get(client, {})
        write = own.pop(call, None)
        if write is None:
            return None
        if not own:
            del self._writes[client]
        self.nbytes -= write.nbytes
        return write

    def take_holding(self, values: Mapping[str, IntArray]) -> list[UncommittedWrite]:
        """Remove every write that has one of these missing values. ``values``: indexes by field.

        A reader only asks for published values, so these writes were published and their commits are on the way.
        """
        found = [
            (client, call) for client, own in self._writes.items() for call, write in own.items() if write.holds(values)
        ]
        return [write for key in found if (write := self.take(*key)) is not None]

    def delete(self, indexes: IntArray) -> None:
        """Delete the rows of these cleared samples, which a commit would bring back."""
        affected = [
            (client, call, write)
            for client, own in self._writes.items()
            for call, write in own.items()
            if np.isin(write.indexes, indexes).any()
        ]
        for client, call, write in affected:
            self.take(client, call)
            rest = write.without(indexes)
            if rest.columns:
                self.add(client, call, rest)

    def end(self, client: str, published: Iterable[int]) -> list[UncommittedWrite]:
        """End the client. Returns its published writes, which must be committed; its other writes are deleted."""
        self._ended[client] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        committed = [write for call in published if (write := self.take(client, call)) is not None]
        for call in list(self._writes.get(client, ())):
            self.take(client, call)
        return committed
