# SPDX-License-Identifier: Apache-2.0
"""Hosts of the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def two_programs(hosts: tuple[Host, Host], program: Callable[[Host, str], Program]) -> tuple[Program, Program, Server]:
    """A server and a program on each host: (program on a, program on b, server on b, which has joined a's)."""
    a, b = hosts
    first = a.serve()
    second = b.serve(first.remote)
    return program(a, first.local), program(b, second.local), second
