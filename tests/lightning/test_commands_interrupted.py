# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command imports what carries it out ends it, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.conftest import ROOT

NOWHERE = "ipc:///nowhere/controller"


def test_ctrl_c_that_an_import_swallows_ends_a_fit(tmp_path: Path) -> None:
    swallows = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "torch.py").write_text(swallows)
    command = [sys.executable, "-m", "lightning_tq", "fit", "--config", "configs/debug.yaml"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize(
    ("module", "words"),
    [("numpy", ["doctor", NOWHERE]), ("omegaconf", ["status", NOWHERE]),
     ("torch", ["record", NOWHERE, "a", "--task", "t"]), ("torch", ["simulate", "--step-s", "1", "-c", "a"])],
)  # fmt: skip
def test_ctrl_c_while_modules_are_imported_ends_a_command_without_a_traceback(
    tmp_path: Path, module: str, words: list[str]
) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "lightning_tq", *words]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
