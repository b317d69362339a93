# SPDX-License-Identifier: Apache-2.0
"""What the answers to one get point at, kept as it is until the last one who looks at it is gone."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.storage.pieces import ByteArray, Piece, Positions
from transfer_queue.storage.simple.link import UnitLink
from transfer_queue.storage.simple.mapped import MappedArena
from transfer_queue.storage.simple.messages import Hold
from transfer_queue.storage.simple.parts import View
from transfer_queue.storage.simple.views import Segment, Use, lay


class Pins:
    """One per unit at most. ``use`` has one user: the get itself."""

    def __init__(self, links: Sequence[UnitLink]) -> None:
        self._links = links
        self._held: dict[int, tuple[MappedArena, Hold]] = {}
        self.use = Use(self._let_go)

    def ask(self, unit: int) -> Hold | None:
        """A pin to ask this unit for, taken as given until ``keep`` tells; None where all answers are frames."""
        arena = self._links[unit].arena
        if arena is None or not arena.use.more():
            return None
        pin = arena.hold()
        self._held[unit] = arena, pin
        return pin

    def keep(self, unit: int, pinned: bool) -> None:
        """Did the unit answer with places?"""
        if not pinned and unit in self._held:
            arena, _ = self._held.pop(unit)
            arena.use.less()

    def view(self, unit: int) -> View | None:
        """The unit's arena, if it answered with places."""
        return self._held[unit][0].view if unit in self._held else None

    def lay(self, parts: Sequence[tuple[Positions, Piece]]) -> ByteArray | None:
        """See ``views.lay``; the arenas stay attached that long."""
        return lay(parts, self._find, self.use)

    def _find(self, memory: ByteArray) -> Segment | None:
        found = (arena.segment(memory) for arena, _ in self._held.values())
        return next((segment for segment in found if segment is not None), None)

    def _let_go(self) -> None:
        for arena, pin in self._held.values():
            arena.let_go(pin)
            arena.use.less()
