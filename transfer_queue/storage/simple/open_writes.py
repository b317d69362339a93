# SPDX-License-Identifier: Apache-2.0
"""Writes onto samples that others know, until their clients say that they are published: they may have to go again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from transfer_queue.storage.simple.messages import OpenWrite, Write

_REMEMBERED = 1024


class _Open(NamedTuple):
    serial: int
    indexes: bytes
    fields: list[str]


class OpenWrites:
    """Of all clients of a unit. Clients that ended are remembered: something may still be on its way from them."""

    def __init__(self) -> None:
        self._serials = itertools.count(1)
        self._open: dict[str, dict[int, _Open]] = {}
        self._ended: dict[str, None] = {}

    def has_ended(self, client: str) -> bool:
        return client in self._ended

    def begin(self, client: str, write: Write) -> int:
        """The store's number for this write; 0: it needs none."""
        if not write.number and not write.settled:
            return 0
        mine = self._open.setdefault(client, {})
        for number in write.settled:
            mine.pop(number, None)
        if not write.number:
            serial = 0
        else:
            serial = next(self._serials)
            mine[write.number] = _Open(serial, write.indexes, sorted({part.field for part in write.parts}))
        if not mine:
            del self._open[client]
        return serial

    def end(self, client: str) -> list[OpenWrite]:
        """The client has ended: what it left open."""
        self._ended[client] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        left = self._open.get(client, {})
        return [OpenWrite(number, write.indexes, write.fields) for number, write in left.items()]

    def take(self, client: str, number: int, indexes: bytes | None) -> tuple[int, bytes, Iterable[str]] | None:
        """(the store's number, indexes, fields) to take back; a part of a write leaves it open."""
        mine = self._open.get(client, {})
        write = mine.get(number)
        if write is None:
            return None
        if indexes is None:
            del mine[number]
            if not mine:
                del self._open[client]
        return write.serial, write.indexes if indexes is None else indexes, write.fields
