# SPDX-License-Identifier: Apache-2.0
"""What the plane keeps of each session: its answered calls, the fields it produces, its freezes and its permits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import Indexes, Reply, Request

# ---- answered calls ----


class Record:
    """One answered call. ``reply`` None: it was received, and the record stays for what the call still holds."""

    holds: ClassVar[bool] = False
    """Whether it stays after its answer was received. It is then a reservation, a permit to replace values, a freeze,
    staged samples, or a batch that is still to be read.
    """

    __slots__ = ("kind", "reply")

    def __init__(self, kind: type[Request], reply: Reply) -> None:
        self.kind = kind
        self.reply: Reply | None = reply

    def undo(self) -> bool:
        """Undo the call, because the caller never received the answer. Returns False if its effect stays."""
        return False

    def cancel(self) -> bool:
        """The caller has cancelled the call. As ``undo``, which the end of its session also does."""
        return self.undo()

    def received(self) -> None:
        """The caller has the answer, and the record is gone."""
        return


class Calls:
    """The records of all sessions, bounded by the calls that clients leave unconfirmed, and the batches unread."""

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
        """The client has these answers. The record of a call that still holds something stays."""
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


# ---- producers ----


@dataclass(slots=True)
class _FieldProducers:
    """``alive``: sessions, and whether each has published the field. ``died_at``: the death of the last one to end."""

    alive: dict[str, bool] = field(default_factory=dict)
    died_at: float | None = None
    published_at: float | None = None


class Producers:
    """Detects lost producers, because a consumer that waits for their fields would wait forever."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._fields: dict[str, _FieldProducers] = {}

    def announced(self, client: str, fields: Iterable[str]) -> None:
        """The session has asked to write these fields. It counts as alive, although it may never publish them."""
        for name in fields:
            self._of(name).alive.setdefault(client, False)

    def published(self, client: str, fields: Iterable[str], now: float) -> None:
        """The session is a living producer of these fields."""
        for name in fields:
            producers = self._of(name)
            producers.alive[client] = True
            producers.published_at = now

    def _of(self, name: str) -> _FieldProducers:
        found = self._fields.get(name)
        if found is None:
            found = self._fields[name] = _FieldProducers()
        return found

    def gone(self, client: str, died: bool, now: float) -> set[float]:
        """The session left or died. Returns when the producers of some fields are lost, unless new ones come.

        A session that leaves without publishing a field doesn't affect the field's other producers.
        """
        grace_ends = set()
        for name, producers in list(self._fields.items()):
            published = producers.alive.pop(client, None)
            if died and published is not None:
                producers.died_at = now
            elif published:
                producers.died_at = None
            if published is None or producers.alive:
                continue
            if producers.died_at is None:
                del self._fields[name]
            else:
                grace_ends.add(producers.died_at + self._grace_s)
        return grace_ends

    def forget_deaths(self) -> None:
        """No field has lost its producers, whichever died so far."""
        for producers in self._fields.values():
            producers.died_at = None

    def missing(self, fields: Sequence[str], now: float) -> str | None:
        """A field with lost producers, or None."""
        for name in fields:
            producers = self._fields.get(name)
            if (
                producers is not None and not producers.alive and producers.died_at is not None
                and now >= producers.died_at + self._grace_s
            ):  # fmt: skip
                return name
        return None

    def by_field(self, now: float) -> dict[str, dict[str, float | int | None]]:
        """By field: the living sessions that produce it, and how long ago one of them did last."""
        return {
            name: {
                "alive": len(producers.alive),
                "published_s_ago": None if producers.published_at is None else now - producers.published_at,
            }
            for name, producers in self._fields.items()
        }


# ---- freezes, and permits to replace values ----

CallKey = tuple[str, int]
"""(client, number of the call)"""


@dataclass(slots=True)
class _Freeze:
    """Of all samples with an index below ``before``. ``kept``: those of them that were cleared since."""

    before: int
    kept: list[Indexes] = field(default_factory=list)

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        return indexes < self.before


class Freezes:
    """Freezes and permits, by the call that began each. A permit allows replacing values until its write ends."""

    def __init__(self) -> None:
        self._freezes: dict[CallKey, _Freeze] = {}
        self._permits: set[CallKey] = set()

    def begin(self, client: str, call: int, before: int) -> None:
        """Keep the values of all samples with an index below ``before``."""
        self._freezes[client, call] = _Freeze(before)

    def end(self, client: str, call: int) -> Indexes:
        """Returns what was cleared since, and may be deleted now."""
        freeze = self._freezes.pop((client, call), None)
        if freeze is None or not freeze.kept:
            return np.empty(0, dtype=np.int64)
        kept = np.sort(np.concatenate(freeze.kept), kind="stable")  # many times faster than np.unique, which hashes
        return self.keep(kept[np.diff(kept, prepend=-1) > 0])

    def keep(self, cleared: Indexes) -> Indexes:
        """Return the cleared samples that may lose their values now; ``end`` returns the others."""
        for freeze in self._freezes.values():
            held = freeze.holds(cleared)
            if held.any():
                freeze.kept.append(cleared[held])
                cleared = cleared[~held]
        return cleared

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes must keep their values."""
        held = np.zeros(len(indexes), dtype=np.bool_)
        for freeze in self._freezes.values():
            held |= freeze.holds(indexes)
        return held

    def __bool__(self) -> bool:
        return bool(self._freezes)

    def by_client(self) -> Counter[str]:
        """Freezes of each client."""
        return Counter(client for client, _ in self._freezes)

    # ---- permits to replace values ----

    @property
    def has_permits(self) -> bool:
        return bool(self._permits)

    def permit(self, client: str, call: int) -> None:
        """This call may replace values."""
        self._permits.add((client, call))

    def end_permit(self, client: str, call: int) -> None:
        """The write has ended."""
        self._permits.discard((client, call))

    def permits_by_client(self) -> Counter[str]:
        """Permits of each client."""
        return Counter(client for client, _ in self._permits)
