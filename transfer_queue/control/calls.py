# SPDX-License-Identifier: Apache-2.0
"""Answered calls by session, each until its caller says that it has the answer: what a retry gets, what is undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from transfer_queue.protocol import Reply, Request


class Record:
    """One answered call. ``reply`` None: the caller has it, and the record stays for what the call holds."""

    holds: ClassVar[bool] = False
    """Does it hold something that a later call ends: a reservation, a leave, a freeze, staged samples?"""

    __slots__ = ("kind", "reply")

    def __init__(self, kind: type[Request], reply: Reply) -> None:
        self.kind = kind
        self.reply: Reply | None = reply

    def undo(self) -> bool:
        """The caller never got the answer. Returns False where the call took effect for good."""
        return False

    def received(self) -> None:
        """The caller has the answer, and the record is gone."""
        return


class Calls:
    """The records of all sessions. Their number is bounded by how many calls a client leaves unconfirmed."""

    def __init__(self) -> None:
        self._sessions: dict[str, dict[int, Record]] = {}

    def add(self, client: str, call: int, record: Record) -> None:
        """In place of the one that this call has already: of the step before it."""
        session = self._sessions.get(client)
        if session is None:
            session = self._sessions[client] = {}
        session[call] = record

    def get(self, client: str, call: int) -> Record | None:
        session = self._sessions.get(client)
        return None if session is None else session.get(call)

    def take(self, client: str, call: int) -> Record | None:
        """Remove and return a record."""
        session = self._sessions.get(client)
        record = None if session is None else session.pop(call, None)
        if record is not None and not session:
            del self._sessions[client]
        return record

    def received(self, client: str, calls: Iterable[int]) -> None:
        """The client has these answers. What a call holds stays recorded until another call ends it."""
        for call in calls:
            record = self.get(client, call)
            if record is None:
                continue
            if record.holds:
                record.reply = None
            else:
                self.take(client, call)
                record.received()

    def end(self, client: str) -> list[Record]:
        """The session has ended: remove and return its records, the latest first."""
        return list(self._sessions.pop(client, {}).values())[::-1]

    def of(self, client: str) -> list[tuple[int, Record]]:
        """Records of one session by call number."""
        return list(self._sessions.get(client, {}).items())

    def clients(self) -> list[str]:
        """Sessions with records."""
        return list(self._sessions)

    def __iter__(self) -> Iterator[Record]:
        for session in self._sessions.values():
            yield from session.values()
