# SPDX-License-Identifier: Apache-2.0
"""Who is there: a client is known by its name and is gone with its last connection; and what no handler can break."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transport_kit import (
    JOIN_S,
    Desk,
    answer,
    begin,
    blocking,
    calls,
    framed,
    make_caller,
    numbered,
    served_by_thread,
    until,
)

from transfer_queue.errors import QueueUnreachableError

pytestmark = pytest.mark.usefixtures("nothing_left")


def echo(caller: Any, peer: Any, header: bytes = b"echo", timeout_s: float = 10.0) -> bytes:
    ((_, found, _),) = blocking(caller.call_many(calls(peer, header), timeout_s))
    return found


# ---- every transport ----


def test_a_client_is_gone_when_it_closes_and_what_that_makes_possible_is_sent(desk):
    make, peer, served = desk
    leaving, staying = make("leaving"), make("staying")
    echo(leaving, peer)
    waits = begin(staying.call_many(calls(peer, b"park"), 10.0))
    echo(staying, peer)
    leaving.close()
    assert [reply.header for reply in waits.finish()] == [b"left leaving"]
    assert served.gone == ["leaving"]


def test_a_client_that_comes_again_under_its_name_is_served(desk):
    make, peer, served = desk
    for number in range(3):
        caller = make("again")
        assert echo(caller, peer) == b"echo"
        caller.close()
        until(lambda number=number: served.gone == ["again"] * (number + 1))


# ---- sockets ----


def test_a_client_is_gone_with_the_last_of_its_connections(tmp_path, kind):
    served = Desk()
    with served_by_thread(tmp_path, served, kind) as (peer, server):
        first, second, other = make_caller("one"), make_caller("one"), make_caller("other")
        several = [begin(first.call_many(calls(peer, b"park"), 10.0)) for _ in range(3)]
        echo(second, peer)
        echo(other, peer)
        # Calls that wait at the same time have connections of their own over "unix", and share one over "tcp".
        assert server.clients() == {"one": 4 if kind == "unix" else 2, "other": 1}
        for pending in several:
            pending.close()
        first.close()
        until(lambda: server.clients() == {"one": 1, "other": 1})
        assert served.gone == []
        second.close()
        until(lambda: server.clients() == {"other": 1})
        until(lambda: served.gone == ["one"])
        other.close()


def test_one_event_loop_after_the_other_is_the_same_client(tmp_path, kind):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, server):
        for _ in range(20):
            asyncio.run(caller.call_many(calls(peer, b"echo"), 10.0))
            assert server.clients() == {"me": 1}
        assert served.gone == []
        caller.close()


def _talk_and_be_killed(peer: Any) -> None:
    caller = make_caller("mortal")
    for number in range(200):
        blocking(caller.post(numbered(peer, b"%d" % number)))
    os.kill(os.getpid(), 9)


def test_all_that_a_killed_process_has_sent_is_handled_before_its_end_counts(tmp_path):
    class Noting(Desk):
        def client_gone(self, client: str, now: float) -> list[Any]:
            self.gone.append(f"{client} after {len(self.said)}")
            return []

    served = Noting()
    with served_by_thread(tmp_path, served) as (peer, _):
        process = multiprocessing.get_context("fork").Process(target=_talk_and_be_killed, args=(peer,))
        process.start()
        process.join(JOIN_S)
        process.close()
        until(lambda: served.gone == ["mortal after 200"], lambda: served.gone)


def all_of(*messages: Any) -> bytes:
    return b"".join(framed(*message) for message in messages)


def test_what_came_before_the_end_is_handled_though_answers_find_nobody(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served) as (peer, _):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(peer.address.removeprefix("ipc://"))
            requests = [(number, b"echo", [bytes(1000)]) for number in range(1, 2000)]
            raw.settimeout(JOIN_S)
            sender = threading.Thread(target=raw.sendall, args=(all_of((0, b"raw"), *requests[:100], (0, b"last")),))
            sender.start()
            sender.join()
        until(lambda: served.gone == ["raw"])
        assert served.said == [b"last"]


def test_a_connection_that_closes_beside_others_is_reported_and_its_client_stays(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served) as (peer, server):
        caller = make_caller("me")
        echo(caller, peer)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(peer.address.removeprefix("ipc://"))
            raw.sendall(framed(0, b"me"))
            until(lambda: server.clients() == {"me": 2})
        until(lambda: served.closed == ["me"])
        assert (server.clients(), served.gone) == ({"me": 1}, [])
        caller.close()
        until(lambda: served.gone == ["me"])


def test_a_connection_that_never_said_its_name_is_no_client(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served) as (peer, server):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(peer.address.removeprefix("ipc://"))
            caller = make_caller("me")
            echo(caller, peer)
            assert server.clients() == {"me": 1}
        caller.close()
        until(lambda: served.gone == ["me"])


def test_a_client_that_is_disconnected_is_told_and_gone_and_may_come_again(tmp_path, kind):
    served, caller, other = Desk(), make_caller("me"), make_caller("other")
    with served_by_thread(tmp_path, served, kind) as (peer, server):
        pending = begin(caller.call_many(calls(peer, b"park"), 60.0))
        echo(caller, peer)
        echo(other, peer)
        server.disconnect("me")
        server.disconnect("nobody")
        with pytest.raises(QueueUnreachableError, match="has ended"):
            pending.finish()
        until(lambda: served.gone == ["me"])
        assert echo(other, peer) == b"echo"
        assert echo(caller, peer) == b"echo"
        caller.close()
        other.close()


def test_a_handler_may_disconnect_the_client_that_it_serves(tmp_path, kind):
    class Strict(Desk):
        server: Any = None

        def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> list[Any]:
            if header == b"bad":
                self.server.disconnect(envelope.client)
                assert self.gone == [], "not within the call"
            return super().handle(envelope, header, frames, now)

    served, caller = Strict(), make_caller("me")
    with served_by_thread(tmp_path, served, kind) as (peer, served.server):
        with pytest.raises(QueueUnreachableError, match="has ended"):
            echo(caller, peer, b"bad", 60.0)
        until(lambda: served.gone == ["me"])
    caller.close()


# ---- what goes wrong in a handler ----


class Broken(Desk):
    """ "raise" and "exit" end as they say, behind the answers to what is parked; "bad" has an answer that is none."""

    def handle(self, envelope: Any, header: bytes, frames: list[memoryview], now: float) -> Iterator[Any]:
        if header in (b"raise", b"exit", b"bad"):
            parked, self.parked = self.parked, []
            if header == b"bad":
                yield answer(envelope, "no bytes", [object()])
            yield from (answer(waiting, name) for waiting, name in parked)
            if header == b"raise":
                raise RuntimeError("a bug")
            if header == b"exit":
                raise SystemExit(3)
            return
        yield from super().handle(envelope, header, frames, now)

    def client_gone(self, client: str, now: float) -> list[Any]:
        self.gone.append(client)
        raise RuntimeError("another bug")

    def expire(self, now: float) -> list[Any]:
        super().expire(now)
        raise SystemExit("a third one")


@pytest.fixture
def broken(tmp_path: Path, kind: str) -> Iterator[tuple[Any, Broken]]:
    served = Broken()
    with served_by_thread(tmp_path, served, kind) as (peer, _):
        yield peer, served


@pytest.mark.parametrize("how", [b"raise", b"exit", b"bad"])
def test_an_error_in_a_handler_costs_no_other_answer_and_ends_nothing(broken, how, caplog):
    peer, served = broken
    parked, caller = make_caller("parked"), make_caller("me")
    pending = begin(parked.call_many(calls(peer, b"park one", b"park two"), 10.0))
    until(lambda: len(served.parked) == 2)
    blocking(caller.post(numbered(peer, b"said")))
    with pytest.raises(QueueUnreachableError, match="did not answer"):
        echo(caller, peer, how, 0.05)
    assert [reply.header for reply in pending.finish()] == [b"park one", b"park two"]
    assert echo(caller, peer) == b"echo"
    assert [record.getMessage() for record in caplog.records] == ["a server could not finish something, and goes on"]
    parked.close()
    caller.close()


def test_an_error_as_a_client_leaves_or_a_deadline_passes_ends_nothing(broken, caplog):
    peer, served = broken
    leaving, caller = make_caller("leaving"), make_caller("me")
    echo(leaving, peer)
    leaving.close()
    until(lambda: served.gone == ["leaving"])
    with pytest.raises(QueueUnreachableError, match="did not answer"):
        echo(caller, peer, b"late", 0.2)
    assert echo(caller, peer) == b"echo"
    assert [record.exc_info[0] for record in caplog.records] == [RuntimeError, SystemExit]
    caller.close()
