# SPDX-License-Identifier: Apache-2.0
"""One put over the units that it touches: at once where all have room, else one by one in the order all puts share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from transfer_queue.errors import from_wire
from transfer_queue.storage.pieces import IntArray, Piece, Positions
from transfer_queue.storage.simple.link import UnitLink
from transfer_queue.storage.simple.messages import (
    Answer,
    Failed,
    Leased,
    Present,
    Written,
    decode_answer,
    encode,
    expect,
)
from transfer_queue.storage.simple.writing import Sources, Terms, UnitWrite
from transfer_queue.transport.base import Call, Caller


class SpreadPut:
    """While it waits for room in one unit it holds nothing in that unit or a later one.

    Else two puts could each hold what the other waits for; and as neither is published, no consumer could free it.
    """

    def __init__(
        self,
        caller: Caller,
        shares: Sequence[tuple[UnitLink, Positions]],
        indexes: IntArray,
        sources: Sources,
        terms: Terms,
        timeout_s: float,
        meanwhile: Callable[[], None],
    ) -> None:
        """Args:
        shares: (unit, positions in ``indexes``), units in the order of the configuration.
        meanwhile: Done once, when the units have something to do.
        """
        self._caller = caller
        self._shares = shares
        self._indexes = indexes
        self._sources = sources
        self._terms = terms
        self._timeout_s = timeout_s
        self._meanwhile = [meanwhile]
        self._writes: list[UnitWrite] = []
        self._pieces: dict[str, Piece] = {}

    async def carry_out(self) -> bool:
        """False: a unit holds a value where there must be none; other units may have stored their share."""
        deadline = time.monotonic() + self._terms.wait_s
        several = len(self._shares) > 1
        try:
            outcome = await self._at_once(0.0 if several else self._terms.wait_s)
            if several and isinstance(outcome, Failed):
                await self._step_back()
                return await self._in_order(deadline)
            return _checked(outcome)
        finally:
            self._give_up()

    async def _at_once(self, wait_s: float) -> bool | Failed:
        self._prepare()
        refusal = await self._lease(self._writes, wait_s)
        return refusal or await self._write(self._writes, wait_s)

    async def _step_back(self) -> None:
        """Hold nothing, and forget what was stored where there had been no value."""
        undone = [Call(write.link.peer, encode(write.undo())) for write in self._writes if write.is_written]
        self._give_up()
        if undone:
            await self._ask(undone)

    async def _in_order(self, deadline: float) -> bool:
        self._prepare()
        leased = []
        for write in self._writes:
            refusal = await self._lease([write], _left(deadline))
            if refusal is None and write.is_leased:
                leased.append(write)
            elif not _checked(refusal or await self._write([write], _left(deadline))):
                return False
        return not leased or _checked(await self._write(leased, 0.0))

    def _prepare(self) -> None:
        self._writes = []
        for link, at in self._shares:
            self._writes.append(UnitWrite(link, self._indexes, at, self._sources, self._terms))

    @property
    def said(self) -> bytes:
        """What the controller answered to what should be told it then; empty: it wasn't told."""
        return self._writes[0].said

    def _give_up(self) -> None:
        for write in self._writes:
            write.give_up()

    async def _lease(self, writes: Sequence[UnitWrite], wait_s: float) -> Failed | None:
        """What a unit without room said."""
        asked = [(write, lease) for write in writes if (lease := write.lease(wait_s)) is not None]
        if not asked:
            return None
        answers = await self._ask(Call(write.link.peer, encode(lease)) for write, lease in asked)
        refusal = None
        for (write, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Failed):
                refusal = answer
                write.refused()
            else:
                write.leased(expect(answer, Leased))
        return refusal

    async def _write(self, writes: Sequence[UnitWrite], wait_s: float) -> bool | Failed:
        """True: all are written. Present anywhere counts for more than no room elsewhere."""
        outcome: bool | Failed = True
        # One unit reads its message while the share of the next is copied.
        for write, answer in zip(writes, await self._ask(self._messages(writes, wait_s)), strict=True):
            if isinstance(answer, Failed):
                write.refused()
                outcome = outcome and answer
            elif not write.done(answer if isinstance(answer, Present) else expect(answer, Written)):
                outcome = False
        return outcome

    def _messages(self, writes: Iterable[UnitWrite], wait_s: float) -> Iterator[Call]:
        """What each unit is told, when its share is copied; large shares are copied together, which takes less time."""
        from transfer_queue.storage.copying import Copies

        copies = Copies(into_mapped=True)
        made: list[Call] = []
        for write in writes:
            request, frames = write.message(self._pieces, copies, wait_s)
            made.append(Call(write.link.peer, encode(request), frames))
            if not copies.worth_sharing:
                copies.finish()
                yield from made
                made = []
        copies.finish()
        yield from made
        while self._meanwhile:
            self._meanwhile.pop()()

    async def _ask(self, calls: Iterable[Call]) -> list[Answer]:
        """Answers, among them of failures only that there was no room yet."""
        replies = await self._caller.call_many(calls, self._terms.wait_s + self._timeout_s)
        answers = [decode_answer(reply.header) for reply in replies]
        for answer in answers:
            if isinstance(answer, Failed) and not answer.later:
                raise from_wire(answer.code, answer.text)
        return answers


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _checked(outcome: bool | Failed) -> bool:
    if isinstance(outcome, Failed):
        raise from_wire(outcome.code, outcome.text)
    return outcome
