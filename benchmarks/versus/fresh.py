# SPDX-License-Identifier: Apache-2.0
"""One measurement in a fresh interpreter, of this environment or of the one with Ray and the peer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.startup import environment_of
from benchmarks.versus.package import each, naming

ROOT = Path(__file__).resolve().parents[2]
FIGURES = "FIGURES "
BOOT = """
import json, sys
sys.path.{how}
from {worker} import main
print({figures!r} + json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
"""


def figures_of(
    worker: str, order: Mapping[str, Any], python: str | None, deadline_s: float, settings: Mapping[str, str]
) -> tuple[dict[str, Any] | None, subprocess.CompletedProcess[str]]:
    """What the worker returned, or None, and how its process ended. Everything that it started is killed then.

    Args:
        worker: A module, whose ``main`` gets ``order`` and a ``folder``.
        python: Interpreter of the environment with Ray and the peer; None: this one.
        settings: More environment variables.
    Raises:
        subprocess.TimeoutExpired: it was not done in time.
    """
    how = f"insert(0, {str(ROOT)!r})" if python is None else f"append({str(ROOT)!r})"
    with tempfile.TemporaryDirectory(prefix="vs-") as folder:  # short: Ray makes sockets below it
        text = json.dumps({**order, "folder": folder})
        try:
            done = subprocess.run(
                [python or sys.executable, "-c", BOOT.format(how=how, worker=worker, figures=FIGURES), text],
                cwd=folder,
                env={**environment_of(ROOT if python is None else None), **settings},
                capture_output=True,
                text=True,
                timeout=deadline_s,
                check=False,
            )
        finally:
            each(naming(folder), psutil.Process.kill)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FIGURES)]
    return (json.loads(lines[-1].removeprefix(FIGURES)) if lines else None), done
