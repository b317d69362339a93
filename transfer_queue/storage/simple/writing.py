# SPDX-License-Identifier: Apache-2.0
"""One put's share for one unit: what of it is written into the arena, what travels in the message."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from transfer_queue.storage.pieces import IntArray, Piece, Positions
from transfer_queue.storage.selection import as_run, cut
from transfer_queue.storage.simple.arena import whole_pages
from transfer_queue.storage.simple.link import NO_NEWS, Place, UnitLink
from transfer_queue.storage.simple.messages import (
    Drop,
    Hold,
    Lease,
    Leased,
    Present,
    TakeBack,
    Write,
    Written,
    pack_indexes,
)
from transfer_queue.storage.simple.parts import Packer
from transfer_queue.storage.simple.unit import least_in_arena
from transfer_queue.storage.spans import Copy

if TYPE_CHECKING:
    from transfer_queue.storage.sources import Source

Sources = Mapping[str, "Source"]

_attempts = itertools.count(1)


class Terms(NamedTuple):
    """See ``Write``: the same for all units that a put touches. ``wait_s``: how long it may wait, for all of them.

    ``then``: only where it touches one, for all of it must be stored by then.
    """

    wait_s: float
    inline_nbytes: int
    number: int = 0
    absent: bool = False
    then: bytes = b""


class UnitWrite:
    """Steps: ``lease`` if that is not None, then ``message`` (which copies), then ``done`` or ``refused``; at any time
    ``give_up``, which changes nothing once it is done."""

    def __init__(self, link: UnitLink, indexes: IntArray, at: Positions, sources: Sources, terms: Terms) -> None:
        """``at``: which of the put's rows belong to this unit."""
        self._link = link
        mine = indexes[at]
        self._indexes = pack_indexes(mine)
        self._count = len(mine)
        self._run = at if isinstance(at, slice) else as_run(at)
        self._sources = sources
        self._terms = terms
        self._news = NO_NEWS
        self._attempt = 0
        """Its message, unless that is answered."""
        self._place: Place | None = None
        self._asked: Hold | None = None
        self._next: tuple[Hold, int] | None = None
        self._sent = 0.0
        self._arena = link.arena
        # Attached until all is written: else the lease would be somebody else's memory as soon as the link is closed.
        if self._arena is not None and not self._arena.use.more():
            self._arena = None
        self._sizes = self._placed_sizes()
        self._total = sum(map(whole_pages, self._sizes.values()))
        self.is_written = False
        self.said = b""
        """What the controller answered, if it was told."""

    def _placed_sizes(self) -> dict[str, int]:
        """Fields that the arena takes, with their bytes; none where frames are cheaper, or all there is."""
        sizes = {name: source.nbytes_of(self._run) for name, source in self._sources.items()}
        if sum(sizes.values()) <= self._terms.inline_nbytes or self._arena is None:
            return {}
        least = least_in_arena(self._terms.inline_nbytes)
        return {name: nbytes for name, nbytes in sizes.items() if nbytes >= least}

    @property
    def link(self) -> UnitLink:
        return self._link

    @property
    def is_leased(self) -> bool:
        """It has the memory that it needs, so its message is never refused for lack of room."""
        return self._place is not None

    def lease(self, wait_s: float) -> Lease | None:
        """What to ask for first."""
        if not self._total or self._arena is None:
            return None
        if self._link.take_ahead(self._total, self._keep):
            return None
        self._asked = self._arena.hold()
        return Lease(self._asked, self._total, self._indexes, list(self._sources), wait_s)

    def _keep(self, place: Place | None) -> None:
        self._place = place

    def leased(self, answer: Leased) -> None:
        if self._asked is not None and answer.offset >= 0:
            self._place = Place(self._asked, answer.offset, self._total)
        self._asked = None

    def message(self, pieces: dict[str, Piece], copy: Copy, wait_s: float) -> tuple[Write, list[object]]:
        """The write, whose values lie in the arena once ``copy`` has copied them, and its frames.

        ``pieces`` keeps what several units' frames are cut from.
        """
        packer, place, arena = Packer(), self._place, self._arena
        offset = place.offset if place is not None else 0
        for name, source in self._sources.items():
            if place is not None and arena is not None and name in self._sizes:
                nbytes = self._sizes[name]
                piece = source.stored_in(arena.view(offset, nbytes), self._run, self._count, copy)
                packer.add_at(name, slice(0, self._count), piece, offset)
                offset += whole_pages(nbytes)
                continue
            if name not in pieces:
                pieces[name] = source.piece()
            for where, part in cut(pieces[name], self._run):
                packer.add(name, where, part)
        lease = None if place is None else place.hold
        ahead = self._link.wish(self._total) if place is not None else 0
        if ahead and arena is not None:
            self._next = (arena.hold(), ahead)
        self._sent = time.monotonic()
        hold = None if self._next is None else self._next[0]
        terms, news, self._attempt = self._terms, self._link.news(), next(_attempts)
        self._news = news
        write = Write(
            self._indexes, packer.parts, packer.tables, wait_s, lease, hold, ahead, terms.number, terms.absent,
            news.settled, self._attempt, news.given_up, terms.then,
        )  # fmt: skip
        return write, packer.frames

    def done(self, answer: Written | Present) -> bool:
        """Was it written?"""
        self._place, self._attempt = None, 0
        if isinstance(answer, Present):
            self.give_up()
            return False
        self._link.told(self._news)
        following, self._next = self._next, None  # first, for what is kept must not be given up
        if following is not None and answer.ahead >= 0:
            self._link.keep_ahead(Place(following[0], answer.ahead, following[1]), self._sent)
        self._detach()
        self.is_written, self.said = True, answer.said
        return True

    def refused(self) -> None:
        """The unit has no room now: it keeps nothing of what was asked last."""
        self._asked, self._attempt = None, 0

    def undo(self) -> TakeBack | Drop:
        """Forget what it wrote. Without a number its samples are new, so nobody else's values are at stake."""
        if self._terms.number:
            return TakeBack("", self._terms.number, self._indexes)
        return Drop(self._indexes, list(self._sources))

    def give_up(self) -> None:
        """Nothing of what was asked for is wanted any more."""
        if self.is_written:
            return
        holds = [self._asked, self._place and self._place.hold, self._next and self._next[0]]
        for hold in holds:
            if self._arena is not None and hold is not None:
                self._arena.let_go(hold)
        if self._attempt:
            self._link.give_up(self._attempt)
        self._asked, self._place, self._next, self._attempt = None, None, None, 0
        self._detach()

    def _detach(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.use.less()
