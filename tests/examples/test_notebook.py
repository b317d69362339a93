# SPDX-License-Identifier: Apache-2.0
"""The notebook runs from top to bottom, and is stored without outputs. Every example is in the list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_processes import SLOW, own_processes

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"
EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": "."}}).execute()
"""


@pytest.mark.programs
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs pip install -e '.[dev]'")
    pytest.importorskip("ipykernel", reason="needs pip install -e '.[dev]'")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "IPYTHONDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=110 * SLOW,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_list_of_examples_is_complete() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = [
        path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb") or (path / "__init__.py").exists()
    ]
    assert len(names) > 8
    assert [name for name in names if name not in listed] == []
