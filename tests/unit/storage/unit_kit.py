# SPDX-License-Identifier: Apache-2.0
"""A unit without a server, which is handed each request with the time, and its clients without an arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.calls import Answer, Call, Turn
from transfer_queue.protocol import Done, Reply, Request, pack_indexes
from transfer_queue.storage.messages import (
    Columns,
    Commit,
    Delete,
    EndSession,
    Packer,
    Read,
    Rows,
    Write,
    Written,
)
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.storage.wire import WireColumn, dense_layout


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


Answers = list[tuple[str, Any]]
"""(client, "written 3", "done 5" or the reply itself)"""


class Asker:
    """Sends to one unit; its calls are numbered from 1."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.unit = LoneUnit("u0", capacity_bytes)
        self.calls = 0

    def in_short_turns(self) -> None:
        """Each turn of the unit has time for one step of long work."""
        self.unit.calls.turn = Turn(itertools.count(step=1.0).__next__)

    def number(self) -> int:
        self.calls += 1
        return self.calls

    def ask(self, request: Request, frames: Sequence[Any] = (), now: float = 0.0, client: str = "me") -> Answers:
        views = [memoryview(frame).cast("B") for frame in frames]
        return answers(self.unit.handle(client, request, views, now))

    def write(
        self, index: int, kib: int, now: float = 0.0, wait_s: float = 10.0, client: str = "me", commit: bool = True
    ) -> Answers:
        return self.put([index], kib * 1024, now, wait_s, client, commit)

    def put(
        self, indexes: Sequence[int], row_nbytes: int, now: float = 0.0, wait_s: float = 0.0, client: str = "me",
        commit: bool = True,
    ) -> Answers:  # fmt: skip
        """Rows of zeros; the write is committed, if it does not wait."""
        count = len(indexes)
        wire = WireColumn(dense_layout("uint8", 1, (row_nbytes,)), count, np.zeros(count * row_nbytes, np.uint8))
        packer = Packer()
        packer.add("a", slice(0, count), wire)
        columns = Columns(packer.headers, packer.tables)
        write = Write(self.number(), pack_indexes(np.array(indexes)), columns, wait_s)
        replies = self.ask(write, packer.frames, now, client)
        if commit and (client, f"written {write.id}") in replies:
            _, *let_in = self.ask(Commit(0, [(client, write.id)]), now=now, client=client)
            replies += let_in
        return replies

    def commit(self, write: int) -> None:
        """There is nothing to commit if all samples of the write were cleared, and that is no error."""
        assert self.ask(Commit(number := self.number(), [("me", write)])) == [("me", f"done {number}")]

    def end_session(self, client: str, *published: int) -> Answers:
        """By the controller, which says which of the client's writes are published."""
        return self.ask(EndSession(self.number(), client, [(client, call) for call in published]), client="controller")

    def has(self, *indexes: int, published: Sequence[int] = ()) -> bool:
        writes = [("me", call) for call in published]
        ((_, answer),) = self.ask(Read(self.number(), pack_indexes(np.array(indexes)), ["a"], published=writes))
        return isinstance(answer, Rows) and {part.field for part in answer.headers} == {"a"}

    def delete(self, *indexes: int, now: float = 0.0) -> Answers:
        return self.ask(Delete(self.number(), pack_indexes(np.array(indexes))), now=now)

    def stats(self) -> dict[str, Any]:
        """All numbers but those that are 0."""
        return {name: value for name, value in msgspec.structs.asdict(self.unit.stats()).items() if value}


def answers(replies: list[UnitReply]) -> Answers:
    return [(client, plain(reply)) for client, reply, _ in replies]


def plain(reply: Reply) -> Any:
    if isinstance(reply, Written):
        return f"written {reply.id}"
    return f"done {reply.id}" if isinstance(reply, Done) else reply
