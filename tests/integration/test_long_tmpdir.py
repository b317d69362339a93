# SPDX-License-Identifier: Apache-2.0
"""Where the sockets lie: below a long TMPDIR, as Slurm gives, and in directories of other users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.faults import SLOW

USE = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(80)  # says where it hangs, if it does
import torch
import transfer_queue as tq
conf = tq.init({"server_processes": sys.argv[1], "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
client = tq.get_client()
meta = client.put({"x": torch.arange(3), "y": torch.ones(3, 100_000)}, partition_id="p")
data = client.get_data(meta)
assert data["x"].tolist() == [0, 1, 2] and float(data["y"].values().sum()) == 300_000
directory = os.path.dirname(conf.address.removeprefix("ipc://"))
assert os.stat(directory).st_mode & 0o777 == 0o700
tq.close()
assert not os.path.exists(directory), directory
"""
JOIN = """
import os, sys
import torch
import transfer_queue as tq
try:  # imports all that is needed, which the other user may not be allowed to read
    tq.init("ipc:///no/such/queue")
except tq.QueueUnreachableError:
    pass
os.setgid(65534)
os.setuid(65534)
try:
    tq.init(sys.argv[1])
except tq.QueueUnreachableError as error:
    print("unreachable:", error)
"""


def long_directory(parent: Path, nbytes: int) -> Path:
    """A directory whose path has so many bytes."""
    path = parent
    while (left := nbytes - len(os.fsencode(path))) > 1:
        path = path / ("d" * min(left - 1, 100))
    path.mkdir(parents=True)
    return path


def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *args]
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    timeout_s = 100.0 * SLOW
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**environment, **env}, timeout=timeout_s
    )


@pytest.mark.parametrize("processes", ["one", "each"])
@pytest.mark.parametrize("nbytes", [107, 150, 1000])
def test_a_queue_works_below_a_long_tmpdir(tmp_path, processes, nbytes):
    directory = long_directory(tmp_path, nbytes)
    done = run(USE, processes, TMPDIR=str(directory))
    assert done.returncode == 0, done.stderr
    assert not list(directory.iterdir()), "nothing is left behind"


def test_a_runtime_directory_that_is_gone_is_no_obstacle(tmp_path):
    directory = long_directory(tmp_path, 150)
    done = run(USE, "one", TMPDIR=str(directory), XDG_RUNTIME_DIR=str(tmp_path / "gone"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_joining_another_users_queue_says_so(queue):
    done = run(JOIN, str(queue.address))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("unreachable:"), done.stdout + done.stderr
    assert "another user" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_socket_that_another_user_can_see_is_still_none_of_theirs(queue):
    directory = Path(str(queue.address).removeprefix("ipc://")).parent
    directories = [directory, *(parent for parent in directory.parents if parent not in (Path("/"), Path("/tmp")))]
    modes = {each: each.stat().st_mode & 0o777 for each in directories}
    for each in directories:
        each.chmod(0o755)
    try:
        done = run(JOIN, str(queue.address))
    finally:
        for each, mode in modes.items():
            each.chmod(mode)
    assert done.returncode == 0, done.stderr
    assert "another user" in done.stdout
