# SPDX-License-Identifier: Apache-2.0
"""Where nobody uses Ray, nothing of it is loaded, and its names can be imported all the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import transfer_queue as tq
from transfer_queue.controller import TransferQueueController
from transfer_queue.errors import ConfigError
from transfer_queue.storage import SimpleStorageUnit

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.programs
def test_a_process_without_ray_has_a_local_queue_and_never_imports_it() -> None:
    code = (
        "import sys, transfer_queue as tq, transfer_queue.controller; print(tq.init().launch, 'ray' in sys.modules); "
    )
    code += "tq.close(); tq.get_client()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["auto", "False"]
    assert "NotInitializedError" in done.stderr


def test_an_actor_class_is_not_called() -> None:
    with pytest.raises(TypeError, match=r"ControllerActor is a Ray actor: start it with remote\(\)"):
        TransferQueueController()


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
@pytest.mark.parametrize("use", [TransferQueueController.remote, SimpleStorageUnit.options, lambda: tq.init(RAY)])
def test_without_ray_it_says_what_to_install(use) -> None:
    with pytest.raises(ConfigError, match=r"install lightning-tq with its extra 'ray' \(docs/start.md\)"):
        use()


RAY = {"launch": "ray"}
