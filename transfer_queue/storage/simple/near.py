# SPDX-License-Identifier: Apache-2.0
"""Values for a batch whose units share the controller's process: read before its answer leaves, and sent with it."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.storage.simple.messages import (
    Granted,
    NotSmall,
    Read,
    decode_wish,
    encode,
    pack_indexes,
    unpack_indexes,
)
from transfer_queue.storage.simple.routing import shares_of
from transfer_queue.transport.base import Buffer
from transfer_queue.transport.server import SocketServer

_NOT_SMALL = encode(NotSmall())


class NearValues:
    """In the thread that serves the units, too."""

    def __init__(self, units: Sequence[SocketServer], run: int) -> None:
        """``units``: in the order of the configuration."""
        self._units = units
        self._run = run

    def __call__(self, client: str, indexes: bytes, wish: bytes) -> list[Buffer]:
        """Frames for the client that wished them; none where a unit can't answer now, and nothing granted where the
        values are more than was wished."""
        wished, wanted = decode_wish(wish), unpack_indexes(indexes)
        answers, frames = [], list[Buffer]()
        for unit, at in shares_of(wanted, len(self._units), self._run):
            read = Read(pack_indexes(wanted[at]), wished.fields, wished.pins[unit], wished.small)
            reply = self._units[unit].ask(client, encode(read))
            if reply is None:
                return []
            if reply.header == _NOT_SMALL:
                return [encode(Granted([]))]
            answers.append((unit, reply.header, len(reply.frames)))
            frames += reply.frames
        return [encode(Granted(answers)), *frames]
