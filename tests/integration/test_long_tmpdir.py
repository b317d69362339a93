# SPDX-License-Identifier: Apache-2.0
"""Where the sockets lie: below a long TMPDIR, as Slurm gives, and in directories of other users."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from tests.integration.noticing import WAIT_S, ended
from transfer_queue.errors import QueueUnreachableError


def long_directory(parent: Path, nbytes: int) -> Path:
    """A directory whose path has so many bytes."""
    path = parent
    while (left := nbytes - len(os.fsencode(path))) > 1:
        path = path / ("d" * min(left - 1, 100))
    path.mkdir(parents=True)
    return path


def use_a_queue_of_its_own(processes: str, **env: str) -> None:
    """In a fork, as if it were started with these environment variables. Its address can be cut at blanks."""
    tq.close()
    os.environ.pop("TQ_ADDRESS", None)
    os.environ.update(env)
    tempfile.tempdir = None
    conf = tq.init({"server_processes": processes, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    client = tq.get_client()
    # torch's own arange and ones may hang in a fork: OpenMP's threads
    columns = {"x": torch.from_numpy(np.arange(3)), "y": torch.from_numpy(np.ones((3, 100_000)))}
    data = client.get_data(client.put(columns, partition_id="p"))
    assert data["x"].tolist() == [0, 1, 2]
    assert float(data["y"].values().numpy().sum()) == 300_000
    directory = os.path.dirname(conf.address.removeprefix("ipc://"))
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert len(directory.split()) == 1, directory
    tq.close()
    assert not os.path.exists(directory), directory


@pytest.mark.parametrize("processes", ["one", "each"])
@pytest.mark.parametrize("nbytes", [107, 150, 1000])
def test_a_queue_works_below_a_long_tmpdir(tmp_path, fork, processes, nbytes):
    directory = long_directory(tmp_path, nbytes)
    assert ended(fork(use_a_queue_of_its_own, processes, TMPDIR=str(directory))) == 0
    assert not list(directory.iterdir()), "nothing is left behind"


def test_a_tmpdir_with_blanks_is_not_part_of_an_address(tmp_path, fork):
    blank = tmp_path / "with blanks"
    blank.mkdir()
    assert ended(fork(use_a_queue_of_its_own, "one", TMPDIR=str(blank))) == 0


def test_a_runtime_directory_that_is_gone_is_no_obstacle(tmp_path, fork):
    env = {"TMPDIR": str(long_directory(tmp_path, 150)), "XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert ended(fork(use_a_queue_of_its_own, "one", **env)) == 0


def join_as_another_user(address: str, pipe: Any) -> None:
    tq.close()
    with contextlib.suppress(QueueUnreachableError):  # imports what the other user may not be allowed to read
        tq.init("ipc:///no/such/queue")
    os.setgid(65534)
    os.setuid(65534)
    try:
        tq.init(address)
    except QueueUnreachableError as error:
        pipe.send(str(error))


def told_to_another_user(address: str, fork: Any) -> str:
    """The error when another user joins."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    joining = fork(join_as_another_user, address, there)
    there.close()
    assert here.poll(WAIT_S)
    told = str(here.recv())
    assert ended(joining) == 0
    return told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_joining_another_users_queue_says_so(queue, fork):
    assert "another user" in told_to_another_user(str(queue.address), fork)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_socket_that_another_user_can_see_is_still_none_of_theirs(queue, fork):
    directory = Path(str(queue.address).removeprefix("ipc://")).parent
    directories = [directory, *(parent for parent in directory.parents if parent not in (Path("/"), Path("/tmp")))]
    modes = {each: each.stat().st_mode & 0o777 for each in directories}
    for each in directories:
        each.chmod(0o755)
    try:
        assert "another user" in told_to_another_user(str(queue.address), fork)
    finally:
        for each, mode in modes.items():
            each.chmod(mode)
