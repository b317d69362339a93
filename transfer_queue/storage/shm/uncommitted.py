# SPDX-License-Identifier: Apache-2.0
"""Writes that are stored and not yet published: the one place where they lie until a commit or an abort."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.storage.pieces import IntArray
from transfer_queue.storage.shm.messages import FieldParts

_REMEMBERED = 1024


@dataclass(frozen=True, slots=True, eq=False)
class UncommittedWrite:
    """Rows for these indexes, as they came."""

    indexes: IntArray
    parts: FieldParts
    cleared: set[int] = field(default_factory=set)
    """Those of the indexes whose samples were cleared since: a commit must not bring their values back."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for _, _, piece in self.parts)


class Uncommitted:
    """By client and call. Clients that ended are remembered, since a message of theirs may still be on its way."""

    def __init__(self) -> None:
        self._writes: dict[str, dict[int, UncommittedWrite]] = {}
        self._ended: dict[str, None] = {}
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._writes)

    def has_ended(self, client: str) -> bool:
        return client in self._ended

    def add(self, client: str, call: int, write: UncommittedWrite) -> None:
        self.take(client, call)
        self._writes.setdefault(client, {})[call] = write
        self.nbytes += write.nbytes

    def take(self, client: str, call: int) -> UncommittedWrite | None:
        """Remove the write of this call: to commit it, or to abort it."""
        own = self._writes.get(client, {})
        write = own.pop(call, None)
        if write is None:
            return None
        if not own:
            del self._writes[client]
        self.nbytes -= write.nbytes
        return write

    def take_holding(self, indexes: IntArray, fields: Sequence[str]) -> list[UncommittedWrite]:
        """Remove every write that has one of these fields of one of these indexes.

        A reader asks only for what was published, so such a write is published, and its commit is on its way.
        """
        found = [
            (client, call)
            for client, own in self._writes.items()
            for call, write in own.items()
            if any(name in fields for name, _, _ in write.parts) and np.isin(write.indexes, indexes).any()
        ]
        return [write for key in found if (write := self.take(*key)) is not None]

    def forget(self, indexes: IntArray) -> None:
        """These samples were cleared: drop the writes that are about no other, and note it in the rest."""
        for client, own in list(self._writes.items()):
            for call, write in list(own.items()):
                write.cleared.update(write.indexes[np.isin(write.indexes, indexes)].tolist())
                if len(write.cleared) == len(np.unique(write.indexes)):
                    self.take(client, call)

    def end(self, client: str, published: Iterable[int]) -> list[UncommittedWrite]:
        """The client has ended. Returns its published writes, to be committed; the others are dropped."""
        self._ended[client] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        committed = [write for call in published if (write := self.take(client, call)) is not None]
        for call in list(self._writes.get(client, ())):
            self.take(client, call)
        return committed
