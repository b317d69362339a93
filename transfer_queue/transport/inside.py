# SPDX-License-Identifier: Apache-2.0
"""Calls between servers of one loop: the other's handler is asked at once, in the thread that asks."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Call, Reply
from transfer_queue.transport.server import SocketServer


class InsideCaller:
    """A ``Caller`` for requests that are answered at once; used in the loop's thread only."""

    def __init__(self, client_id: str, servers: Iterable[SocketServer]) -> None:
        self._client = client_id
        self._servers = {server.address: server for server in servers}

    async def call_many(self, calls: Iterable[Call], timeout_s: float) -> list[Reply]:
        """See ``Caller``; there is nothing to wait for."""
        return [self._ask(call) for call in calls]

    def _ask(self, call: Call) -> Reply:
        reply = self._servers[call.peer.address].ask(self._client, call.header, call.frames)
        if reply is None:
            raise QueueUnreachableError(f"{call.peer.name} could not answer at once, and nobody can wait for it here.")
        return reply
