# SPDX-License-Identifier: Apache-2.0
"""Virtual environments without these packages, whose dependencies are those of the environment of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.own_processes import SLOW

ROOT = Path(__file__).resolve().parents[2]


def outcome(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Of a program that doesn't see this tree, nor a queue of the test."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TQ_"))}
    return subprocess.run(
        command, cwd=cwd, env=known, capture_output=True, text=True, timeout=200 * SLOW, check=False
    )  # fmt: skip


def run(*command: str | Path, cwd: Path) -> str:
    """What it prints. It must succeed."""
    done = outcome(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_sources(folder: Path) -> Path:
    """A tree from which the distribution can be built or installed."""
    tree = folder / "lightning-tq"
    for name in ("transfer_queue", "lightning_tq", "scripts/editable"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("transfer_queue.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def empty_environment(folder: Path) -> tuple[Path, Path]:
    """Its interpreter and its site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python, site
