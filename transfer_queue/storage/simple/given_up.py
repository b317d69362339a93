# SPDX-License-Identifier: Apache-2.0
"""Writes that their clients gave up: those that come still are refused, whatever they were overtaken by."""

from __future__ import annotations

from collections.abc import Iterable

_REMEMBERED = 1024


class GivenUp:
    """Of all clients of a unit, the latest ones only: most of these writes were carried out, or never come."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[str, int], None] = {}

    def add(self, client: str, attempts: Iterable[int]) -> None:
        self.attempts.update(dict.fromkeys((client, attempt) for attempt in attempts))
        while len(self.attempts) > _REMEMBERED:
            del self.attempts[next(iter(self.attempts))]

    def take(self, client: str, attempt: int) -> bool:
        """Was it given up? It comes only once."""
        return self.attempts.pop((client, attempt), 0) is None
