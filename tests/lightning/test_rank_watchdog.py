# SPDX-License-Identifier: Apache-2.0
"""When the process of a rank ends, the other ranks end too, whatever launched them and whatever they wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from producing import rows

from lightning_tq import TQDataModule
from lightning_tq.run_members import RunMembers
from tests.lightning.conftest import HERE, ROOT, stream
from tests.own_processes import own_processes
from tests.warm_python import Program
from transfer_queue import QueueUnreachableError

DEADLINE_S = 20.0
"""Seconds from the death of a rank to the end of the others."""


def test_a_rank_learns_that_the_queue_of_its_run_has_ended(data: Callable[..., TQDataModule]) -> None:
    client = data(train=stream()).client
    client.watch_run("run", "rank 1", opens=True)
    members = RunMembers()
    members.watch(client, "run", rank=1)
    servers = own_processes()
    for server in servers:
        server.kill()
    psutil.wait_procs(servers, timeout=20)
    pause = threading.Event()
    while members.check() is None:
        pause.wait(0.05)
    assert isinstance(members.check(), QueueUnreachableError)
    members.leave(failed=True)


def launched(rank: int, port: int, out: IO[str], *args: str | Path) -> Program:
    """A rank, started by a launcher that doesn't watch it."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0",
           "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}  # fmt: skip
    return Program((HERE / "waiting_rank_script.py", *args), ROOT, {**os.environ, **env}, out, out)


@pytest.mark.programs
@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_waits_for_data_ends_with_an_error_when_another_is_killed(
    data: Callable[..., TQDataModule], tmp_path: Path, victim: int
) -> None:
    datamodule = data(train=stream())
    datamodule.client.put(rows(16), partition_id="train")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [tmp_path / f"output{rank}" for rank in range(2)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            ranks.append(launched(rank, port, file, datamodule.address, tmp_path))
    try:
        pause = threading.Event()
        while not all((tmp_path / f"waits{rank}").exists() for rank in range(2)):
            assert all(psutil.pid_exists(rank.pid) for rank in ranks), [output.read_text() for output in outputs]
            pause.wait(0.05)
        ranks[victim].send_signal(signal.SIGKILL)
        ranks[1 - victim].wait(DEADLINE_S)
    finally:
        for rank in ranks:
            rank.end()
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL if at == victim else 1 for at in range(2)]
    said = outputs[1 - victim].read_text()
    assert f"RankGoneError: rank {victim} (pid {ranks[victim].pid} of host {socket.gethostname()!r}) failed" in said


@pytest.mark.parametrize("error", ["RankGoneError", "QueueUnreachableError"])
def test_a_process_with_a_stuck_main_thread_is_ended(error: str) -> None:
    code = (
        "import threading\n"
        "from lightning_tq.rank_watchdog import RankGoneError, RankWatchdog\n"
        "from transfer_queue import QueueUnreachableError\n"
        f"RankWatchdog.stuck_after_s = 0.1; RankWatchdog([lambda: {error}('rank 1 has ended.')]).start()\n"
        "threading.Event().wait()  # like a collective with that rank\n"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: rank 1 has ended. The main thread did not react within 0.1 s, so this process ends now.\n"
    )
