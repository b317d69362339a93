# SPDX-License-Identifier: Apache-2.0
"""A transport without sockets: calls go straight to handlers in this process, for tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import NOBODY_WAITS, Buffer, Envelope, Handler, Outgoing, Peer, PeerCall
from transfer_queue.transport.blocking import is_blocking, pause
from transfer_queue.transport.framing import Message

# Another caller's request may produce an answer, so callers find each other by the route in the envelope.
_callers: weakref.WeakValueDictionary[bytes, LocalCaller] = weakref.WeakValueDictionary()
_routes = itertools.count()
_one_at_a_time = threading.RLock()  # handlers expect a single server thread


class LocalCaller:
    """Calls handlers by peer name. Like a network, it copies messages and parks unanswered requests."""

    def __init__(self, handlers: Mapping[str, Handler], client_id: str) -> None:
        self._handlers = handlers
        self.client = client_id
        self.lost: set[str] = set()
        self._route = next(_routes).to_bytes(8, "little")
        self._waiting: dict[int, concurrent.futures.Future[Message]] = {}
        self._known: dict[str, Handler] = {}
        _callers[self._route] = self

    async def call_many(self, calls: Iterable[PeerCall], timeout_s: float) -> list[Message]:
        """See ``SocketCaller``."""
        asked: dict[int, PeerCall] = {}
        pending: list[concurrent.futures.Future[Message]] = []
        try:
            with _one_at_a_time:
                for call in calls:
                    pending.append(self._send(call, asked))
            await pause()
            deadline = time.monotonic() + timeout_s
            while waiting := [future for future in pending if not future.done()]:
                now = time.monotonic()
                if now >= deadline:
                    raise QueueUnreachableError(
                        f"{len(waiting)} of {len(pending)} calls had no answer in {timeout_s} s"
                    )
                await _first_of(waiting, self._next_deadline(deadline) - now)
                self._expire()
            return [future.result() for future in pending]
        except BaseException:
            for call in asked.values():
                self._post(call, b"" if call.cancel is None else call.cancel())
            raise
        finally:
            for number in asked:
                self._waiting.pop(number, None)

    async def post(self, call: PeerCall, number: int = NOBODY_WAITS) -> None:
        """See ``SocketCaller``."""
        self._post(call, call.header)

    def close(self) -> None:
        """Report the client as gone to all handlers that it has called."""
        with _one_at_a_time:
            while self._known:
                _deliver(self._known.popitem()[1].client_gone(self.client, time.monotonic()))

    def _send(self, call: PeerCall, asked: dict[int, PeerCall]) -> concurrent.futures.Future[Message]:
        future = self._waiting[call.number] = concurrent.futures.Future()
        asked[call.number] = call
        self._hand_over(call.peer, call.number, call.header, call.frames)
        return future

    def _post(self, call: PeerCall, header: bytes) -> None:
        if header:
            with _one_at_a_time:
                self._hand_over(call.peer, NOBODY_WAITS, header, call.frames if header is call.header else ())

    def _hand_over(self, peer: Peer, number: int, header: bytes, frames: Sequence[Buffer]) -> None:
        handler = self._handlers.get(peer.name)
        if handler is None:
            raise QueueUnreachableError(f"can't connect to {peer.name!r} at {peer.address!r}: no such peer.")
        self._known[peer.name] = handler
        envelope = Envelope(self.client, number, self._route)
        _deliver(handler.handle(envelope, header, [_received(frame) for frame in frames], time.monotonic()))

    def _next_deadline(self, own: float) -> float:
        with _one_at_a_time:
            deadlines = [handler.next_deadline() for handler in self._handlers.values()]
        return max(min([own, *(at for at in deadlines if at is not None)]), time.monotonic())

    def _expire(self) -> None:
        with _one_at_a_time:
            for handler in self._handlers.values():
                _deliver(handler.expire(time.monotonic()))

    def _take(self, outgoing: Outgoing) -> None:
        future = self._waiting.pop(outgoing.envelope.number, None)
        if future is not None:
            future.set_result(
                Message(outgoing.envelope.number, outgoing.header, [_view(frame) for frame in outgoing.frames])
            )


async def _first_of(waiting: Sequence[concurrent.futures.Future[Message]], timeout_s: float) -> None:
    first = concurrent.futures.FIRST_COMPLETED
    if is_blocking():
        concurrent.futures.wait(waiting, timeout_s, first)
        return
    wrapped = [asyncio.wrap_future(future) for future in waiting]
    await asyncio.wait(wrapped, timeout=timeout_s, return_when=first)


def _deliver(answers: Iterable[Outgoing]) -> None:
    for outgoing in answers:
        caller = _callers.get(outgoing.envelope.route)
        if caller is not None:
            caller._take(outgoing)


def _received(frame: Buffer) -> memoryview:
    copy = np.frombuffer(frame, np.uint8).copy()
    copy.flags.writeable = False
    return memoryview(copy.data)


def _view(frame: Buffer) -> memoryview:
    return memoryview(frame).cast("B").toreadonly()
