# SPDX-License-Identifier: Apache-2.0
"""A runtime_env that installs TransferQueue for the queue's actors is refused, by the name of what it installs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from tests.on_ray.conftest import WAIT_S
from transfer_queue.controller import TransferQueueController
from transfer_queue.errors import ConfigError

ray = pytest.importorskip("ray")
PIN = "TransferQueue @ git+https://github.com/Ascend/TransferQueue.git@c516143"


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A cluster of one node, by its address."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    gc.collect()  # while warnings of Ray's own processes are ignored


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As programs do that patch the actor classes: ``options`` gets this ``pip`` in a runtime_env."""

    def pin(pip: Any) -> None:
        given = TransferQueueController.options
        patched = lambda **options: given(**options, runtime_env={"pip": pip})  # noqa: E731
        monkeypatch.setattr(TransferQueueController, "options", patched)

    return pin


def test_the_pin_of_an_actor_is_named(node: str, pinned: Any) -> None:
    pinned([PIN])
    with pytest.raises(ConfigError, match=r"Ray's runtime_env installs 'TransferQueue @ git.*Remove it from"):
        tq.init()


def test_a_pin_in_a_file_of_requirements_is_named(node: str, pinned: Any, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("six\ntransferqueue~=0.1.9\n")
    pinned(str(tmp_path / "requirements.txt"))
    with pytest.raises(ConfigError, match=r"Ray's runtime_env installs 'transferqueue~=0.1.9' where"):
        tq.init()


def test_the_pin_of_a_job_is_named(node: str) -> None:
    runtime_env = {"pip": ["TransferQueue==0.1.11"], "config": {"eager_install": False}}
    program = (
        "import ray, transfer_queue as tq\n"
        f"ray.init({node!r}, runtime_env={runtime_env})\n"
        "tq.init()\n"
    )  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=WAIT_S
    )  # fmt: skip
    assert said.returncode == 1
    assert "ConfigError: Ray's runtime_env installs 'TransferQueue==0.1.11' where the queue's actors run" in said.stderr
