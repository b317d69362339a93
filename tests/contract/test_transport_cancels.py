# SPDX-License-Identifier: Apache-2.0
"""Calls that fail say so on their own connection, behind what was sent of them; messages that expect no answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from breaking_links import proxy_to
from transport_kit import JOIN_S, Desk, begin, blocking, is_waited_for, make_caller, numbered, served_by_thread, until

from transfer_queue.errors import ClosedError, QueueUnreachableError

DRIVES = pytest.mark.parametrize("drive", [blocking, asyncio.run], ids=["blocking", "async"])

pytestmark = pytest.mark.usefixtures("nothing_left")


def revocable(peer: Any, *headers: bytes) -> list[Any]:
    return [numbered(peer, header, (), b"cancel " + header) for header in headers]


def answers(replies: Any) -> list[bytes]:
    return [reply.header for reply in replies]


# ---- every transport ----


@DRIVES
def test_a_call_that_was_answered_is_not_cancelled(desk, drive):
    make, peer, served = desk
    assert answers(drive(make().call_many(revocable(peer, b"one", b"two"), 10.0))) == [b"one", b"two"]
    drive(make().call_many(revocable(peer, b"echo"), 10.0))
    assert served.said == []


@DRIVES
def test_a_deadline_cancels_all_calls_that_were_made_together(desk, drive):
    make, peer, served = desk
    caller = make()
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many(revocable(peer, b"answered", b"never"), 0.05))
    assert answers(drive(caller.call_many(revocable(peer, b"echo"), 10.0))) == [b"echo"]
    assert served.said == [b"cancel answered", b"cancel never"], "nobody got the first one's answer, either"


@DRIVES
def test_what_goes_wrong_as_a_call_is_made_cancels_those_before_it(desk, drive):
    make, peer, served = desk
    caller = make()

    def broken() -> Iterator[Any]:
        yield from revocable(peer, b"echo")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        drive(caller.call_many(broken(), 10.0))
    assert answers(drive(caller.call_many(revocable(peer, b"one"), 10.0))) == [b"one"]
    assert served.said == [b"cancel echo"]


def test_a_cancelled_task_cancels_its_call_and_no_other_of_its_loop(desk):
    make, peer, served = desk
    caller = make()

    async def story() -> list[bytes]:
        doomed = asyncio.ensure_future(caller.call_many(revocable(peer, b"park doomed"), 10.0))
        other = asyncio.ensure_future(caller.call_many(revocable(peer, b"park other"), 10.0))
        await asyncio.sleep(0)
        await caller.call_many(revocable(peer, b"echo"), 10.0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await caller.call_many(revocable(peer, b"free"), 10.0)
        return answers(await other)

    assert asyncio.run(story()) == [b"park other"]
    assert served.said == [b"cancel park doomed"]


@pytest.mark.parametrize("end", [lambda pending: pending.close(), lambda pending: None], ids=["closed", "dropped"])
def test_a_started_call_that_nobody_finishes_is_cancelled(desk, end):
    make, peer, served = desk
    caller = make()
    pending = begin(caller.call_many(revocable(peer, b"park"), 10.0))
    end(pending)
    del pending
    assert answers(blocking(caller.call_many(revocable(peer, b"echo"), 10.0))) == [b"echo"]
    assert served.said == [b"cancel park"]


@DRIVES
def test_a_call_without_a_cancel_is_only_not_waited_for(desk, drive):
    make, peer, served = desk
    caller = make()
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many([numbered(peer, b"never")], 0.05))
    assert answers(drive(caller.call_many([numbered(peer, b"echo")], 10.0))) == [b"echo"]
    assert served.said == []


@DRIVES
def test_a_message_that_expects_no_answer_comes_before_the_calls_after_it(desk, drive):
    make, peer, served = desk
    caller = make()

    async def story() -> None:
        for number in range(3):
            await caller.post(numbered(peer, b"said %d" % number))
            assert answers(await caller.call_many([numbered(peer, b"echo")], 10.0)) == [b"echo"]
            assert served.said[number:] == [b"said %d" % number]

    drive(story())


class Frames(Desk):
    """Keeps the frames of what nobody waits for, once it is let; until then it answers nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.frames: list[bytes] = []
        self.order: list[tuple[bytes, bool]] = []

    def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> Any:
        assert self.free.wait(JOIN_S)
        self.order.append((header, not is_waited_for(envelope)))
        self.frames += [bytes(frame) for frame in frames]
        return super().handle(envelope, header, frames, now)


@pytest.fixture
def slow(tmp_path: Any, kind: str) -> Iterator[tuple[Any, Any, Frames]]:
    """(caller, peer, what serves it when it is let)"""
    served, caller = Frames(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, _):
        yield caller, peer, served
        served.free.set()
    caller.close()


@DRIVES
def test_the_frames_of_a_message_are_those_of_the_moment_it_was_sent(slow, drive):
    caller, peer, served = slow
    large = np.ones(8 << 20, np.uint8)

    async def story() -> None:
        await caller.post(numbered(peer, b"said", [large]))
        large.fill(9)
        served.free.set()
        await caller.call_many([numbered(peer, b"echo")], 10.0)

    drive(story())
    assert [set(frame) for frame in served.frames] == [{1}]


@DRIVES
def test_a_call_that_was_sent_in_part_goes_out_whole_and_its_cancel_behind_it(slow, drive):
    caller, peer, served = slow
    large = np.ones(8 << 20, np.uint8)
    call = numbered(peer, b"park", [large], b"cancel park")

    async def story() -> list[bytes]:
        with pytest.raises(QueueUnreachableError):
            await caller.call_many([call], 0.01)
        large.fill(9)
        served.free.set()
        return answers(await caller.call_many([numbered(peer, b"echo")], 10.0))

    assert drive(story()) == [b"echo"]
    assert served.order == [(b"park", False), (b"cancel park", True), (b"echo", False)]
    assert [set(frame) for frame in served.frames] == [{1}]


@DRIVES
def test_the_connection_of_a_cancelled_call_is_used_again(tmp_path, kind, drive):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, server):
        for _ in range(10):
            with pytest.raises(QueueUnreachableError):
                drive(caller.call_many(revocable(peer, b"park"), 0.005))
        assert answers(drive(caller.call_many(revocable(peer, b"echo"), 10.0))) == [b"echo"]
        assert (server.clients(), served.gone) == ({"me": 1}, [])
        caller.close()


def test_calls_of_a_loop_that_ended_without_them_are_cancelled(tmp_path, kind):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, server):
        loop = asyncio.new_event_loop()
        call = caller.call_many(revocable(peer, b"park"), 10.0)
        task = loop.create_task(call)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert answers(asyncio.run(caller.call_many(revocable(peer, b"echo"), 10.0))) == [b"echo"]
        assert (served.said, server.clients()) == ([b"cancel park"], {"me": 1})
        task._log_destroy_pending = False
        del task
        call.close()
        caller.close()


@DRIVES
def test_a_cancel_to_a_peer_that_has_ended_is_no_error_of_its_own(tmp_path, kind, drive):
    caller = make_caller("me")
    with served_by_thread(tmp_path, Desk(), kind) as (peer, server):
        drive(caller.call_many([numbered(peer, b"echo")], 10.0))
        stopper = threading.Timer(0.05, server.stop)
        stopper.start()
        with pytest.raises(QueueUnreachableError, match="has ended"):
            drive(caller.call_many(revocable(peer, b"park", b"never"), 60.0))
        stopper.join()
    caller.close()


def test_the_cancel_behind_a_large_answer_that_nobody_reads_is_heard(tmp_path, kind):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, _):
        large = numbered(peer, b"echo", [bytes(4 << 20)], b"cancel echo")
        pending = begin(caller.call_many([large, *revocable(peer, b"park")], 10.0))
        pending.close()
        until(lambda: served.said == [b"cancel echo", b"cancel park"])
        assert answers(blocking(caller.call_many([numbered(peer, b"last")], 10.0))) == [b"last"]
        caller.close()


@DRIVES
def test_a_call_that_was_sent_in_part_and_its_cancel_go_out_although_nothing_follows(slow, drive):
    caller, peer, served = slow
    large = np.ones(8 << 20, np.uint8)
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many([numbered(peer, b"park", [large], b"cancel park")], 0.01))
    served.free.set()
    until(lambda: served.order == [(b"park", False), (b"cancel park", True)])


@DRIVES
def test_cancels_are_heard_behind_so_many_answers_that_the_server_waits_until_they_are_read(slow, drive):
    caller, peer, served = slow
    names = [b"echo %d" % number for number in range(100)]
    calls = [numbered(peer, name, [bytes(100_000)], b"cancel " + name) for name in names]
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many(calls, 0.01))
    served.free.set()
    until(lambda: served.said == [b"cancel " + name for name in names])


@DRIVES
def test_calls_that_follow_many_failed_ones_come_behind_them(slow, drive):
    caller, peer, served = slow
    for _ in range(20):
        with pytest.raises(QueueUnreachableError):
            drive(caller.call_many([numbered(peer, b"park", [bytes(1 << 20)], b"cancel park")], 0.001))
    served.free.set()
    assert answers(drive(caller.call_many([numbered(peer, b"echo")], 10.0))) == [b"echo"]
    assert served.order == [*[(b"park", False), (b"cancel park", True)] * 20, (b"echo", False)]


def test_a_closed_caller_tells_nothing(tmp_path, kind):
    caller = make_caller("me")
    with served_by_thread(tmp_path, Desk(), kind) as (peer, _):
        blocking(caller.post(numbered(peer, b"said")))
        caller.close()
        for drive in (blocking, asyncio.run):
            with pytest.raises(ClosedError):
                drive(caller.post(numbered(peer, b"said")))


# ---- a connection between hosts that breaks ----


def ends_unheard(caller: Any, peer: Any, served: Desk, proxy: Any, drive: Any) -> None:
    """A call waits at the server, and its connection breaks."""
    ender = threading.Thread(target=lambda: (until(lambda: len(served.parked) == 2), proxy.end_for_client()))
    ender.start()
    with pytest.raises(QueueUnreachableError, match="has ended"):
        drive(caller.call_many(revocable(peer, b"park one", b"park two"), 60.0))
    ender.join(JOIN_S)


@DRIVES
def test_calls_whose_connection_broke_are_cancelled_over_the_next_one_before_all_else(tmp_path, drive):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, "tcp") as (to, _), proxy_to(to.address) as proxy:
        peer = to._replace(address=proxy.address)
        ends_unheard(caller, peer, served, proxy, drive)
        assert served.said == [], "nothing was sent into the dark"
        assert answers(drive(caller.call_many([numbered(peer, b"echo")], 10.0))) == [b"echo"]
        assert (served.said, served.gone) == ([b"cancel park one", b"cancel park two"], [])
        caller.close()


def test_a_cancel_is_said_again_until_it_was_heard_and_then_no_more(tmp_path):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, "tcp") as (to, _), proxy_to(to.address) as proxy:
        peer = to._replace(address=proxy.address)
        ends_unheard(caller, peer, served, proxy, blocking)
        proxy.holds = True
        blocking(caller.post(numbered(peer, b"said")))
        until(lambda: len(proxy.links) == 2)
        proxy.holds = False
        proxy.end_for_client()
        for _ in range(2):
            until(lambda: is_echoed(caller, peer))
            assert served.said == [b"cancel park one", b"cancel park two"]
            proxy.end_for_client()
        caller.close()


def is_echoed(caller: Any, peer: Any) -> bool:
    """Of several calls one finds that its connection has ended."""
    try:
        return answers(blocking(caller.call_many([numbered(peer, b"echo")], 10.0))) == [b"echo"]
    except QueueUnreachableError:
        return False
