# SPDX-License-Identifier: Apache-2.0
"""Hosts of the tests."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.hosts import Host, Server, missing_privilege, said, two_hosts

PROGRAM = Path(__file__).with_name("program.py")


class Program:
    """A program that joined the queue. ``do`` gives it an expression of Python, and returns what that printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert said(process) == "joined"

    def begin(self, expression: str) -> None:
        """Have it evaluated; ``result`` waits for it."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(expression.replace("\n", " ") + "\n")
        stdin.flush()

    def result(self) -> Any:
        """The value of the expression, or the name of the exception's class."""
        return eval(said(self.process))  # our own program's repr

    def do(self, expression: str) -> Any:
        self.begin(expression)
        return self.result()


@pytest.fixture
def program() -> Callable[[Host, str], Program]:
    """Start a program of this host that joins the queue at this address."""
    return lambda host, address: Program(host.join(address, str(PROGRAM)))


@pytest.fixture(scope="session")
def privilege() -> None:
    """Skips where no network namespace can be made."""
    reason = missing_privilege()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(privilege: None, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


class Node:
    """A host with processes, files and a temporary directory of its own, as far as its ranks see."""

    def __init__(self, host: Host, other: Host, environment: dict[str, str]) -> None:
        self.host = host
        self._hide = f'mount -t tmpfs none {other.directory}; "$@" 2>&1; exit $?'
        self._environment = {**environment, "TMPDIR": str(host.directory)}

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program; what it prints to stderr comes with its output."""
        namespaces = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return self.host.start(
            *namespaces, "sh", "-c", self._hide, "sh", *command, **{**self._environment, **environment}
        )


@pytest.fixture
def nodes(privilege: None) -> Iterator[tuple[Node, Node]]:
    """Two nodes of a launcher that is told ranks and addresses by the environment."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short, two_hosts(Path(short)) as (a, b):
        common = {"MASTER_ADDR": a.address, "MASTER_PORT": "29511", "TQ_KEY_FILE": f"{short}/keys"}
        yield tuple(
            Node(host, other, {**common, "NODE_RANK": str(rank), "GLOO_SOCKET_IFNAME": f"link-{host.name[-1]}"})
            for rank, (host, other) in enumerate(((a, b), (b, a)))
        )


class Lasting(NamedTuple):
    """Two hosts with a server and a program each, which the tests of a module share."""

    hosts: tuple[Host, Host]
    servers: tuple[Server, Server]
    programs: tuple[Program, Program]


@pytest.fixture(scope="module")
def started(privilege: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with two_hosts(tmp_path_factory.mktemp("h")) as (a, b):
        first = a.serve()
        second = b.serve(first.remote)
        near, far = (Program(host.join(server.local, str(PROGRAM))) for host, server in ((a, first), (b, second)))
        yield Lasting((a, b), (first, second), (near, far))


@pytest.fixture
def lasting(started: Lasting) -> Iterator[Lasting]:
    """No partition is there, and none is left. No test ends a host or a server."""
    yield started
    near = started.programs[0]
    for partition in near.do("client.get_partition_list()"):
        assert near.do(f"client.clear_partition({partition!r})") is None
    deadline = time.monotonic() + 60.0  # values on the other host are deleted a little later
    while any(samples for samples, _ in near.do("units()").values()):
        assert time.monotonic() < deadline, "cleared values are still there"


@pytest.fixture
def two_programs(hosts: tuple[Host, Host], program: Callable[[Host, str], Program]) -> tuple[Program, Program, Server]:
    """A server and a program on each host: (program on a, program on b, server on b, which has joined a's)."""
    a, b = hosts
    first = a.serve()
    second = b.serve(first.remote)
    return program(a, first.local), program(b, second.local), second
