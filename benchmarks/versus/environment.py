# SPDX-License-Identifier: Apache-2.0
"""A virtual environment that holds the peer's released package and nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.1.11"
ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 1800.0
CHECK_TIMEOUT_S = 60.0


def default_folder() -> Path:
    """Kept between runs, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lightning-tq" / f"TransferQueue-{VERSION}-py{sys.version_info[0]}.{sys.version_info[1]}"


def interpreter(folder: Path) -> str:
    """The environment's Python; built first where it isn't there or holds another version.

    torch and whatever else both packages need comes in the versions of constraints.txt, so both run on the same.
    """
    python = folder / "bin" / "python"
    if _installed(python) != VERSION:
        print(f"installing TransferQueue=={VERSION} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_TIMEOUT_S)
        wanted = ["-c", str(ROOT / "constraints.txt"), f"TransferQueue=={VERSION}", "torch"]
        install = [str(python), "-m", "pip", "install", "--quiet", *wanted]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)
    return str(python)


def _installed(python: Path) -> str | None:
    if not python.exists():
        return None
    code = "from importlib.metadata import version; print(version('TransferQueue'))"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
    )
    return done.stdout.strip() or None
