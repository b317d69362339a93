# SPDX-License-Identifier: Apache-2.0
"""Real queues for the tests, surely closed, and a check that no thread, process, file or address stays behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from tests.own_processes import SLOW, own_processes

JOIN_S = 20.0 * SLOW


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory() -> Iterator[Path]:
    """Queues of others on this machine must not look like leaks of ours."""
    get_temp_dir()  # multiprocessing keeps what it makes first until the process ends
    before, made = tempfile.tempdir, tempfile.mkdtemp(prefix="it-")
    outside = os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = made
    yield Path(made)
    tempfile.tempdir = before
    os.environ.pop("TMPDIR")
    if outside is not None:
        os.environ["TMPDIR"] = outside
    shutil.rmtree(made)


def left_over(directory: Path) -> dict[str, set[Any]]:
    return {
        "threads": {name for each in threading.enumerate() if not (name := each.name).startswith("pytest_timeout")},
        "processes": {child.pid for child in own_processes()},
        "directories": {path.name for path in directory.glob("tq-*")},
        "addresses": {os.environ[name] for name in ("TQ_ADDRESS",) if name in os.environ},
    }


def check_same(before: Mapping[str, set[Any]], after: Mapping[str, set[Any]]) -> None:
    assert {kind: after[kind] - before[kind] for kind in after} == {kind: set() for kind in after}


@pytest.fixture(scope="module", autouse=True)
def no_leaks_of_the_module(own_temporary_directory: Path) -> Iterator[None]:
    before = left_over(own_temporary_directory)
    yield
    check_same(before, left_over(own_temporary_directory))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, own_temporary_directory: Path) -> Iterator[None]:
    before = left_over(own_temporary_directory)
    yield
    after = left_over(own_temporary_directory)
    if "queue" in request.fixturenames:  # pyzmq's thread that keeps sent buffers lives until the queue's last user
        del before["threads"], after["threads"]
    check_same(before, after)


@pytest.fixture(scope="module")
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module's queue, configured by its ``CONF``; the fixture's value is that configuration."""
    yield tq.init(getattr(request.module, "CONF", None))
    tq.close()


@pytest.fixture
def client(queue: Any) -> tq.TransferQueueClient:
    return tq.get_client()


@pytest.fixture
def emptied(client: tq.TransferQueueClient) -> None:
    """Begin with an empty queue, whatever the test before left."""
    for partition in client.get_partition_list():
        client.clear_partition(partition)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A partition of the test's own."""
    return str(request.node.name)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """``start(conf)``: a queue of the test's own; not for modules that share one."""
    assert "TQ_ADDRESS" not in os.environ
    yield tq.init
    tq.close()


@pytest.fixture
def fork() -> Iterator[Callable[..., Any]]:
    """``fork(target, *args, **kwargs)``: a forked process, ended with the test."""
    context = multiprocessing.get_context("fork")
    started = []

    def run(target: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        process = context.Process(target=target, args=args, kwargs=kwargs)
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(JOIN_S)
        process.close()


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``script(code, *args)``: a Python process of its own, warnings as errors, ended with the test."""
    started = []

    def run(code: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            # torch 2.6 leaves a temporary directory of its own to the end of the process
            [sys.executable, "-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning", "-c", code, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
