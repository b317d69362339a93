# SPDX-License-Identifier: Apache-2.0
"""Who publishes which field of a partition, and whether anybody is left who does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Source:
    """Clients that publish one field; ``died_at`` is when the last death among them was seen, None once replaced."""

    alive: set[str] = field(default_factory=set)
    died_at: float | None = None


class Producers:
    """A consumer that waits for a field whose producers have all died would wait for ever: this knows."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._sources: dict[str, dict[str, _Source]] = {}

    def published(self, partition: str, client: str, fields: Iterable[str]) -> None:
        """The client is (again) a living producer of these fields."""
        sources = self._sources.setdefault(partition, {})
        for name in fields:
            source = sources.setdefault(name, _Source())
            if not source.alive:
                source.died_at = None
            source.alive.add(client)

    def gone(self, client: str, died: bool, now: float) -> list[str]:
        """The client left, or died. Returns the partitions that have a field now whose producers died."""
        lost: dict[str, None] = {}
        for partition, sources in self._sources.items():
            for source in sources.values():
                if client not in source.alive:
                    continue
                source.alive.remove(client)
                if died:
                    source.died_at = now
                if not source.alive and source.died_at is not None:
                    lost[partition] = None
        return list(lost)

    def missing(self, partition: str, fields: Sequence[str], now: float) -> str | None:
        """A field whose producers are all dead for longer than the grace time, None when there is none."""
        for name in fields:
            source = self._sources.get(partition, {}).get(name)
            if source and not source.alive and source.died_at is not None and now >= source.died_at + self._grace_s:
                return name
        return None

    def verdict_at(self, now: float) -> float:
        """When a death seen now becomes an answer to those who wait."""
        return now + self._grace_s

    def forget(self, partition: str) -> None:
        """The partition was cleared."""
        self._sources.pop(partition, None)
