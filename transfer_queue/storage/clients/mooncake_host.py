# SPDX-License-Identifier: Apache-2.0
"""A server of its own, which a queue starts for Mooncake: runs the master, contributes the memory, ends with the queue.

It is run as a script, with one line of JSON as its orders. It answers with a line, and ends when its input does, or its
parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

_START_TIMEOUT_S = 20.0
_LOOK_S = 0.02


def serve(orders: Mapping[str, Any]) -> None:
    """Start everything, say so, and wait for the end."""
    address = f"127.0.0.1:{_free_port()}"
    with _master(address, orders["options"]):
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        store = MooncakeDistributedStore()
        code = store.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            orders["segment"],
            orders["buffer"],
            orders["protocol"],
            orders["device"],
            address,
        )
        if code:
            raise RuntimeError(f"its store could not be set up with {orders['segment']} bytes (code {code})")
        print(json.dumps({"master": address}), flush=True)
        select.select([sys.stdin, os.pidfd_open(orders["parent"])], [], [])
        store.close()


@contextlib.contextmanager
def _master(address: str, options: list[str]) -> Iterator[None]:
    program = shutil.which("mooncake_master", path=os.path.dirname(sys.executable)) or shutil.which("mooncake_master")
    if program is None:
        raise RuntimeError("the program mooncake_master is neither in this Python's directory nor in PATH")
    host, port = address.split(":")
    ports = [f"-rpc_port={port}", f"-metrics_port={_free_port()}", f"-metrics_host={host}"]
    command = [program, *ports, "-enable_metric_reporting=false", "-minloglevel=3", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2) as master:
        try:
            _await(master, host, int(port))
            yield
        finally:
            master.terminate()


def _await(master: subprocess.Popen[bytes], host: str, port: int) -> None:
    deadline, clock = time.monotonic() + _START_TIMEOUT_S, threading.Event()
    while master.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        clock.wait(_LOOK_S)
    raise RuntimeError(f"mooncake_master did not open port {port} (exit code {master.poll()})")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    try:
        serve(json.loads(sys.stdin.readline()))
    except Exception as error:  # the guard of the start: the process that waits gets the error
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
