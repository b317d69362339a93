# SPDX-License-Identifier: Apache-2.0
"""One read of a batch: what each unit is asked, what its answer holds, and the pins that keep it there meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.base import Wish as WishOfAnyBackend
from transfer_queue.storage.pieces import IntArray, Piece, Positions
from transfer_queue.storage.selection import as_run
from transfer_queue.storage.simple.link import UnitLink
from transfer_queue.storage.simple.messages import (
    Answer,
    Granted,
    Read,
    Rows,
    Wish,
    decode_answer,
    decode_granted,
    encode,
    expect,
    pack_indexes,
)
from transfer_queue.storage.simple.parts import unpack_parts
from transfer_queue.storage.simple.pins import Pins
from transfer_queue.storage.simple.routing import Shares

if TYPE_CHECKING:
    from tensordict import TensorDict

Parts: TypeAlias = dict[str, list[tuple[Positions, Piece]]]
Frames: TypeAlias = Sequence[memoryview]


class Reading:
    """What lies in arenas stays there until ``close``."""

    def __init__(self, links: Sequence[UnitLink], names: Sequence[str]) -> None:
        """``names``: of the fields, ascending."""
        self._links = links
        self._names = list(names)
        self.pins = Pins(links)

    def requests(self, wanted: IntArray, shares: Shares) -> list[tuple[int, Read]]:
        """(unit, what to ask it)."""
        return [(unit, Read(pack_indexes(wanted[at]), self._names, self.pins.ask(unit))) for unit, at in shares]

    def wish(self) -> bytes:
        """The same for samples that are not known yet."""
        return encode(Wish(self._names, [self.pins.ask(unit) for unit in range(len(self._links))]))

    def small_wish(self) -> bytes:
        """The same for values that need no pin; empty where it can't be known later if they were changed meanwhile.

        Nothing is mapped for it: who only asks for metadata has nothing to do with the units.
        """
        if all(link.mapped is None for link in self._links):
            return b""
        return _small_wish(tuple(self._names), len(self._links))

    def is_current(self, unit: int, rows: Rows) -> bool:
        """Has no value of this unit been replaced or forgotten since it gave these?"""
        arena = self._links[unit].mapped
        return arena is not None and arena.changes.count == rows.changes

    def parts(self, shares: Shares, answers: Iterable[tuple[Answer, Frames]]) -> Parts:
        """By field; ``answers`` in the order of the shares."""
        parts: Parts = {name: [] for name in self._names}
        for (unit, at), (answer, frames) in zip(shares, answers, strict=True):
            rows = expect(answer, Rows)
            self.pins.keep(unit, rows.pinned)
            count = at.stop if isinstance(at, slice) else len(at)
            for name, where, piece in unpack_parts(rows.parts, rows.tables, frames, count, self.pins.view(unit)):
                parts[name].append((where if isinstance(at, slice) else as_run(at[where]), piece))
        return parts

    def close(self) -> None:
        self.pins.use.less()


@functools.lru_cache(256)
def _small_wish(names: tuple[str, ...], num_units: int) -> bytes:
    return encode(Wish(list(names), [None] * num_units, True))


class UnitWish(WishOfAnyBackend):
    """See ``storage.base.Wish``."""

    def __init__(
        self,
        reading: Reading,
        shares_of: Callable[[Sequence[int]], Shares],
        unpack: Callable[[Parts, int], TensorDict],
        num_units: int,
        small: bool,
    ) -> None:
        self._reading = reading
        self._shares_of = shares_of
        self._unpack = unpack
        self._units = range(num_units)
        self._unasked: set[int] = set()
        self._granted = Granted([])
        self._small = small
        self.message = reading.small_wish() if small else reading.wish()

    def answered(self, frames: Frames) -> None:
        if frames:
            self._granted = decode_granted(frames[0])
        self._unasked = set(self._units) - {unit for unit, _, _ in self._granted.answers}

    @property
    def came(self) -> bool:
        return bool(self._granted.answers)

    def values(self, indexes: Sequence[int], frames: Frames) -> TensorDict | None:
        if not self.came or not len(indexes):
            return None
        answers: dict[int, tuple[Answer, Frames]] = {}
        at = 1
        for unit, header, count in self._granted.answers:
            answers[unit] = decode_answer(header), frames[at : at + count]
            at += count
        if self._small and not all(self._is_current(unit, answer) for unit, (answer, _) in answers.items()):
            return None
        shares = self._shares_of(indexes)
        if [unit for unit, _ in shares] != list(answers):
            raise ProtocolError(f"values came from units {list(answers)}, the batch lies in {shares}")
        return self._unpack(self._reading.parts(shares, answers.values()), len(indexes))

    def _is_current(self, unit: int, answer: Answer) -> bool:
        return isinstance(answer, Rows) and self._reading.is_current(unit, answer)

    def close(self) -> None:
        for unit in self._unasked:  # else it would be told to let go of what it never had
            self._reading.pins.keep(unit, False)
        self._reading.close()
