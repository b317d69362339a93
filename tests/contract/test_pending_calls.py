# SPDX-License-Identifier: Apache-2.0
"""Calls that are pending in one place and finished in another, over every transport."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transport_kit import JOIN_S, Desk, begin, blocking, calls, make_caller, peer_at, served_by_thread

from transfer_queue.errors import ClosedError, QueueUnreachableError

pytestmark = pytest.mark.usefixtures("nothing_left")


async def asked(caller: Any, peer: Any, *headers: bytes, timeout_s: float = JOIN_S) -> list[bytes]:
    return [reply.header for reply in await caller.call_many(calls(peer, *headers), timeout_s)]


def test_what_was_started_is_answered_whoever_asks_meanwhile(desk):
    make, peer, _ = desk
    caller = make()
    pending = begin(asked(caller, peer, b"park one", b"two"))
    assert blocking(asked(caller, peer, b"three")) == [b"three"]
    blocking(asked(caller, peer, b"free"))
    assert pending.finish() == [b"park one", b"two"]


def test_a_call_started_in_one_thread_is_finished_in_another(desk):
    make, peer, _ = desk
    caller, answers = make(), []
    pending = begin(asked(caller, peer, b"echo"))
    thread = threading.Thread(target=lambda: answers.extend(pending.finish()))
    thread.start()
    thread.join(JOIN_S)
    assert answers == [b"echo"]


def test_only_what_is_asked_first_is_sent(desk):
    make, peer, _ = desk
    caller, stages = make(), []

    async def story() -> list[bytes]:
        stages.append("started")
        first = await asked(caller, peer, b"first")
        stages.append("answered")
        return first + await asked(caller, peer, b"second")

    pending = begin(story())
    assert stages == ["started"]
    assert pending.finish() == [b"first", b"second"]


def test_a_call_with_nothing_to_ask_is_over_when_it_is_started():
    async def answer() -> int:
        return 42

    pending = begin(answer())
    assert pending.finish() == 42


def test_what_goes_wrong_before_anything_is_asked_is_raised_at_once(desk):
    make, _, _ = desk
    with pytest.raises(QueueUnreachableError):
        begin(asked(make(), peer_at("ipc:///nowhere/at/all", "nobody"), b"echo")).finish()


def test_a_call_that_nobody_finishes_leaves_nothing_behind(desk):
    make, peer, _ = desk
    caller = make()
    blocking(asked(caller, peer, b"echo"))
    closed = begin(asked(caller, peer, b"park closed"))
    closed.close()
    closed.close()
    dropped = begin(asked(caller, peer, b"park dropped"))
    del dropped
    blocking(asked(caller, peer, b"free"))
    assert blocking(asked(caller, peer, b"echo")) == [b"echo"], "late answers never reach a later call"


def test_closing_the_caller_ends_what_was_started(tmp_path, kind):
    with served_by_thread(tmp_path, Desk(), kind) as (peer, _):
        caller = make_caller("me")
        assert blocking(asked(caller, peer, b"echo")) == [b"echo"]
        pending = begin(asked(caller, peer, b"park", timeout_s=60.0))
        caller.close()
        with pytest.raises(ClosedError):
            pending.finish()


def test_who_closes_the_caller_and_then_the_queue_is_told_of_the_first(tmp_path, kind):
    caller = make_caller("me")
    with served_by_thread(tmp_path, Desk(), kind) as (peer, _):
        pending = begin(asked(caller, peer, b"park", timeout_s=60.0))
        caller.close()
    with pytest.raises(ClosedError):
        pending.finish()


def test_a_server_that_ends_meanwhile_is_told(tmp_path, kind):
    caller = make_caller("me")
    with served_by_thread(tmp_path, Desk(), kind) as (peer, _):
        pending = begin(asked(caller, peer, b"park", timeout_s=60.0))
    with pytest.raises(QueueUnreachableError, match="has ended"):
        pending.finish()
    caller.close()
