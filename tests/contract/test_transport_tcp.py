# SPDX-License-Identifier: Apache-2.0
"""Between hosts: keys keep strangers out, and heartbeats tell each end whether the other lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from transport_kit import (
    JOIN_S,
    KEYS,
    Desk,
    calls,
    held,
    make_caller,
    numbered,
    served_by_process,
    served_by_thread,
    until,
)

from transfer_queue.errors import ConfigError, QueueUnreachableError
from transfer_queue.transport.base import Liveness, Peer
from transfer_queue.transport.blocking import PendingCall, run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.framing import encode
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.tcp_wire import (
    BEAT,
    BYE,
    CALL,
    HELLO,
    VERSION,
    PartsReader,
    make_keys,
    read_keys,
    read_public_key,
    write_keys,
)

DRIVES = pytest.mark.parametrize("drive", [run_blocking, asyncio.run], ids=["blocking", "async"])
SHORT = {"liveness": Liveness(heartbeat_s=0.02, lease_s=0.2)}

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def caller() -> Iterator[SocketCaller]:
    made = make_caller()
    yield made
    made.close()


def echo(caller: SocketCaller, peer: Peer, header: bytes = b"echo", timeout_s: float = 10.0) -> bytes:
    ((_, found, _),) = run_blocking(caller.call_many(calls(peer, header), timeout_s))
    return found


# ---- keys ----


def test_a_key_file_is_this_user_s_alone_and_is_never_written_over(tmp_path):
    keys = write_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert (read_keys(tmp_path / "keys"), read_public_key(tmp_path / "keys")) == (keys, keys.public)
    assert keys.secret not in repr(keys)
    with pytest.raises(FileExistsError):
        write_keys(tmp_path / "keys")


def test_a_client_s_key_file_may_lack_the_secret(tmp_path):
    path = tmp_path / "public"
    path.touch(0o600)
    path.write_text(json.dumps({"public": KEYS.public}))
    assert read_public_key(path) == KEYS.public
    with pytest.raises(ConfigError, match="there is no secret key in"):
        read_keys(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"public": 5}', '{"public": "short"}', json.dumps({"public": "é" * 40}), "\0"]
)
def test_what_is_no_key_file_is_told_as_such(tmp_path, text):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match="key"):
        read_public_key(path)


def test_keys_that_others_can_read_are_not_used(tmp_path):
    write_keys(tmp_path / "keys")
    os.chmod(tmp_path / "keys", 0o640)
    with pytest.raises(ConfigError, match=r"other users can read the keys in \S+ \(mode 640\)"):
        read_keys(tmp_path / "keys")


def test_without_keys_a_server_warns(caplog):
    server = SocketServer("tcp://127.0.0.1:0")
    assert "open to every process" in caplog.text
    thread = threading.Thread(target=server.serve, args=(Desk(),))
    thread.start()
    caller = SocketCaller("me")
    assert echo(caller, Peer("desk", server.address)) == b"echo"
    caller.close()
    server.stop()
    thread.join(JOIN_S)


@pytest.mark.parametrize("key", [None, make_keys().public], ids=["none", "another"])
@DRIVES
def test_a_client_without_the_right_key_is_told_at_once_and_never_heard(tmp_path, caller, key, drive):
    served, stranger = Desk(), SocketCaller("stranger", key)
    with served_by_thread(tmp_path, served, "tcp") as (peer, server):
        with pytest.raises(QueueUnreachableError, match="does not accept this client's key"):
            drive(stranger.call_many([numbered(peer, b"park")], 60.0))
        assert echo(caller, peer) == b"echo"
        assert (server.clients(), served.parked) == ({"me": 1}, [])
    stranger.close()


def test_a_client_with_a_key_says_nothing_to_a_server_without(caller):
    server = SocketServer("tcp://127.0.0.1:0")
    thread = threading.Thread(target=server.serve, args=(Desk(),))
    thread.start()
    with pytest.raises(QueueUnreachableError, match="does not accept this client's key"):
        echo(caller, Peer("desk", server.address), timeout_s=60.0)
    server.stop()
    thread.join(JOIN_S)


# ---- strangers ----


@contextmanager
def stranger_at(address: str, key: str | None = None) -> Iterator[Any]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if key is not None:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = key.encode()
    dealer.connect(address)
    yield dealer
    dealer.close()
    context.term()


SAID: list[list[bytes]] = [
    [b""], [b"a", b"b"], [CALL, b"TQL1" + b"\xff" * 20], [CALL, b"", b""],
    [HELLO], [HELLO, VERSION], [HELLO, b"TQT0", b"me"], [CALL], [CALL, b"short", b"echo"],
    [BYE], [BEAT, b"more"], [b"\xff\xfe"],
]  # fmt: skip


def test_strangers_without_a_key_get_no_word_and_the_server_goes_on(tmp_path, caller):
    with served_by_thread(tmp_path, Desk(), "tcp") as (peer, server):
        echo(caller, peer)
        with stranger_at(peer.address) as dealer:
            for parts in SAID:
                dealer.send_multipart(parts)
            for said in (b"GET / HTTP/1.1\r\n\r\n" * 100, bytes(80)):
                with socket.create_connection(peer.address.removeprefix("tcp://").rsplit(":", 1), JOIN_S) as raw:
                    raw.sendall(said)
                    with contextlib.suppress(ConnectionError):  # it is shut out at once
                        assert b"echo" not in raw.recv(1000)
            for _ in range(50):
                assert echo(caller, peer) == b"echo"
            assert dealer.poll(0) == 0
        assert server.clients() == {"me": 1}


def test_garbage_of_one_with_a_key_harms_nobody(tmp_path, caller):
    hello = [HELLO, VERSION, b"known"]
    with served_by_thread(tmp_path, Desk(), "tcp") as (peer, _):
        with stranger_at(peer.address, KEYS.public) as dealer:
            for parts in [*SAID, hello, *SAID, [HELLO, VERSION, b"\xff"], hello]:
                dealer.send_multipart(parts)
            request = [bytes(part) for part in encode(7, b"echo", [b"frame"])]
            dealer.send_multipart([CALL, *request])
            dealer.rcvtimeo = int(JOIN_S * 1000)
            while (answer := dealer.recv_multipart())[0] in (BYE, BEAT):
                pass
            assert answer == [CALL, *request]
        assert echo(caller, peer) == b"echo"


@DRIVES
def test_answers_of_a_strange_server_are_not_taken_for_ours(drive):
    context = zmq.Context()
    strange = context.socket(zmq.ROUTER)
    strange.bind("tcp://127.0.0.1:0")

    def answer() -> None:
        for _ in range(2):  # the greeting and the call
            route, *_ = strange.recv_multipart()
        for parts in ([b""], [CALL], [CALL, *encode(2**63, b"of another call")], [b"?"]):
            strange.send_multipart([route, *parts])

    thread = threading.Thread(target=answer)
    thread.start()
    caller = SocketCaller("me")
    with pytest.raises(QueueUnreachableError, match="did not answer within"):
        drive(caller.call_many([numbered(Peer("strange", strange.last_endpoint.decode()), b"echo")], 0.3))
    thread.join(JOIN_S)
    caller.close()
    strange.close(linger=0)
    context.term()


@DRIVES
def test_a_server_that_is_stopped_is_said_to_be_there(drive):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # its process does nothing; the kernel accepts for it
        caller = SocketCaller("me")
        peer = Peer("stopped", f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(QueueUnreachableError, match="It is there, but busy or stopped"):
            drive(caller.call_many([numbered(peer, b"echo")], 0.5))
        caller.close()


@DRIVES
def test_a_server_of_another_version_is_told_as_such(drive):
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    other.bind("tcp://127.0.0.1:0")

    def answer() -> None:
        route, *_ = other.recv_multipart()
        other.send_multipart([route, BYE])  # as every version answers a greeting that is not its own

    thread = threading.Thread(target=answer)
    thread.start()
    caller = SocketCaller("me")
    with pytest.raises(QueueUnreachableError, match=r"other at tcp:\S+ has ended .*: it is of another version"):
        drive(caller.call_many([numbered(Peer("other", other.last_endpoint.decode()), b"echo")], 10.0))
    thread.join(JOIN_S)
    caller.close()
    other.close(linger=0)
    context.term()


# ---- addresses ----


@DRIVES
def test_where_nobody_listens_a_call_says_so_at_once(caller, drive):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(QueueUnreachableError, match="has ended, or the address is wrong: nothing listens there"):
        drive(caller.call_many(calls(Peer("desk", f"tcp://127.0.0.1:{port}"), b"echo"), 60.0))


@DRIVES
def test_where_no_host_has_the_name_a_call_says_so(caller, drive):
    with pytest.raises(QueueUnreachableError, match=r"can't connect to desk at tcp://nowhere\.invalid:5555: "):
        drive(caller.call_many(calls(Peer("desk", "tcp://nowhere.invalid:5555"), b"echo"), 60.0))


@pytest.mark.parametrize("address", ["tcp://", "tcp://nowhere", "tcp://127.0.0.1:no", "http://localhost:80"])
def test_what_is_no_address_is_told_as_such(caller, address):
    with pytest.raises(QueueUnreachableError, match="can't connect to desk at"):
        echo(caller, Peer("desk", address))
    with pytest.raises(ConfigError, match="is no address"):
        SocketServer(address, keys=KEYS)


def test_an_address_in_use_is_told_as_such(tmp_path):
    with (
        served_by_thread(tmp_path, Desk(), "tcp") as (peer, _),
        pytest.raises(OSError, match="Address already in use"),
    ):
        SocketServer(peer.address, keys=KEYS)


def test_on_one_host_nothing_of_zmq_is_loaded(tmp_path):
    code = f"""
import sys, threading
from transfer_queue.transport.base import PeerCall, Outgoing, Peer
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
class Echo:
    def handle(self, envelope, header, frames, now): return [Outgoing(envelope, header)]
    def next_deadline(self): return None
    def connection_gone(self, client, route, now): return []
    def client_gone(self, client, now): return []
server = SocketServer("ipc://{tmp_path}/server")
thread = threading.Thread(target=server.serve, args=(Echo(),))
thread.start()
caller = SocketCaller("me")
run_blocking(caller.call_many([PeerCall(Peer("echo", server.address), b"x", number=1)], 10.0))
caller.close(); server.stop(); thread.join()
sys.exit("zmq" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=JOIN_S * 3).returncode == 0


# ---- the other end lives, or not ----


def test_a_client_that_waits_for_longer_than_its_lease_is_not_gone(tmp_path):
    served, caller, other = Desk(), make_caller("waits", **SHORT), make_caller("other", **SHORT)
    with served_by_thread(tmp_path, served, "tcp", **SHORT) as (peer, server):
        pending = PendingCall(caller.call_many(calls(peer, b"park"), 10.0))
        until(lambda: len(served.parked) == 1)
        with pytest.raises(QueueUnreachableError, match="did not answer"):
            echo(other, peer, b"never", 3 * SHORT["liveness"].lease_s)
        assert (server.clients(), served.gone) == ({"waits": 1, "other": 1}, [])
        echo(other, peer, b"free")
        assert [reply.header for reply in pending.finish()] == [b"park"]
        caller.close()
        other.close()


LONGER = {"liveness": Liveness(heartbeat_s=0.05, lease_s=1.0)}
HALF_A_LEASE = 10


def parts_of(number: int, nbytes: int = 1000) -> list[bytes]:
    whole = b"".join(bytes(part) for part in encode(number, b"echo", [bytes(nbytes)]))
    return [whole[at : at + 300] for at in range(0, len(whole), 300)]


def hear_beats(stranger: Any) -> None:
    """Wait for as many beats of the other end as go into half a lease."""
    for _ in range(HALF_A_LEASE):
        while BEAT not in stranger.recv_multipart():
            pass


def test_a_client_whose_message_takes_longer_than_a_lease_is_not_silent(tmp_path):
    served = Desk()
    with (
        served_by_thread(tmp_path, served, "tcp", **LONGER) as (peer, _),
        stranger_at(peer.address, KEYS.public) as dealer,
    ):
        dealer.send_multipart([HELLO, VERSION, b"slow"])
        for part in parts_of(1):
            dealer.send_multipart([CALL, part])
            hear_beats(dealer)
        assert served.gone == [], "not before it says so"
        dealer.send_multipart([BYE])
        until(lambda: served.gone == ["slow"])


@DRIVES
def test_a_server_whose_answer_takes_longer_than_a_lease_is_not_silent(drive):
    context = zmq.Context()
    slow = context.socket(zmq.ROUTER)
    slow.bind("tcp://127.0.0.1:0")

    def answer() -> None:
        while CALL not in (request := slow.recv_multipart()):
            pass
        (message,) = PartsReader().add([zmq.Frame(part) for part in request[2:]])
        for part in parts_of(message.number):
            hear_beats(slow)
            slow.send_multipart([request[0], CALL, part])

    thread = threading.Thread(target=answer)
    thread.start()
    caller = SocketCaller("me", **LONGER)
    call = numbered(Peer("slow", slow.last_endpoint.decode()), b"echo")
    ((_, header, (frame,)),) = drive(caller.call_many([call], 60.0))
    assert (header, bytes(frame)) == (b"echo", bytes(1000))
    caller.close()
    thread.join(JOIN_S)
    slow.close(linger=0)
    context.term()


def _park(peer: Peer, ready: Any) -> None:
    caller = make_caller("mortal", **SHORT)
    pending = PendingCall(caller.call_many(calls(peer, b"park"), 60.0))
    echo(caller, peer)
    ready.put(None)
    try:
        pending.finish()
    except QueueUnreachableError as error:
        ready.put(str(error))


@contextmanager
def parked_process(peer: Peer) -> Iterator[tuple[Any, Any]]:
    """(a process that waits for an answer, what it says)"""
    context = multiprocessing.get_context("fork")
    ready = context.SimpleQueue()
    process = context.Process(target=_park, args=(peer, ready))
    process.start()
    ready.get()
    yield process, ready
    process.kill()
    process.join(JOIN_S)
    process.close()
    ready.close()


def test_a_killed_client_is_gone_with_the_next_heartbeat_long_before_its_lease_has_ended(tmp_path):
    served = Desk()
    never = {"liveness": SHORT["liveness"]._replace(lease_s=1e6)}
    with served_by_thread(tmp_path, served, "tcp", **never) as (peer, server), parked_process(peer) as (process, _):
        assert server.clients() == {"mortal": 1}
        process.kill()
        until(lambda: served.gone == ["mortal"])
        assert server.clients() == {}


def test_a_client_that_was_stopped_for_longer_than_its_lease_is_told_that_it_is_gone(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served, "tcp", **SHORT) as (peer, _), parked_process(peer) as (process, said):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: served.gone == ["mortal"])
        os.kill(process.pid, signal.SIGCONT)
        assert "heard nothing of this client for too long" in said.get()


@DRIVES
def test_a_silent_server_is_given_up_when_its_lease_has_ended(tmp_path, drive):
    caller = make_caller("me", **SHORT)
    with served_by_process(tmp_path, "tcp", **SHORT) as (peer, process):
        drive(caller.call_many(calls(peer, b"echo"), 10.0))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(QueueUnreachableError, match=r"desk at tcp:\S+ has been silent for 0 s"):
            drive(caller.call_many(calls(peer, b"park"), 60.0))
        os.kill(process.pid, signal.SIGCONT)
        drive(caller.call_many(calls(peer, b"echo"), 10.0))
    caller.close()


def test_all_calls_of_a_caller_share_one_connection_and_one_thread(tmp_path, caller):
    with served_by_thread(tmp_path, Desk(), "tcp") as (peer, server):
        several = [PendingCall(caller.call_many(calls(peer, b"park"), 10.0)) for _ in range(5)]
        echo(caller, peer)
        asyncio.run(caller.call_many(calls(peer, b"echo"), 10.0))
        assert (server.clients(), held()[0].count("tq-tcp")) == ({"me": 1}, 1)
        echo(caller, peer, b"free")
        for pending in several:
            pending.finish()


def test_a_caller_that_is_dropped_says_goodbye(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served, "tcp") as (peer, _):
        echo(make_caller("dropped"), peer)
        until(lambda: served.gone == ["dropped"])


def test_a_process_that_ends_without_closing_says_goodbye_and_nothing_else(tmp_path):
    served = Desk()
    with served_by_thread(tmp_path, served, "tcp") as (peer, _):
        code = (
            "from transfer_queue.transport.base import PeerCall, Peer\n"
            "from transfer_queue.transport.caller import SocketCaller\n"
            "from transfer_queue.transport.blocking import run_blocking\n"
            f"caller = SocketCaller('unclosed', {KEYS.public!r})\n"
            f"call = PeerCall(Peer('desk', {peer.address!r}), b'echo', number=1)\n"
            "print(run_blocking(caller.call_many([call], 10.0)))\n"
        )
        ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
        assert (ended.stdout, ended.stderr) == ("[Message(number=1, header=b'echo', frames=[])]\n", "")
        until(lambda: served.gone == ["unclosed"])


def test_what_was_said_before_closing_arrives(tmp_path):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served, "tcp") as (peer, _):
        for number in range(200):
            run_blocking(caller.post(numbered(peer, b"%d" % number)))
        caller.close()
        until(lambda: served.gone == ["me"])
        assert served.said == [b"%d" % number for number in range(200)]


def _end_many_servers(num_servers: int) -> None:
    for _ in range(num_servers):
        caller = make_caller()
        server = SocketServer("tcp://127.0.0.1:0", keys=KEYS)
        thread = threading.Thread(target=server.serve, args=(Desk(),), daemon=True)
        thread.start()
        PendingCall(caller.call_many([numbered(Peer("desk", server.address), b"park")], 60.0))
        caller.close()
        server.stop()
        thread.join(JOIN_S)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_ends_although_a_client_leaves_in_its_handshake():
    process = multiprocessing.get_context("fork").Process(target=_end_many_servers, args=(5000,))  # 1 in 3000 hung
    process.start()
    process.join()
    assert process.exitcode == 0
