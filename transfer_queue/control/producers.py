# SPDX-License-Identifier: Apache-2.0
"""Producers: which sessions produce which fields. A consumer of a field without any would wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transfer_queue.calls import Call, Calls, Holding, Until

_MOST_NOTES = 256
_MOST_NAMED = 5
"""Producers of a field."""
_LONGEST = 500
"""Characters of a note's texts."""


@dataclass(slots=True, eq=False)
class _Producers:
    """``alive``: by session, what it holds. ``died_at``, ``last``: when the last one died, and which."""

    alive: dict[str, _Producing] = field(default_factory=dict)
    died_at: float | None = None
    last: str = ""
    published_at: float | None = None


class _Producing(Holding):
    """A session is a living producer of a field until it ends. ``published``: it has published the field."""

    until = Until.SESSION

    def __init__(self, producers: Producers, name: str, client: str) -> None:
        self._producers, self._name, self._client = producers, name, client
        self.published = False

    def end(self, died: bool) -> None:
        self._producers.gone(self._name, self._client, died)


class Producers:
    """Detects lost producers: ``lost`` is called when those of some field are lost, unless new ones come."""

    def __init__(self, calls: Calls, grace_s: float, lost: Callable[[], None]) -> None:
        self._calls = calls
        self._grace_s = grace_s
        self._lost = lost
        self._fields: dict[str, _Producers] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        self._left: dict[str, tuple[str, set[str]]] = {}

    def announced(self, call: Call, fields: Iterable[str]) -> None:
        """The call's session is about to write these fields. It counts as alive, although it may never publish them."""
        for name in fields:
            found = self._fields.get(name)
            if found is None or call.client not in found.alive:
                self._producing(call, name)

    def published(self, call: Call, fields: Iterable[str]) -> None:
        """The call's session is a living producer of these fields."""
        self.announced(call, fields)
        for name in fields:
            producers = self._fields[name]
            producers.alive[call.client].published = True
            producers.published_at = self._calls.now

    def _producing(self, call: Call, name: str) -> None:
        producers = self._fields.setdefault(name, _Producers())
        for of_an_earlier_process in (self._notes, self._left):
            of_an_earlier_process.pop(call.client.rpartition("_")[0], None)
        producers.alive[call.client] = own = _Producing(self, name, call.client)
        self._calls.hold(call, own)

    def gone(self, name: str, client: str, died: bool) -> None:
        """A session that produces this field has left or died.

        One that leaves without publishing the field doesn't affect the field's other producers.
        """
        producers, own = self._fields[name], client.rpartition("_")[0]
        published = producers.alive.pop(client).published
        note = self._notes.get(own)
        if died or (note is not None and not note["planned"]):
            producers.died_at, producers.last = self._calls.now, client
        elif published:
            producers.died_at = None
        if producers.alive:
            return
        if producers.died_at is None:
            del self._fields[name]
            self._left.setdefault(own, (client, set()))[1].add(name)
            _keep_latest(self._left)
        else:
            self._calls.at(producers.died_at + self._grace_s, self._lost)

    def forget_deaths(self) -> None:
        """From now on, no field counts as having lost its producers by a death so far."""
        for producers in self._fields.values():
            producers.died_at = None

    def missing(self, fields: Sequence[str], now: float) -> str | None:
        """A field with lost producers, or None."""
        return next((name for name in fields if self._are_lost(self._fields.get(name), now)), None)

    def _are_lost(self, producers: _Producers | None, now: float) -> bool:
        return (
            producers is not None and not producers.alive and producers.died_at is not None
            and now >= producers.died_at + self._grace_s
        )  # fmt: skip

    def note(self, client: str, how: str, last_line: str, planned: bool) -> None:
        """How a producer's process has ended. Its session may end later."""
        self._notes.pop(client, None)
        self._notes[client] = {"how": how[:_LONGEST], "last_line": last_line[:_LONGEST], "planned": planned}
        _keep_latest(self._notes)
        last, fields = self._left.pop(client, ("", ()))
        for name in () if planned else fields:  # it said goodbye, as Python does after an error, too
            producers = self._fields.setdefault(name, _Producers())
            producers.died_at, producers.last = self._calls.now, last
            self._calls.at(self._calls.now + self._grace_s, self._lost)

    def lost_by_field(self, now: float) -> dict[str, dict[str, Any]]:
        """By field with lost producers: the last ``client`` to die, and what is known of its end."""
        return {name: self.end_of(name) for name, each in self._fields.items() if self._are_lost(each, now)}

    def end_of(self, field: str) -> dict[str, Any]:
        last = self._fields[field].last
        return {"client": last, **self._notes.get(last.rpartition("_")[0], {})}

    def by_field(self, now: float) -> dict[str, dict[str, Any]]:
        """By field: the living sessions that produce it, their first names, and how long ago one published it."""
        return {
            name: {
                "alive": len(producers.alive),
                "clients": list(islice(producers.alive, _MOST_NAMED)),
                "published_s_ago": None if producers.published_at is None else now - producers.published_at,
            }
            for name, producers in self._fields.items()
        }


def _keep_latest(notes: dict[str, Any]) -> None:
    for oldest in list(notes)[:-_MOST_NOTES]:
        del notes[oldest]
