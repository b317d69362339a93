# SPDX-License-Identifier: Apache-2.0
"""One unit's share of a write: which columns go to leased memory, and which travel in the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transfer_queue.storage.pieces import Piece, Positions
from transfer_queue.storage.selection import cut
from transfer_queue.storage.shm.arena import whole_pages
from transfer_queue.storage.shm.connection import UnitConnection
from transfer_queue.storage.shm.messages import Columns, Lease
from transfer_queue.storage.shm.parts import Packer
from transfer_queue.storage.shm.unit import least_in_arena
from transfer_queue.storage.spans import Copy

if TYPE_CHECKING:
    from transfer_queue.storage.sources import Source

Sources = Mapping[str, "Source"]


class UnitWrite:
    """Call ``lease`` first, unless it returns None; then ``columns``, which copies."""

    def __init__(
        self, connection: UnitConnection, rows: Positions, count: int, sources: Sources, inline_nbytes: int
    ) -> None:
        """``rows``: the ``count`` rows of the write that belong to this unit."""
        self.connection = connection
        self._rows = rows
        self._count = count
        self._sources = sources
        self._arena = connection.arena
        self._sizes = self._sizes_in_arena(inline_nbytes)
        self._offset = -1
        self.lease_call = 0
        """The call that leases memory for it; 0: none."""

    def _sizes_in_arena(self, inline_nbytes: int) -> dict[str, int]:
        """Bytes of the fields that go to the arena; none if frames are cheaper, or without an arena."""
        sizes = {name: source.nbytes_of(self._rows) for name, source in self._sources.items()}
        if sum(sizes.values()) <= inline_nbytes or self._arena is None:
            return {}
        least = least_in_arena(inline_nbytes)
        return {name: nbytes for name, nbytes in sizes.items() if nbytes >= least}

    @property
    def fields(self) -> list[str]:
        return list(self._sources)

    def lease(self, call: int, wait_s: float, replaced: bytes) -> Lease | None:
        """The lease to request first. ``replaced``: packed indexes of samples that this write replaces."""
        total = sum(map(whole_pages, self._sizes.values()))
        if not total:
            return None
        self.lease_call = call
        return Lease(call, total, replaced, self.fields if replaced else [], wait_s)

    def leased(self, offset: int) -> None:
        """Take the unit's answer; -1: no address range is left."""
        self._offset = offset
        if offset < 0:
            self.lease_call = 0

    def columns(self, pieces: dict[str, Piece], copy: Copy) -> tuple[Columns, list[Any]]:
        """Return the message's columns and frames. Arena values are there once ``copy`` is finished.

        ``pieces`` caches what several units' frames are cut from.
        """
        packer, offset = Packer(), self._offset
        for name, source in self._sources.items():
            nbytes = self._sizes.get(name)
            if nbytes is not None and self.lease_call and self._arena is not None:
                piece = source.stored_in(self._arena.view(offset, nbytes), self._rows, self._count, copy)
                packer.add_at(name, slice(0, self._count), piece, offset)
                offset += whole_pages(nbytes)
                continue
            if name not in pieces:
                pieces[name] = source.piece()
            for where, part in cut(pieces[name], self._rows):
                packer.add(name, where, part)
        return Columns(packer.parts, packer.tables, self.lease_call), packer.frames
