# SPDX-License-Identifier: Apache-2.0
"""What every transport promises its callers, and what sockets between processes must survive."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import (
    JOIN_S,
    Desk,
    blocking,
    calls,
    held,
    make_caller,
    numbered,
    peer_at,
    served_by_process,
    served_by_thread,
)

from transfer_queue.errors import ClosedError, QueueUnreachableError

AT_ONCE_S = 2.0
"""Far below every timeout of these tests; generous for a loaded machine."""

DRIVES = pytest.mark.parametrize("drive", [blocking, asyncio.run], ids=["blocking", "async"])

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def caller() -> Iterator[Any]:
    caller = make_caller("me")
    yield caller
    caller.close()


@pytest.fixture
def peer(tmp_path: Path, kind: str) -> Iterator[Any]:
    with served_by_thread(tmp_path, Desk(), kind) as (peer, _):
        yield peer


@pytest.fixture
def mortal(tmp_path: Path, kind: str) -> Iterator[tuple[Any, Any]]:
    with served_by_process(tmp_path, kind) as (peer, process):
        yield peer, process


def headers(replies: Any) -> list[bytes]:
    return [reply.header for reply in replies]


class Doorbell(Desk):
    """Rings when something has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.rung = threading.Event()

    def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> Any:
        self.rung.set()
        return super().handle(envelope, header, frames, now)


@DRIVES
def test_a_call_has_arrived_before_the_next_one_is_made(tmp_path, kind, caller, drive):
    handler = Doorbell()

    def slowly(peer: Any) -> Iterator[Any]:
        yield numbered(peer, b"first")
        assert handler.rung.wait(JOIN_S)
        yield numbered(peer, b"second")

    with served_by_thread(tmp_path, handler, kind) as (peer, _):
        assert headers(drive(caller.call_many(slowly(peer), 10.0))) == [b"first", b"second"]


# ---- every transport ----


@DRIVES
def test_answers_come_in_the_order_of_the_calls(desk, drive):
    make, peer, _ = desk
    sent = [b"late", b"echo", b"", b"late again", b"bytes \x00\xff"]
    assert headers(drive(make().call_many(calls(peer, *sent), 10.0))) == sent
    assert drive(make().call_many([], 10.0)) == []


@DRIVES
def test_a_call_that_cannot_be_made_is_told_and_the_ones_before_it_leave_nothing_behind(desk, drive):
    make, peer, _ = desk
    caller = make()

    def broken() -> Iterator[Any]:
        yield numbered(peer, b"echo")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        drive(caller.call_many(broken(), 10.0))
    assert headers(drive(caller.call_many(calls(peer, b"one", b"two"), 10.0))) == [b"one", b"two"]


@DRIVES
def test_frames_arrive_whole_and_read_only(desk, drive):
    make, peer, _ = desk
    sent = [np.arange(1 << 21), b"", b"x" * 70_000, memoryview(b"abc"), np.zeros((2, 3), np.float32)]
    ((_, _, frames),) = drive(make().call_many(calls(peer, b"echo", frames=sent), 30.0))
    assert [bytes(frame) for frame in frames] == [memoryview(frame).tobytes() for frame in sent]
    assert all(frame.readonly for frame in frames)


@DRIVES
def test_a_call_without_an_answer_ends_at_its_deadline_and_the_next_one_works(desk, drive):
    make, peer, _ = desk
    caller = make()
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many(calls(peer, b"echo", b"never"), 0.05))
    assert headers(drive(caller.call_many(calls(peer, b"echo"), 10.0))) == [b"echo"]


@DRIVES
def test_a_late_answer_never_reaches_a_later_call(desk, drive):
    make, peer, _ = desk
    caller = make()
    with pytest.raises(QueueUnreachableError):
        drive(caller.call_many(calls(peer, b"park me"), 0.05))
    for name in (b"free", b"one", b"two"):
        assert headers(drive(caller.call_many(calls(peer, name), 10.0))) == [name]


def test_a_parked_call_is_answered_by_what_another_thread_asks(desk):
    make, peer, _ = desk
    parked, answers = make(), []
    thread = threading.Thread(
        target=lambda: answers.extend(headers(blocking(parked.call_many(calls(peer, b"park"), JOIN_S))))
    )
    thread.start()
    other = make()
    deadline = time.monotonic() + JOIN_S
    while thread.is_alive() and time.monotonic() < deadline:
        blocking(other.call_many(calls(peer, b"free"), 10.0))
    thread.join()
    assert answers == [b"park"]


def test_a_blocking_call_works_inside_a_running_loop(desk):
    make, peer, _ = desk
    caller = make()

    async def story() -> list[bytes]:
        first = headers(blocking(caller.call_many(calls(peer, b"one"), 10.0)))
        return first + headers(await caller.call_many(calls(peer, b"two"), 10.0))

    assert asyncio.run(story()) == [b"one", b"two"]


# ---- sockets: many at once ----


def test_a_thousand_calls_of_one_loop_share_a_socket(caller, peer):
    async def story() -> None:
        await caller.call_many(calls(peer, b"echo"), 10.0)
        before = held()
        several = [caller.call_many(calls(peer, b"%d" % number), 30.0) for number in range(1000)]
        answers = await asyncio.gather(*several)
        assert [headers(answer) for answer in answers] == [[b"%d" % number] for number in range(1000)]
        assert held() == before

    asyncio.run(story())


def test_threads_use_one_caller_without_mixing_up_answers(caller, peer):
    wrong = []

    def work(number: int) -> None:
        for turn in range(50):
            sent = b"%d/%d" % (number, turn)
            if headers(blocking(caller.call_many(calls(peer, sent, sent + b"'"), 30.0))) != [sent, sent + b"'"]:
                wrong.append(sent)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert wrong == []


def test_one_loop_after_the_other_leaves_nothing_of_those_before(caller, peer):
    asyncio.run(caller.call_many(calls(peer, b"echo"), 10.0))
    threads, files = held()
    for _ in range(30):
        assert headers(asyncio.run(caller.call_many(calls(peer, b"echo"), 10.0))) == [b"echo"]
    assert held()[0] == threads
    assert held()[1] < files + 30, "a closed socket's files go a moment later, but they go"


def test_loops_of_two_threads_use_one_caller(caller, peer):
    answers = []

    async def several(name: bytes) -> list[bytes]:
        return [headers(await caller.call_many(calls(peer, name), 10.0))[0] for _ in range(50)]

    threads = [threading.Thread(target=lambda n=n: answers.append(asyncio.run(several(n)))) for n in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert sorted(answers) == [[b"a"] * 50, [b"b"] * 50]


def test_a_cancelled_call_leaves_the_others_of_its_loop_alone(caller, peer):
    async def story() -> list[bytes]:
        doomed = asyncio.ensure_future(caller.call_many(calls(peer, b"park"), 10.0))
        await caller.call_many(calls(peer, b"echo"), 10.0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return headers(await caller.call_many(calls(peer, b"free", b"last"), 10.0))

    assert asyncio.run(story()) == [b"free", b"last"]


class Keeper(Desk):
    """Has no time for anybody until it is told, and keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.kept: list[bytes] = []

    def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> Any:
        assert self.free.wait(JOIN_S)
        self.kept += [bytes(frame) for frame in frames]
        return super().handle(envelope, header, frames, now)


async def _cancelled(caller: Any, several: list[Any]) -> None:
    call = asyncio.ensure_future(caller.call_many(several, 30.0))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def _timed_out(caller: Any, several: list[Any]) -> None:
    with pytest.raises(QueueUnreachableError, match="did not answer"):
        await caller.call_many(several, 0.0)


@pytest.mark.programs
@pytest.mark.parametrize("give_up", [_cancelled, _timed_out])
def test_a_call_that_was_given_up_half_sent_says_nothing_that_was_not_meant(caller, tmp_path, kind, give_up):
    frames = [np.full(size, 2, np.uint8) for size in (1, 1000, 32 << 20, 1000, 32 << 20)]
    keeper = Keeper()

    async def story(peer: Any) -> list[bytes]:
        first = asyncio.ensure_future(caller.call_many(calls(peer, b"first"), 30.0))
        await asyncio.sleep(0)
        await give_up(caller, calls(peer, b"given up", frames=frames))
        for frame in frames:
            frame.fill(9)  # the caller's own again
        keeper.free.set()
        return headers(await first) + headers(await caller.call_many(calls(peer, b"last"), 30.0))

    with served_by_thread(tmp_path, keeper, kind) as (peer, _):
        assert asyncio.run(story(peer)) == [b"first", b"last"]
    assert [(len(kept), set(kept)) for kept in keeper.kept] == [(frame.nbytes, {2}) for frame in frames]


# ---- sockets: ends ----


@DRIVES
def test_a_server_killed_while_it_is_waited_for_is_told_at_once(caller, mortal, drive):
    peer, process = mortal
    drive(caller.call_many(calls(peer, b"echo"), 10.0))
    killer = threading.Timer(0.1, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(QueueUnreachableError, match=r"^desk at \S+ has ended"):
        drive(caller.call_many(calls(peer, b"park", b"echo"), 60.0))
    assert time.monotonic() - started < AT_ONCE_S
    killer.join()


@DRIVES
def test_a_server_that_is_gone_already_is_told_at_once(caller, mortal, drive):
    peer, process = mortal
    process.kill()
    process.join()
    started = time.monotonic()
    with pytest.raises(QueueUnreachableError, match="has ended"):
        drive(caller.call_many(calls(peer, b"echo"), 60.0))
    assert time.monotonic() - started < AT_ONCE_S


@DRIVES
def test_a_frozen_server_is_given_up_at_the_deadline_and_answers_when_it_thaws(caller, mortal, drive):
    peer, process = mortal
    drive(caller.call_many(calls(peer, b"echo"), 10.0))
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(QueueUnreachableError, match=r"did not answer within 0\.1 s"):
        drive(caller.call_many(calls(peer, b"lost", b"too"), 0.1))
    os.kill(process.pid, signal.SIGCONT)
    assert headers(drive(caller.call_many(calls(peer, b"echo"), 10.0))) == [b"echo"]


def test_closing_ends_the_calls_of_other_threads_and_loops(peer):
    caller, ended, waiting = make_caller("me"), [], threading.Barrier(3)

    def wait(drive: Callable[[Any], Any]) -> None:
        drive(caller.call_many(calls(peer, b"echo"), 10.0))
        waiting.wait(JOIN_S)
        try:
            drive(caller.call_many(calls(peer, b"park"), 60.0))
        except ClosedError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=wait, args=(drive,)) for drive in (blocking, asyncio.run)]
    for thread in threads:
        thread.start()
    waiting.wait(JOIN_S)
    started = time.monotonic()
    caller.close()
    for thread in threads:
        thread.join(JOIN_S)
    assert ended == ["this client was closed; make a new one, or call init() again."] * 2
    assert time.monotonic() - started < AT_ONCE_S


def test_closing_inside_the_loop_ends_the_calls_of_that_loop(peer):
    caller = make_caller("me")

    async def story() -> None:
        parked = asyncio.ensure_future(caller.call_many(calls(peer, b"park"), 60.0))
        await caller.call_many(calls(peer, b"echo"), 10.0)
        caller.close()
        with pytest.raises(ClosedError):
            await parked

    asyncio.run(story())


@DRIVES
def test_after_closing_every_call_fails_and_closing_again_is_harmless(peer, drive):
    caller = make_caller("me")
    drive(caller.call_many(calls(peer, b"echo"), 10.0))
    caller.close()
    caller.close()
    with pytest.raises(ClosedError):
        drive(caller.call_many(calls(peer, b"echo"), 10.0))


@DRIVES
def test_an_address_that_is_none_says_so(caller, drive):
    with pytest.raises(QueueUnreachableError, match="can't connect to desk at 'nowhere'"):
        drive(caller.call_many([numbered(peer_at("nowhere"), b"echo")], 10.0))


# ---- sockets: forks and strangers ----


def _in_child(caller: Any, peer: Any, told: Any) -> None:
    try:
        blocking(caller.call_many(calls(peer, b"echo"), 10.0))
    except ClosedError as error:
        told.put(str(error))
    caller.close()
    own = make_caller("child")
    told.put(headers(blocking(own.call_many(calls(peer, b"blocking"), 10.0))))
    told.put(headers(asyncio.run(own.call_many(calls(peer, b"async"), 10.0))))
    own.close()
    told.put(held()[0])


def test_a_forked_child_calls_with_sockets_of_its_own_and_spoils_none_of_its_parents(caller, mortal):
    peer, _ = mortal
    blocking(caller.call_many(calls(peer, b"echo"), 10.0))
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(caller, peer, told))
    child.start()
    assert [told.get() for _ in range(4)] == [
        "sockets don't survive a fork: this caller belongs to the parent process.",
        [b"blocking"],
        [b"async"],
        ["MainThread"],
    ]
    child.join(JOIN_S)
    assert child.exitcode == 0
    child.close()
    told.close()
    assert headers(blocking(caller.call_many(calls(peer, b"again"), 10.0))) == [b"again"]
