# SPDX-License-Identifier: Apache-2.0
"""Which sessions produce which field, in any partition, and whether any of them is left.

The producers of a field are lost if three conditions hold. No session that published the field, or asked to, is left.
The last of these sessions died rather than left. The grace time since that death has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Field:
    """``alive``: sessions, and whether each has published the field. ``died_at``: the death of the last one to end."""

    alive: dict[str, bool] = field(default_factory=dict)
    died_at: float | None = None


class Producers:
    """Detects lost producers, because a consumer that waits for their fields would wait forever."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._fields: dict[str, _Field] = {}

    def began(self, client: str, fields: Iterable[str]) -> None:
        """The session has asked to write these fields. It counts as alive, although it may never publish them."""
        for name in fields:
            self._of(name).alive.setdefault(client, False)

    def published(self, client: str, fields: Iterable[str]) -> None:
        """The session is a living producer of these fields."""
        for name in fields:
            self._of(name).alive[client] = True

    def _of(self, name: str) -> _Field:
        found = self._fields.get(name)
        if found is None:
            found = self._fields[name] = _Field()
        return found

    def gone(self, client: str, died: bool, now: float) -> set[float]:
        """The session left or died. Returns when the producers of some fields are lost, unless new ones come.

        A session that leaves without publishing a field doesn't affect the field's other producers.
        """
        verdicts = set()
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
                verdicts.add(producers.died_at + self._grace_s)
        return verdicts

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
