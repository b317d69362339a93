# SPDX-License-Identifier: Apache-2.0
"""A client's link to one storage unit: its address, which way values go, memory leased ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from transfer_queue.storage.simple.holds import AHEAD_S
from transfer_queue.storage.simple.mapped import MappedArena, arena_path, map_arena
from transfer_queue.storage.simple.messages import Hold, UnitStats
from transfer_queue.transport.base import Peer
from transfer_queue.utils.recent import RecentSizes

_STEADY_WRITES = 2
"""Lease ahead from so many writes on: a lone one should leave nothing behind."""
_REMEMBERED = 1024

Path: TypeAlias = Literal["arena", "frames", "undecided"]


class LinkStats(UnitStats, frozen=True):
    """A unit's numbers, and what the client that asked for them knows.

    ``path``: how that client's values go. "arena": through memory that both map, but for small ones; "frames": in
    messages, as its configuration wants it or because trying failed; "undecided": it has put and got none there yet.
    """

    path: Path = "undecided"


class News(NamedTuple):
    """What a unit doesn't know yet: which open writes are settled, which messages are given up."""

    settled: list[int]
    given_up: list[int]


NO_NEWS = News([], [])


class Place(NamedTuple):
    """Memory of the arena that was given to this client to write into."""

    hold: Hold
    offset: int
    nbytes: int


class UnitLink:
    """Any thread may use it."""

    def __init__(self, peer: Peer, shared: bool = True) -> None:
        """``shared`` False: don't try to map the arena, values travel as frames."""
        self.peer = peer
        self._settled: set[int] = set()
        self._given_up: set[int] = set()
        self._lock = threading.Lock()
        self._trying = threading.Lock()  # held for as long as a unit may take to answer
        # Where there is nothing to try, it is decided.
        self._tried = not shared or arena_path(peer.address) is None
        self._arena: MappedArena | None = None
        self._ahead: list[tuple[Place, float]] = []
        self._sizes = RecentSizes()

    @property
    def arena(self) -> MappedArena | None:
        """Decided once, by trying."""
        if not self._tried:
            self.decide()
        return self._arena

    def decide(self) -> None:
        """Which way values go. May take seconds, where a unit takes this client in and doesn't answer."""
        with self._trying:
            if self._tried:
                return
            arena = map_arena(self.peer.address)
            with self._lock:
                if not self._tried:
                    self._arena, arena, self._tried = arena, None, True
        if arena is not None:  # the link was closed meanwhile
            arena.close()

    @property
    def path(self) -> Path:
        """What was decided; nothing is tried for it."""
        if not self._tried:
            return "undecided"
        return "frames" if self._arena is None else "arena"

    def stats(self, told: UnitStats) -> LinkStats:
        """What the unit told, as seen from here."""
        return LinkStats(**msgspec.structs.asdict(told), path=self.path)

    @property
    def mapped(self) -> MappedArena | None:
        """The arena, if it has been used already."""
        return self._arena

    def take_ahead(self, nbytes: int, keep: Callable[[Place | None], None]) -> bool:
        """Is there memory leased ahead that is large enough? It is this client's to write into from now on.

        ``keep`` is told before the unit is, which then waits for its word: Ctrl-C may come in between.
        """
        arena = self.arena
        while arena is not None and self._ahead:
            try:
                place, good_until = self._ahead.pop()
            except IndexError:  # another thread took it
                return False
            keep(place)
            # The clock after the word: only then it is sure that the unit heard it in time.
            if place.nbytes >= nbytes and arena.begin(place.hold) and time.monotonic() < good_until:
                return True
            arena.let_go(place.hold)
            keep(None)
        return False

    def wish(self, nbytes: int) -> int:
        """How much a write of so many bytes should lease for the next one, which gives back what it doesn't need."""
        self._sizes.note(nbytes)
        return 0 if self._ahead or len(self._sizes) < _STEADY_WRITES else self._sizes.room

    def keep_ahead(self, place: Place, asked: float) -> None:
        """``asked``: this client's clock when it sent the request that was answered with the place."""
        self._ahead.append((place, asked + AHEAD_S))

    def settle(self, number: int) -> None:
        """Tell the unit with the next write that it need not remember the open one of this number."""
        with self._lock:
            self._settled.add(number)

    def give_up(self, attempt: int) -> None:
        """Tell the unit with the next message that changes anything that this one must not any more."""
        with self._lock:
            self._given_up.add(attempt)
            if len(self._given_up) > _REMEMBERED:  # of a unit that answers nothing
                self._given_up.discard(min(self._given_up))

    def news(self) -> News:
        """What to tell it now."""
        if not self._settled and not self._given_up:
            return NO_NEWS
        with self._lock:
            return News(sorted(self._settled), sorted(self._given_up))

    def told(self, news: News) -> None:
        """The unit knows it."""
        if news is NO_NEWS:
            return
        with self._lock:
            self._settled.difference_update(news.settled)
            self._given_up.difference_update(news.given_up)

    def close(self) -> None:
        """Let go of the arena. What views of it are still used keep it mapped."""
        with self._lock:
            self._tried, arena, self._arena, self._ahead = True, self._arena, None, []
        if arena is not None:
            arena.close()
