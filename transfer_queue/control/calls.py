# SPDX-License-Identifier: Apache-2.0
"""Answered calls by session, until the caller confirms receipt: for retries, and to undo unreceived calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from transfer_queue.protocol import Reply, Request


class Record:
    """One answered call. ``reply`` None: it was received, and the record stays for what the call still holds."""

    holds: ClassVar[bool] = False
    """Whether a later call must end it: a reservation, a permit to replace values, a freeze, or staged samples."""

    __slots__ = ("kind", "reply")

    def __init__(self, kind: type[Request], reply: Reply) -> None:
        self.kind = kind
        self.reply: Reply | None = reply

    def undo(self) -> bool:
        """Undo the call, because the caller never received the answer. Returns False if its effect stays."""
        return False

    def received(self) -> None:
        """The caller has the answer, and the record is gone."""
        return


class Calls:
    """The records of all sessions, bounded by the number of calls that clients leave unconfirmed."""

    def __init__(self) -> None:
        self._sessions: dict[str, dict[int, Record]] = {}

    def add(self, client: str, call: int, record: Record) -> None:
        """Add a record, replacing that of an earlier step of the same call."""
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
        """The client has these answers. A call that still holds something stays recorded until another call ends it."""
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
        """End the session: remove and return its records, the latest first."""
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
