# SPDX-License-Identifier: Apache-2.0
"""What a server does beside answering: watching processes, attending descriptors, ending, whatever it polls with."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from transport_kit import JOIN_S, Desk, calls, served_by_thread

from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.descriptors import READ, WRITE
from transfer_queue.transport.loop import Readiness
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.machine import pid_namespace

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def caller() -> Iterator[SocketCaller]:
    caller = SocketCaller("me")
    yield caller
    caller.close()


def test_the_end_of_a_watched_process_is_told_once(tmp_path, caller):
    context = multiprocessing.get_context("fork")
    stay = context.Event()
    processes = [context.Process(target=stay.wait) for _ in range(2)]
    for process in processes:
        process.start()
    told: list[int] = []
    server = SocketServer(f"ipc://{tmp_path}/watching")
    for process in processes:
        server.watch(process.pid, pid_namespace(), partial(told.append, process.pid))
    pids = [process.pid for process in processes]
    thread = threading.Thread(target=server.serve, args=(Desk(),))
    thread.start()
    stay.set()
    for process in processes:
        process.join(JOIN_S)
        process.close()
    deadline = time.monotonic() + JOIN_S
    while len(told) < 2 and time.monotonic() < deadline:
        run_blocking(caller.call_many(calls(Peer("desk", server.address), b"echo"), 10.0))
    run_blocking(caller.call_many(calls(Peer("desk", server.address), b"echo"), 10.0))
    server.stop()
    thread.join(JOIN_S)
    assert sorted(told) == sorted(pids)


def test_a_server_may_be_stopped_again_and_closed_without_having_served(tmp_path):
    with served_by_thread(tmp_path, Desk()) as (_, server):
        pass
    server.stop()
    server.close()
    SocketServer(f"ipc://{tmp_path}/unused").close()


def test_an_address_that_cannot_be_bound_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        SocketServer(f"ipc://{tmp_path}/no/such/directory")


def test_an_attended_descriptor_is_told_until_it_is_read_and_never_after_dismissing(tmp_path, caller):
    read, write = os.pipe()
    server = SocketServer(f"ipc://{tmp_path}/attending")
    heard: list[bytes] = []
    times: list[float] = []

    def ready() -> None:
        times.append(time.monotonic())
        if len(times) >= 3:  # it is told again for as long as there is something to read
            heard.append(os.read(read, 1))
        if heard == [b"a", b"b"]:
            dismiss()

    dismiss = server.attend(read, ready)
    os.write(write, b"abc")
    thread = threading.Thread(target=server.serve, args=(Desk(),))
    thread.start()
    peer, deadline = Peer("desk", server.address), time.monotonic() + JOIN_S
    while len(heard) < 2 and time.monotonic() < deadline:
        run_blocking(caller.call_many(calls(peer, b"echo"), 10.0))
    for _ in range(3):
        run_blocking(caller.call_many(calls(peer, b"echo"), 10.0))
    server.stop()
    thread.join(JOIN_S)
    assert (heard, len(times), times == sorted(times)) == ([b"a", b"b"], 4, True)
    os.close(read)
    os.close(write)


def test_readiness_tells_of_what_is_wanted_until_it_is_removed():
    readiness = Readiness()
    read, write = os.pipe()
    told: list[str] = []
    readiness.add(read, lambda ready: told.append(f"read {ready & READ}"))
    readiness.add(write, lambda ready: told.append(f"write {ready & WRITE}"))
    readiness.want(write, WRITE)

    def turn() -> list[str]:
        told.clear()
        for act, ready in readiness.wait(0.0):
            act(ready)
        return sorted(told)

    assert turn() == [f"write {WRITE}"]
    os.write(write, b"x")
    readiness.want(write, 0)
    assert turn() == [f"read {READ}"]
    readiness.remove(read)
    assert turn() == []
    started = time.monotonic()
    assert list(readiness.wait(0.002)) == []
    assert time.monotonic() - started >= 0.002
    readiness.close()
    os.close(read)
    os.close(write)


def test_one_that_is_removed_by_another_of_the_same_turn_is_not_told(tmp_path):
    readiness = Readiness()
    pipes = [os.pipe() for _ in range(2)]
    told: list[int] = []

    def act_of(number: int) -> Callable[[int], None]:
        def act(_: int) -> None:
            told.append(number)
            readiness.remove(pipes[1 - number][0])

        return act

    for number, (read, write) in enumerate(pipes):
        os.write(write, b"x")
        readiness.add(read, act_of(number))
    for act, ready in readiness.wait(0.0):
        act(ready)
    assert len(told) == 1
    readiness.close()
    for descriptor in (*pipes[0], *pipes[1]):
        os.close(descriptor)
