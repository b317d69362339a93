# SPDX-License-Identifier: Apache-2.0
"""A package of another distribution that is called ``transfer_queue`` is noticed, and none of its code runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_processes import SLOW

ROOT = Path(__file__).resolve().parents[2]
PACKAGES_OF_TRANSFER_QUEUE = {
    "transfer_queue", "transfer_queue/dataloader", "transfer_queue/sampler", "transfer_queue/storage",
    "transfer_queue/storage/bootstrap", "transfer_queue/storage/clients", "transfer_queue/storage/managers",
    "transfer_queue/utils",
}  # fmt: skip
"""Folders with an __init__.py in the wheel of TransferQueue 0.1.11. One that is left hides a module of its name."""


def test_no_module_has_the_name_of_a_package_of_transfer_queue() -> None:
    nested = PACKAGES_OF_TRANSFER_QUEUE - {"transfer_queue"}
    assert [name for name in sorted(nested) if (ROOT / f"{name}.py").exists()] == []
    # The one beside the package is imported only where the package's own __init__.py is missing.
    assert (ROOT / "transfer_queue.py").exists()


def importing(module: str, *path: Path, guarded: bool = False) -> subprocess.CompletedProcess[str]:
    """``guarded``: as an editable installation is from the start of Python, also of the one that runs the tests."""
    guard = "sys.meta_path = [each for each in sys.meta_path if each.__module__ != 'lightning_tq_guard']"
    if guarded:
        guard = f"import runpy; runpy.run_path({str(ROOT / 'scripts' / 'editable' / 'guard.py')!r})"
    program = f"import sys; sys.path[:0] = {[str(each) for each in path]}\n{guard}\nimport {module}"
    return subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=False, timeout=100 * SLOW
    )  # fmt: skip


def foreign_package(folder: Path) -> Path:
    (folder / "transfer_queue").mkdir()
    (folder / "transfer_queue" / "__init__.py").write_text("print('ran')\n")
    return folder


@pytest.mark.parametrize(("module", "guarded"), [("lightning_tq", False), ("transfer_queue", True)])
def test_a_package_that_comes_before_its_own_is_refused(tmp_path: Path, module: str, guarded: bool) -> None:
    said = importing(module, foreign_package(tmp_path), ROOT, guarded=guarded)
    assert (said.returncode, said.stdout) == (1, "")
    assert f"ImportError: 'import transfer_queue' finds {tmp_path}/transfer_queue/__init__.py" in said.stderr


def test_the_guard_lets_another_clone_and_one_that_comes_first_pass(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    clone = foreign_package(tmp_path / "clone")
    (clone / "transfer_queue" / "own_files.py").write_text("")
    assert importing("transfer_queue", clone, ROOT, guarded=True).stdout == "ran\n"
    (tmp_path / "theirs").mkdir()
    said = importing("transfer_queue", ROOT, foreign_package(tmp_path / "theirs"), guarded=True)
    assert (said.returncode, said.stdout) == (0, "")


def test_a_package_that_lost_its_init_file_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "transfer_queue").mkdir()
    for name in ("transfer_queue.py", "transfer_queue/own_files.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    said = importing("transfer_queue", tmp_path)
    assert said.returncode == 1
    assert f"ImportError: {tmp_path}/transfer_queue/__init__.py is missing" in said.stderr
