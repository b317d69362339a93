# SPDX-License-Identifier: Apache-2.0
"""The transport of tests: calls by hand, memory of its own on the other side, parked answers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.contract.transport_kit import numbered
from tests.local_caller import LocalCaller
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Outgoing, Peer
from transfer_queue.transport.blocking import run_blocking

SHELF = Peer("shelf", "local://shelf")


class Shelf:
    """Keeps the frames of "put", gives them to "get", lets "wait" wait for a "wake", a goodbye or its deadline."""

    def __init__(self) -> None:
        self.frames: list = []
        self.parked: list = []
        self.deadline: float | None = None

    def handle(self, envelope, header, frames, now):
        if header == b"wait":
            self.parked.append(envelope)
            self.deadline = now + 0.02
            return []
        if header == b"put":
            self.frames = frames
        return [Outgoing(envelope, b"done", self.frames), *(self._let_go(b"woken") if header == b"wake" else [])]

    def expire(self, now):
        return self._let_go(b"late") if self.deadline is not None and self.deadline <= now else []

    def next_deadline(self):
        return self.deadline

    def client_gone(self, client, now):
        return self._let_go(client.encode())

    def _let_go(self, header):
        answers = [Outgoing(envelope, header) for envelope in self.parked]
        self.parked, self.deadline = [], None
        return answers


def ask(caller: LocalCaller, *headers: bytes, frames=(), timeout_s: float = 5.0) -> list[bytes]:
    calls = [numbered(SHELF, header, frames) for header in headers]
    return [reply.header for reply in run_blocking(caller.call_many(calls, timeout_s))]


def test_the_other_side_has_memory_of_its_own_and_answers_are_read_only():
    shelf, source = Shelf(), np.zeros(4, np.int64)
    caller = LocalCaller({"shelf": shelf}, "me")
    assert ask(caller, b"put", frames=[source]) == [b"done"]
    source += 1
    ((_, (view,)),) = run_blocking(caller.call_many([numbered(SHELF, b"get")], 1.0))
    assert (bytes(view), view.readonly) == (bytes(32), True)


def test_a_parked_call_is_answered_by_another_callers_request():
    handlers = {"shelf": Shelf()}
    one, other = LocalCaller(handlers, "one"), LocalCaller(handlers, "other")

    async def story():
        waiting = asyncio.ensure_future(one.call_many([numbered(SHELF, b"wait")], 5.0))
        await asyncio.sleep(0)
        await other.call_many([numbered(SHELF, b"wake")], 5.0)
        return await waiting

    assert [reply.header for reply in asyncio.run(story())] == [b"woken"]


def test_answers_come_in_the_order_of_the_calls():
    assert ask(LocalCaller({"shelf": Shelf()}, "me"), b"wait", b"get", b"wake") == [b"woken", b"done", b"done"]


@pytest.mark.parametrize("drive", [asyncio.run, run_blocking])
def test_a_parked_call_is_answered_at_the_handlers_deadline(drive):
    caller = LocalCaller({"shelf": Shelf()}, "me")
    assert [reply.header for reply in drive(caller.call_many([numbered(SHELF, b"wait")], 5.0))] == [b"late"]


def test_a_call_without_an_answer_in_time_and_an_unknown_peer_are_unreachable():
    shelf = Shelf()
    shelf.next_deadline = lambda: None
    shelf.expire = lambda now: []
    caller = LocalCaller({"shelf": shelf}, "me")
    with pytest.raises(QueueUnreachableError, match="1 of 2 calls had no answer in"):
        ask(caller, b"get", b"wait", timeout_s=0.01)
    with pytest.raises(QueueUnreachableError, match="can't connect to 'nobody' at 'local://x': no such peer"):
        run_blocking(caller.call_many([numbered(Peer("nobody", "local://x"), b"")], 1.0))


def test_a_handler_that_was_called_is_told_when_the_caller_closes():
    shelf = Shelf()
    caller, other = LocalCaller({"shelf": shelf}, "me"), LocalCaller({"shelf": shelf}, "other")

    async def story():
        await caller.call_many([numbered(SHELF, b"get")], 5.0)
        waiting = asyncio.ensure_future(other.call_many([numbered(SHELF, b"wait")], 5.0))
        await asyncio.sleep(0)
        caller.close()
        return await waiting

    assert [reply.header for reply in asyncio.run(story())] == [b"me"]
