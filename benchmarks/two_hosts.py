# SPDX-License-Identifier: Apache-2.0
"""Values between two hosts against a raw TCP stream of the same bytes, in network namespaces of this machine.

An RL batch (1 024 samples, 5 fields, 56 MiB) is put from one host into the memory of the other, and got back from
there. Needs the privilege to make network namespaces, and iproute2.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report
from benchmarks.hosts import Host, missing_privilege, said, two_hosts

_RAW_CHUNK = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--role", default="all", help="what this process does: for the benchmark's own use")
    parser.add_argument("--nbytes", type=int, default=0, help="of the raw stream: likewise")
    options = parser.parse_args(argv)
    if options.role == "raw":
        receive_raw(options.nbytes)
    elif options.role == "client":
        print(json.dumps(measure(options.quick)), flush=True)
    elif (reason := missing_privilege()) is not None:
        sys.exit(f"this benchmark can't run here: {reason}")
    else:
        curve, plain = between_hosts(options.quick, []), between_hosts(options.quick, ["--no-encryption"])
        report("put and get between hosts against a raw stream", curve=curve, no_encryption=plain)


def between_hosts(quick: bool, options: list[str]) -> dict[str, Any]:
    """Start a server on host a, and measure on host b."""
    with tempfile.TemporaryDirectory() as directory, two_hosts(Path(directory)) as (a, b):
        server = a.serve(None, "2GiB", *options)
        raw = raw_receiver(a, nbytes_of(quick))
        more = ["--quick"] if quick else []
        os.environ["TQ_RAW"] = f"{a.address}:{said(raw)}"
        measured: dict[str, Any] = json.loads(
            said(b.join(server.remote, "-m", "benchmarks.two_hosts", "--role", "client", *more))
        )
        return measured


def raw_receiver(host: Host, nbytes: int) -> Any:
    return host.start(sys.executable, "-m", "benchmarks.two_hosts", "--role", "raw", "--nbytes", str(nbytes))


def nbytes_of(quick: bool) -> int:
    from benchmarks import cases

    return cases.nbytes(cases.rl_batch(64 if quick else 1024))


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


def measure(quick: bool) -> dict[str, Any]:
    """Milliseconds of a put, a get and a raw stream each way, by turns."""
    import transfer_queue as tq
    from benchmarks import cases

    tq.init()
    client = tq.get_client()
    batch = cases.rl_batch(64 if quick else 1024)
    nbytes = cases.nbytes(batch)
    host, _, port = os.environ["TQ_RAW"].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    data = bytearray(nbytes)
    times: dict[str, list[float]] = {"put": [], "get": [], "raw there": [], "raw back": []}
    for number in range(3 if quick else 9):
        started = time.perf_counter()
        connection.sendall(data)
        take(connection, bytearray(1))
        times["raw there"].append(time.perf_counter() - started)
        started = time.perf_counter()
        connection.sendall(b"x")
        take(connection, data)
        times["raw back"].append(time.perf_counter() - started)
        started = time.perf_counter()
        meta = client.put(batch, partition_id=f"p{number}")
        times["put"].append(time.perf_counter() - started)
        started = time.perf_counter()
        cases.touch(client.get_data(meta))
        times["get"].append(time.perf_counter() - started)
        client.clear_partition(f"p{number}")
    tq.close()
    medians = {name: statistics.median(own[1:]) * 1e3 for name, own in times.items()}
    return {
        "MiB": round(nbytes / 2**20, 1),
        **{f"{name}_ms": round(value, 1) for name, value in medians.items()},
        "put / raw": round(medians["put"] / medians["raw there"], 2),
        "get / raw": round(medians["get"] / medians["raw back"], 2),
    }


if __name__ == "__main__":
    main()
