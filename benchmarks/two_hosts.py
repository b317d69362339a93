# SPDX-License-Identifier: Apache-2.0
"""Values between two hosts against a raw TCP stream of the same bytes, in network namespaces of this machine.

An RL batch (1 024 samples, 5 fields, 56 MiB) is put from one host into the memory of the other, and got back from
there. A stream of these bytes through one ZMQ socket, with the same encryption and nothing of ours, shows how much
of the time is ZMQ's. ``cpu`` figures are milliseconds of the client's process alone.

Needs the privilege to make network namespaces, and iproute2. ``--peer`` measures the released TransferQueue in the same
way: a Ray cluster of both hosts, with its storage units on the first (see benchmarks.versus.environment).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transfer_queue as tq
from benchmarks import cases
from benchmarks.common import arguments, report
from benchmarks.hosts import ROOT, Host, missing_privilege, said, two_hosts
from benchmarks.versus import environment

_RAW_CHUNK = 1 << 20
_ZMQ_PART = 1 << 18
"""As long as a part of a large message of ours."""
_RAY_PORT = 6399
_VALUES_HERE = "values_here"  # Ray's resource of the host that holds the peer's values


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peer", action="store_true", help="measure TransferQueue, too; the first run installs it")
    parser.add_argument("--role", default="all", help="what this process does: for the benchmark's own use")
    parser.add_argument("--nbytes", type=int, default=0, help="of the raw stream: likewise")
    options = parser.parse_args(argv)
    if options.role == "raw":
        receive_raw(options.nbytes)
    elif options.role == "zmq":
        receive_by_zmq(options.nbytes)
    elif options.role == "client":
        tq.init()
        print(json.dumps(measure(options.quick)), flush=True)
        tq.close()
    elif options.role == "peer":
        print(json.dumps(measured_on_ray(options.quick)), flush=True)
    elif (reason := missing_privilege()) is not None:
        sys.exit(f"this benchmark can't run here: {reason}")
    else:
        curve, plain = between_hosts(options.quick, []), between_hosts(options.quick, ["--no-encryption"])
        peer = {"peer": peer_between_hosts(options.quick)} if options.peer else {}
        report("put and get between hosts against a raw stream", curve=curve, no_encryption=plain, **peer)


def between_hosts(quick: bool, options: list[str]) -> dict[str, Any]:
    """Start a server on host a, and measure on host b."""
    with tempfile.TemporaryDirectory() as directory, two_hosts(Path(directory)) as (a, b):
        server = a.serve(None, "2GiB", *options)
        start_raw_receiver(a, quick)
        zmq = a.join(server.remote, "-m", "benchmarks.two_hosts", "--role", "zmq", "--nbytes", str(_nbytes(quick)))
        os.environ["TQ_ZMQ"] = f"tcp://{a.address}:{said(zmq)}"
        client = b.join(server.remote, "-m", "benchmarks.two_hosts", "--role", "client", *_quick(quick))
        measured: dict[str, Any] = json.loads(said(client))
        return measured


def peer_between_hosts(quick: bool) -> dict[str, Any]:
    """The same with the peer's package, whose storage units are told to be on host a."""
    python = environment.interpreter(environment.default_folder())
    # This repository comes last on the path: "transfer_queue" must be the installed one.
    boot = f"import sys; sys.path.append({str(ROOT)!r}); from benchmarks.two_hosts import main; main(sys.argv[1:])"
    with tempfile.TemporaryDirectory() as directory, two_hosts(Path(directory)) as (a, b):
        start_raw_receiver(a, quick)
        with ray_cluster(python, a, b) as known:
            client = b.start(python, "-c", boot, "--role", "peer", *_quick(quick), **known)
            while not (line := said(client)).startswith("{"):
                pass  # what Ray says meanwhile
            measured: dict[str, Any] = json.loads(line)
            return measured


@contextmanager
def ray_cluster(python: str, *hosts: Host) -> Iterator[dict[str, str]]:
    """A Ray node per host, of which the first has all processors. Yields the environment of programs that use it."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:  # Ray makes sockets below it
        head = f"{hosts[0].address}:{_RAY_PORT}"
        known = {"PYTHONPATH": "", "RAY_TMPDIR": short, "RAY_ADDRESS": head}
        known |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for host in hosts:
            first = host is hosts[0]
            where = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false"] if first else [f"--address={head}"]
            resources = ["--num-cpus=4", f'--resources={{"{_VALUES_HERE}": 100}}'] if first else ["--num-cpus=0"]
            command = [python, "-m", "ray.scripts.scripts", "start", "--block", *where, *resources]
            node = host.start(*command, f"--node-ip-address={host.address}", **known)
            while "Ray runtime started" not in said(node):
                pass
        yield known


def measured_on_ray(quick: bool) -> dict[str, Any]:
    import ray

    ray.init(log_to_driver=False)
    tq.init({"backend": {"SimpleStorage": {"required_node_resource": _VALUES_HERE}}})
    try:
        return measure(quick)
    finally:
        tq.close()
        ray.shutdown()


def start_raw_receiver(host: Host, quick: bool) -> None:
    """Start a program that streams plain bytes; clients find its address in their environment."""
    command = ["-m", "benchmarks.two_hosts", "--role", "raw", "--nbytes", str(_nbytes(quick))]
    raw = host.start(sys.executable, *command)
    os.environ["TQ_RAW"] = f"{host.address}:{said(raw)}"


def _quick(quick: bool) -> list[str]:
    return ["--quick"] if quick else []


def _rows(quick: bool) -> int:
    return 64 if quick else 1024


def _nbytes(quick: bool) -> int:
    return cases.nbytes(cases.rl_batch(_rows(quick)))


def receive_raw(nbytes: int) -> None:
    """Take so many bytes, and send as many back, for as long as anybody asks."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        data = bytearray(nbytes)
        while take(connection, data):
            connection.sendall(b"x")
            if not take(connection, bytearray(1)):
                return
            connection.sendall(data)


def take(connection: socket.socket, into: bytearray) -> bool:
    view = memoryview(into)
    while view:
        count = connection.recv_into(view, min(len(view), _RAW_CHUNK))
        if not count:
            return False
        view = view[count:]
    return True


def receive_by_zmq(nbytes: int) -> None:
    """``receive_raw`` through one ZMQ socket, encrypted where there are keys."""
    from transfer_queue.transport.tcp_wire import read_keys  # the peer has no such module

    pair = zmq_pair()
    if (path := os.environ.get("TQ_KEY_FILE")) is not None:
        keys = read_keys(path)
        pair.curve_server = True
        pair.curve_publickey, pair.curve_secretkey = keys.public.encode(), keys.secret.encode()
    print(pair.bind_to_random_port("tcp://0.0.0.0"), flush=True)
    data = bytearray(nbytes)
    while True:
        take_by_zmq(pair, nbytes)
        pair.send(b"x")
        pair.recv()
        send_by_zmq(pair, data)


def zmq_pair() -> Any:
    import zmq

    pair: Any = zmq.Context.instance().socket(zmq.PAIR)
    pair.set_hwm(0)
    return pair


def joined_pair() -> Any:
    import zmq

    from transfer_queue.transport.tcp_wire import read_public_key

    pair = zmq_pair()
    if (path := os.environ.get("TQ_KEY_FILE")) is not None:
        pair.curve_publickey, pair.curve_secretkey = zmq.curve_keypair()
        pair.curve_serverkey = read_public_key(path).encode()
    pair.connect(os.environ["TQ_ZMQ"])
    return pair


def send_by_zmq(pair: Any, data: bytearray) -> None:
    view = memoryview(data)
    for begin in range(0, len(view), _ZMQ_PART):
        pair.send(view[begin : begin + _ZMQ_PART], copy=False)


def take_by_zmq(pair: Any, nbytes: int) -> None:
    while nbytes > 0:
        nbytes -= len(pair.recv(copy=False).buffer)


def measure(quick: bool) -> dict[str, Any]:
    """Milliseconds of a put, a get, and streams each way by a plain socket and by ZMQ, by turns."""
    client = tq.get_client()
    batch = cases.rl_batch(_rows(quick))
    nbytes = cases.nbytes(batch)
    host, _, port = os.environ["TQ_RAW"].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    data = bytearray(nbytes)
    pair = joined_pair() if "TQ_ZMQ" in os.environ else None
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        started, before = time.perf_counter(), time.process_time()
        found = act()
        times.setdefault(name, []).append(time.perf_counter() - started)
        cpu.setdefault(name, []).append(time.process_time() - before)
        return found

    for number in range(3 if quick else 9):
        timed("raw there", lambda: (connection.sendall(data), take(connection, bytearray(1))))
        timed("raw back", lambda: (connection.sendall(b"x"), take(connection, data)))
        if pair is not None:
            timed("zmq there", lambda: (send_by_zmq(pair, data), pair.recv()))
            timed("zmq back", lambda: (pair.send(b"x"), take_by_zmq(pair, nbytes)))
        meta = timed("put", lambda number=number: client.put(batch, partition_id=f"p{number}"))
        timed("get", lambda meta=meta: cases.touch(client.get_data(meta)))
        client.clear_partition(f"p{number}")
    medians, of_cpu = ({name: statistics.median(own[1:]) * 1e3 for name, own in all_.items()} for all_ in (times, cpu))
    return {
        "MiB": round(nbytes / 2**20, 1),
        **{f"{name}_ms": round(value, 1) for name, value in medians.items()},
        **{f"{name}_cpu_ms": round(value, 1) for name, value in of_cpu.items()},
        **{
            f"{name} / raw": round(medians[name] / medians[f"raw {way}"], 2)
            for name, way in (("put", "there"), ("get", "back"), ("zmq there", "there"), ("zmq back", "back"))
            if name in medians
        },
    }


if __name__ == "__main__":
    main()
