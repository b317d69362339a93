# SPDX-License-Identifier: Apache-2.0
"""What Unix sockets must survive: strangers, half messages, slow and huge ones, forks, and files left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import JOIN_S, Desk, calls, held, numbered, served_by_process, served_by_thread, until

from transfer_queue.errors import LaunchError, QueueUnreachableError
from transfer_queue.launch.directories import short_directory
from transfer_queue.storage.locked_directories import remove_directory
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import PendingCall, run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.framing import Inbound, encode
from transfer_queue.transport.server import SocketServer

MIB = 1 << 20
AT_ONCE_S = 2.0
DRIVES = pytest.mark.parametrize("drive", [run_blocking, asyncio.run], ids=["blocking", "async"])

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def caller() -> Iterator[SocketCaller]:
    caller = SocketCaller("me")
    yield caller
    caller.close()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def peer(tmp_path: Path, desk: Desk) -> Iterator[Peer]:
    with served_by_thread(tmp_path, desk) as (peer, _):
        yield peer


@pytest.fixture
def raw(peer: Peer) -> Iterator[socket.socket]:
    """Somebody who speaks to the server by hand."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(JOIN_S)
    connection.connect(path_of(peer))
    yield connection
    connection.close()


def path_of(peer: Peer) -> str:
    return peer.address.removeprefix("ipc://")


def headers(replies: Any) -> list[bytes]:
    return [reply.header for reply in replies]


def echo(caller: SocketCaller, peer: Peer, header: bytes = b"echo", timeout_s: float = 10.0) -> list[bytes]:
    return headers(run_blocking(caller.call_many(calls(peer, header), timeout_s)))


def all_of(*messages: Any) -> bytes:
    return b"".join(bytes(part) for message in messages for part in encode(*message))


# ---- connecting ----


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside, this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[1] + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors_the_error_says_so_and_not_that_a_peer_has_ended(caller, tmp_path):
    with served_by_process(tmp_path) as (peer, _):
        told = r"can't connect to desk at \S+ .*Too many open files.* \(ulimit -n\)\.$"
        run_blocking(caller.post(numbered(peer, b"the caller has all that it needs, but for a connection")))
        waiting = PendingCall(caller.call_many(calls(peer, b"park"), 10.0))
        with no_descriptors(), pytest.raises(QueueUnreachableError, match=told):
            echo(caller, peer)
        assert echo(caller, peer) == [b"echo"]
        waiting.close()


def test_a_server_out_of_descriptors_goes_on_and_lets_newcomers_in_when_there_are_some(caller, peer):
    assert echo(caller, peer) == [b"echo"]
    with socket.socket(socket.AF_UNIX) as newcomer:
        newcomer.settimeout(JOIN_S)
        with no_descriptors():
            newcomer.connect(path_of(peer))
            newcomer.sendall(all_of((0, b"newcomer"), (1, b"echo")))
            for _ in range(10):
                assert echo(caller, peer) == [b"echo"]
        assert newcomer.recv(1000) == all_of((1, b"echo"))


@DRIVES
def test_where_nobody_listens_a_call_says_so_at_once(caller, tmp_path, drive):
    with pytest.raises(QueueUnreachableError, match=r"^desk at ipc:.* has ended, or the address is wrong: nothing"):
        drive(caller.call_many([numbered(Peer("desk", f"ipc://{tmp_path}/nothing"), b"echo")], 60.0))


def test_a_socket_of_another_user_is_told_as_such(tmp_path):
    """Root may use every socket, so another user tries this one."""
    with served_by_thread(tmp_path, Desk()) as (peer, _):
        os.chmod(tmp_path, 0)
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:
                os.setuid(12345)
            try:
                echo(SocketCaller("stranger"), peer)
            except QueueUnreachableError as error:
                os._exit(7 if "This socket belongs to another user" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os.chmod(tmp_path, 0o700)


def test_while_too_many_connect_at_once_a_newcomer_waits_a_little_and_is_told(caller, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(f"{tmp_path}/full")
        listener.listen(0)
        first.connect(f"{tmp_path}/full")
        with pytest.raises(QueueUnreachableError, match="Too many connect at once"):
            echo(caller, Peer("desk", f"ipc://{tmp_path}/full"))


def test_sockets_have_a_short_directory_wherever_temporary_files_are_kept(tmp_path, monkeypatch):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    found = Path(short_directory("tq-"))
    assert (found.parent, found.stat().st_mode & 0o777) == (Path("/tmp"), 0o700)
    server = SocketServer(f"ipc://{found}/{'n' * 24}")
    server.close()
    remove_directory(str(found))
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    remove_directory(short_directory("tq-"))


MAKES_A_DIRECTORY = """
import os, signal, sys
from pathlib import Path
from transfer_queue.launch.directories import short_directory
Path(short_directory("tq-"), "keys").touch()
print("made", flush=True)
signal.pause()
"""


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for sockets
        monkeypatch.setattr("tempfile.tempdir", folder)
        (Path(folder) / "tq-foreign").mkdir()
        with makes_a_directory(folder) as killed, makes_a_directory(folder):
            held = short_directory("tq-")
            assert len(list(Path(folder).glob("tq-*"))) == 4
            killed.kill()
            killed.wait()
            remove_directory(held)
            remove_directory(short_directory("tq-"))
            left = [path.name for path in Path(folder).glob("tq-*/*")]
            assert (left, len(list(Path(folder).glob("tq-*")))) == (["keys"], 2)


@contextlib.contextmanager
def makes_a_directory(folder):
    """A process that has made one in this folder and holds it."""
    environment = {**os.environ, "TMPDIR": folder}
    command = [sys.executable, "-c", MAKES_A_DIRECTORY]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "made\n"
            yield process
        finally:
            process.kill()


def test_where_no_directory_is_short_enough_the_places_are_named(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(LaunchError, match=r"/tmp: longer than \d+ bytes; /var/tmp: longer than .* Set TMPDIR"):
        short_directory("t" * 70)


def test_a_server_leaves_no_file_and_replaces_what_a_killed_one_left(caller, desk, tmp_path):
    with served_by_process(tmp_path) as (peer, process):
        process.kill()
        process.join()
        assert os.listdir(tmp_path) == ["process"]
    (tmp_path / "process").rename(tmp_path / "thread")
    with served_by_thread(tmp_path, desk) as (peer, _):
        assert echo(caller, peer) == [b"echo"]
    assert list(tmp_path.iterdir()) == []


def test_a_server_takes_no_address_from_a_living_one_and_removes_no_file_that_is_not_a_socket(desk, tmp_path):
    (tmp_path / "file").write_text("somebody's")
    with served_by_thread(tmp_path, desk) as (peer, _):
        for address in (peer.address, f"ipc://{tmp_path}/file"):
            with pytest.raises(OSError, match="Address already in use"):
                SocketServer(address)
    assert (tmp_path / "file").read_text() == "somebody's"


# ---- strangers and halves ----


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(100_000),
        all_of((0, b"\xff\xfe no name")) + b"TQL1" + b"\xff" * 20,
        all_of((0, b"me"))[:-1] + b"\0" * 100_000,
        all_of((0, b"me", [b"x"]), (1, b"echo")) + b"\0" * 100,
    ],
    ids=["http", "noise", "sizes", "one byte off", "after a request"],
)
def test_a_stranger_is_shown_out_and_nobody_else_notices(caller, peer, raw, garbage):
    assert echo(caller, peer) == [b"echo"]
    try:
        raw.sendall(garbage)
        while raw.recv(1 << 16):
            pass
    except ConnectionError:  # it was shut before it had said everything
        pass
    assert echo(caller, peer) == [b"echo"]


def test_half_a_message_of_one_who_died_leaves_nothing(caller, peer, raw, desk):
    echo(caller, peer)
    files = held()[1]
    raw.sendall(all_of((0, b"half"), (1, b"park", [bytes(8 * MIB)]))[: 3 * MIB])
    raw.close()
    deadline = time.monotonic() + JOIN_S
    while held()[1] != files - 2 and time.monotonic() < deadline:  # its end and the server's
        echo(caller, peer)
    assert (held()[1], desk.parked) == (files - 2, [])


@DRIVES
def test_what_a_strange_server_says_is_an_error(caller, tmp_path, drive):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/strange")
    listener.listen()

    def answer() -> None:
        for said in (b"HTTP/1.1 400 Bad Request\r\n\r\n", all_of((2**60, b"of another call"))):
            connection, _ = listener.accept()
            heard = b""
            while b"echo" not in heard:
                heard += connection.recv(1 << 16)
            connection.sendall(said)
            connection.recv(1 << 16)
            connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    call = numbered(Peer("strange", f"ipc://{tmp_path}/strange"), b"echo")
    with pytest.raises(QueueUnreachableError, match=r"strange at ipc:.* sent not a message of this version"):
        drive(caller.call_many([call], 10.0))
    with pytest.raises(QueueUnreachableError, match="did not answer within"):
        drive(caller.call_many([call], 0.3))
    caller.close()
    thread.join(JOIN_S)
    listener.close()


# ---- large and slow ----


@DRIVES
def test_a_frame_of_200_mib_goes_both_ways(caller, tmp_path, drive):
    sent = np.arange(200 * MIB // 8)
    with served_by_process(tmp_path) as (peer, _):
        ((_, _, (frame,)),) = drive(caller.call_many(calls(peer, b"echo", frames=[sent]), 50.0))
    assert np.array_equal(np.frombuffer(frame, sent.dtype), sent)


@DRIVES
def test_thousands_of_frames_go_both_ways(caller, peer, drive):
    sent = [b"%d" % number for number in range(4000)] + [bytes(20_000)] * 1500
    ((_, _, frames),) = drive(caller.call_many(calls(peer, b"echo", frames=sent), 50.0))
    assert [bytes(frame) for frame in frames] == sent


def test_a_slow_reader_delays_nobody_and_gets_all(caller, peer, raw):
    frame = os.urandom(MIB) * 64
    raw.sendall(all_of((0, b"slow"), (1, b"echo", [frame]), (2, b"echo")))
    for _ in range(50):
        started = time.monotonic()
        assert echo(caller, peer) == [b"echo"]
        assert time.monotonic() - started < AT_ONCE_S
    raw.setblocking(True)
    inbound, messages = Inbound(), []
    while len(messages) < 2:
        messages += inbound.receive(raw)
    assert [(number, header) for number, header, _ in messages] == [(1, b"echo"), (2, b"echo")]
    assert bytes(messages[0].frames[0]) == frame


def test_a_slow_writer_delays_nobody_and_is_heard(caller, peer, raw):
    said = all_of((0, b"slow"), (5, b"echo", [b"abc"]))
    for position in range(len(said)):
        raw.sendall(said[position : position + 1])
        assert echo(caller, peer) == [b"echo"]
    raw.setblocking(True)
    ((number, header, frames),) = Inbound().receive(raw)
    assert (number, header, [bytes(frame) for frame in frames]) == (5, b"echo", [b"abc"])


def test_large_and_small_calls_of_one_loop_come_through_together(caller, tmp_path):
    large = np.arange(8 * MIB // 8)

    async def story(peer: Peer) -> None:
        several = [caller.call_many(calls(peer, b"large", frames=[large]), 50.0) for _ in range(6)]
        several += [caller.call_many(calls(peer, b"%d" % number), 50.0) for number in range(200)]
        replies = await asyncio.gather(*several)
        assert [headers(reply) for reply in replies[6:]] == [[b"%d" % number] for number in range(200)]
        assert all(np.array_equal(np.frombuffer(frame, large.dtype), large) for ((_, _, (frame,)),) in replies[:6])

    with served_by_process(tmp_path) as (peer, _):
        asyncio.run(story(peer))


def test_a_call_cancelled_half_sent_leaves_the_others_of_its_loop_alone(caller, peer):
    async def story() -> list[bytes]:
        doomed = asyncio.ensure_future(caller.call_many(calls(peer, b"park", frames=[bytes(64 * MIB)]), 30.0))
        await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return headers(await caller.call_many(calls(peer, b"free", b"last"), 30.0))

    assert asyncio.run(story()) == [b"free", b"last"]


@DRIVES
def test_a_server_that_ends_while_it_is_sent_to_is_told_at_once(caller, tmp_path, drive):
    with served_by_process(tmp_path) as (peer, process):
        drive(caller.call_many(calls(peer, b"echo"), 10.0))
        os.kill(process.pid, signal.SIGSTOP)  # it stops reading
        killer = threading.Timer(0.1, process.kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(QueueUnreachableError, match="has ended"):
            drive(caller.call_many(calls(peer, b"echo", frames=[bytes(64 * MIB)]), 60.0))
        assert time.monotonic() - started < AT_ONCE_S
        killer.join()


# ---- ends ----


def test_a_caller_that_is_dropped_or_lives_until_the_process_ends_leaves_no_socket_and_no_warning(caller, tmp_path):
    with served_by_process(tmp_path) as (peer, _):
        echo(caller, peer)
        files = held()
        for _ in range(10):
            asyncio.run(SocketCaller("dropped").call_many(calls(peer, b"echo"), 10.0))
            run_blocking(SocketCaller("dropped").call_many(calls(peer, b"echo"), 10.0))
        gc.collect()  # a ResourceWarning would be an error here
        assert held() == files
        code = (
            "from transfer_queue.transport.base import PeerCall, Peer\n"
            "from transfer_queue.transport.caller import SocketCaller\n"
            "from transfer_queue.transport.blocking import PendingCall, run_blocking\n"
            "caller = SocketCaller('unclosed')\n"
            f"call = PeerCall(Peer('desk', {peer.address!r}), b'echo', number=1)\n"
            "print(run_blocking(caller.call_many([call], 10.0)))\n"
        )
        ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("[Message(number=1, header=b'echo', frames=[])]\n", "")


@DRIVES
def test_a_server_that_stops_in_a_living_process_is_told_at_once(caller, desk, tmp_path, drive):
    with served_by_thread(tmp_path, desk) as (peer, server):
        drive(caller.call_many(calls(peer, b"echo"), 10.0))
        stopper = threading.Timer(0.1, server.stop)
        stopper.start()
        with pytest.raises(QueueUnreachableError, match=r"^desk at ipc:\S+ has ended"):
            drive(caller.call_many(calls(peer, b"park"), 60.0))
        stopper.join()
    with pytest.raises(QueueUnreachableError, match="has ended"):
        drive(caller.call_many(calls(peer, b"echo"), 60.0))


def test_a_forked_child_keeps_no_end_of_its_parents_lines_open(caller, desk, tmp_path):
    context = multiprocessing.get_context("fork")
    with served_by_thread(tmp_path, desk) as (peer, server):
        assert echo(caller, peer) == [b"echo"]
        stay = context.Event()
        child = context.Process(target=stay.wait)
        child.start()
        try:
            other = SocketCaller("other")
            assert echo(other, peer) == [b"echo"]
            caller.close()
            until(lambda: desk.gone == ["me"])  # the server hears of the end of a line
            server.stop()
            started = time.monotonic()
            with pytest.raises(QueueUnreachableError, match="has ended"):
                echo(other, peer, b"park", 60.0)
            assert time.monotonic() - started < AT_ONCE_S
            other.close()
        finally:
            stay.set()
            child.join(JOIN_S)
        assert child.exitcode == 0
        child.close()


def _files_in_a_fork(caller: SocketCaller, peer: Peer, told: Any) -> None:
    before = held()[1]
    own = SocketCaller("child")
    assert echo(own, peer) == [b"echo"]
    own.close()
    told.put((before, held()[1]))


def test_a_forked_child_has_no_file_of_its_parents_caller(tmp_path):
    with served_by_process(tmp_path) as (peer, _):
        context = multiprocessing.get_context("fork")
        told = context.SimpleQueue()

        def files(caller: SocketCaller) -> tuple[int, int]:
            child = context.Process(target=_files_in_a_fork, args=(caller, peer, told))
            child.start()
            found = told.get()
            child.join(JOIN_S)
            assert child.exitcode == 0
            child.close()
            return found

        fresh = files(SocketCaller("fresh"))
        used = SocketCaller("used")
        assert echo(used, peer) == [b"echo"]
        assert files(used) == fresh == (fresh[0], fresh[0])
        used.close()
        told.close()
