# SPDX-License-Identifier: Apache-2.0
"""What the answers to one get point at, kept as it is until the last one who looks at it is gone."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.storage.pieces import ByteArray, Piece, Positions
from transfer_queue.storage.simple.link import UnitLink
from transfer_queue.storage.simple.mapped import MappedArena
from transfer_queue.storage.simple.messages import Hold, Read
from transfer_queue.storage.simple.views import Segment, Use, lay


class Pins:
    """``use`` has one user: the get itself."""

    def __init__(self, reads: Sequence[tuple[int, Read]], links: Sequence[UnitLink]) -> None:
        self._asked = [(links[unit].arena, read.pin) for unit, read in reads]
        # Or so it must be taken, until the answers tell.
        self._held: list[tuple[MappedArena, Hold]] = [
            (arena, pin) for arena, pin in self._asked if arena is not None and pin is not None
        ]
        self.use = Use(self._let_go)

    def keep(self, pinned: Sequence[bool]) -> None:
        """Which of the reads were answered with places."""
        held = [place for place, is_pinned in zip(self._asked, pinned, strict=True) if is_pinned]
        self._held = [(arena, pin) for arena, pin in held if arena is not None and pin is not None]

    def lay(self, parts: Sequence[tuple[Positions, Piece]]) -> ByteArray | None:
        """See ``views.lay``; the arenas stay attached that long."""
        return lay(parts, self._find, self.use)

    def _find(self, memory: ByteArray) -> Segment | None:
        found = (arena.segment(memory) for arena, _ in self._held)
        return next((segment for segment in found if segment is not None), None)

    def _let_go(self) -> None:
        for arena, pin in self._held:
            arena.let_go(pin)
