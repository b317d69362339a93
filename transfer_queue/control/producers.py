# SPDX-License-Identifier: Apache-2.0
"""Producers: which sessions produce which fields. A consumer of a field without any would wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transfer_queue.calls import Call, Calls, Holding, Until


class _Producers:
    """``alive``: by session, what it holds. ``died_at``: the death of the last one to end."""

    __slots__ = ("alive", "died_at", "published_at")

    def __init__(self) -> None:
        self.alive: dict[str, _Producing] = {}
        self.died_at: float | None = None
        self.published_at: float | None = None


class _Producing(Holding):
    """A session is a living producer of a field until it ends. ``published``: it has published the field."""

    until = Until.SESSION
    __slots__ = ("_client", "_name", "_producers", "published")

    def __init__(self, producers: Producers, name: str, client: str) -> None:
        self._producers, self._name, self._client = producers, name, client
        self.published = False

    def end(self, died: bool) -> bool:
        self._producers.gone(self._name, self._client, died)
        return False


class Producers:
    """Detects lost producers: ``lost`` is called when those of some field are lost, unless new ones come."""

    def __init__(self, calls: Calls, grace_s: float, lost: Callable[[], None]) -> None:
        self._calls = calls
        self._grace_s = grace_s
        self._lost = lost
        self._fields: dict[str, _Producers] = {}

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
        producers.alive[call.client] = own = _Producing(self, name, call.client)
        self._calls.hold(call, own)

    def gone(self, name: str, client: str, died: bool) -> None:
        """A session that produces this field has left or died.

        One that leaves without publishing the field doesn't affect the field's other producers.
        """
        producers = self._fields[name]
        published = producers.alive.pop(client).published
        if died:
            producers.died_at = self._calls.now
        elif published:
            producers.died_at = None
        if producers.alive:
            return
        if producers.died_at is None:
            del self._fields[name]
        else:
            self._calls.at(producers.died_at + self._grace_s, self._lost)

    def forget_deaths(self) -> None:
        """From now on, no field counts as having lost its producers by a death so far."""
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
        """By field: the living sessions that produce it, and how long ago one of them published it."""
        return {
            name: {
                "alive": len(producers.alive),
                "published_s_ago": None if producers.published_at is None else now - producers.published_at,
            }
            for name, producers in self._fields.items()
        }
