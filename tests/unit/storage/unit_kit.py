# SPDX-License-Identifier: Apache-2.0
"""A storage unit without a server: each request is handed to it, with the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transfer_queue.calls import Answer, Call
from transfer_queue.protocol import Reply, Request
from transfer_queue.storage.unit.unit import StorageUnit


class UnitReply(NamedTuple):
    """An answer, the client it goes to, and its frames."""

    client: str
    reply: Reply
    frames: Sequence[Any] = ()


class LoneUnit(StorageUnit):
    """What a front does with the unit of its process, without one."""

    def handle(self, client: str, request: Request, frames: list[memoryview], now: float) -> list[UnitReply]:
        """Serve one request. Returns its answer, unless it waits for room, and answers to requests that got room."""
        self.tick(now)
        return _replies(self.calls.handle(Call(client, request, now, frames), now))

    def expire(self, now: float) -> list[UnitReply]:
        """Answer requests past their deadline, return memory, and move live rows of mostly dead blocks."""
        self.trim(now)
        return _replies(self.calls.expire(now))

    def next_deadline(self) -> float | None:
        """When ``expire`` has work: minus infinity for at once, None for never."""
        deadlines = [self.calls.next_deadline(), self.next_trim()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def cancel(self, client: str, number: int, now: float) -> list[UnitReply]:
        """Cancel this call: free what it wrote, leased or pinned."""
        self.tick(now)
        self.calls.cancel(client, number)
        return _replies(self.calls.work())

    def client_gone(self, client: str, now: float) -> list[UnitReply]:
        """The client's session has ended. Its uncommitted writes stay until it is known which were published."""
        self.tick(now)
        return _replies(self.calls.client_gone(client, now, True))


def _replies(answers: list[Answer]) -> list[UnitReply]:
    return [UnitReply(answer.call.client, answer.reply, answer.values) for answer in answers]
