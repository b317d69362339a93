# SPDX-License-Identifier: Apache-2.0
"""What clients were answered of late, and how to undo it: a client may give up while its answer is on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Undo = Callable[[], None]

_MOST = 64
_MOST_NBYTES = 4 << 20
"""Per client. Who gives up does so within the time that an answer travels, so the latest ones are enough."""


@dataclass(slots=True)
class _Answers:
    """By number of the request, the oldest first."""

    undo: dict[int, tuple[int, Undo]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, request: int, nbytes: int, undo: Undo) -> None:
        self.take(request)
        self.undo[request] = nbytes, undo
        self.nbytes += nbytes
        while len(self.undo) > _MOST or (self.nbytes > _MOST_NBYTES and len(self.undo) > 1):
            self.take(next(iter(self.undo)))

    def take(self, request: int) -> Undo | None:
        nbytes, undo = self.undo.pop(request, (0, None))
        self.nbytes -= nbytes
        return undo


class Answered:
    """Requests that hold something for their client: reservations, and samples that no ledger gives again."""

    def __init__(self) -> None:
        self._clients: dict[str, _Answers] = {}

    def remember(self, client: str, request: int, nbytes: int, undo: Undo) -> None:
        """``nbytes``: of what ``undo`` keeps in memory."""
        answers = self._clients.get(client)
        if answers is None:
            answers = self._clients[client] = _Answers()
        answers.add(request, nbytes, undo)

    def undo(self, client: str, request: int) -> bool:
        """Was there something to undo?"""
        answers = self._clients.get(client)
        undo = None if answers is None else answers.take(request)
        if undo is None:
            return False
        undo()
        return True

    def forget(self, client: str) -> None:
        """It has left: what it reserved is given back anyway."""
        self._clients.pop(client, None)

    def clear(self) -> None:
        """The queue's state was replaced: what was answered before is no part of it."""
        self._clients.clear()
