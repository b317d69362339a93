# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two hosts, which are network namespaces: values stay where they are put, and are read elsewhere."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import Host, missing_privilege, said, two_hosts
from tests.own_processes import SLOW

pytest.importorskip("ray")
DRIVER = Path(__file__).with_name("hosts_driver.py")
PORT = 6399
SAME_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Of the nodes and the driver, made for this test."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    reason = missing_privilege()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short, two_hosts(tmp_path) as both:
        monkeypatch.setenv("RAY_TMPDIR", short)  # other programs of this machine must not find this cluster
        yield both


@contextlib.contextmanager
def node(host: Host, address: str | None) -> Iterator[None]:
    """A Ray node of this host, with a resource of its name."""
    where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if address is None else [f"--address={address}"]
    resources = json.dumps({host.name[-1]: 10})
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *where]
    process = host.start(*command, f"--node-ip-address={host.address}", f"--resources={resources}", **SAME_TOKEN)
    line = ""
    while "Ray runtime started" not in line:
        line = said(process) if process.poll() is None else pytest.fail("Ray did not start")
    yield


def test_values_stay_on_their_host_and_cross_to_readers_of_another(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    address = f"{a.address}:{PORT}"
    with node(a, None), node(b, address):
        driver = a.start(sys.executable, str(DRIVER), address, **SAME_TOKEN)
        found: dict[str, Any] = {}
        while not found:
            line = said(driver)
            found = json.loads(line) if line.startswith("{") else {}
        assert driver.wait(60.0 * SLOW) == 0
    own, far = found["known"]
    assert (own["address"], far["address"]) == ("ipc", "tcp")
    assert far["key_file"] is not None
    assert found["mode"] == "0o600"
    assert found["units"][0] == {"unit0": [4, "arena"], "TransferQueueStorageUnit#1": [4, "frames"]}
    assert found["units"][1] == {"unit0": [4, "frames"], "TransferQueueStorageUnit#1": [4, "arena"]}
    assert found["streamed"] == list(range(8))
    assert found["left"] == [False]
