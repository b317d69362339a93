# SPDX-License-Identifier: Apache-2.0
"""Wheel and sdist hold what a user needs, and a clean environment runs from the wheel alone."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from fresh_environments import ROOT, copy_of_sources, empty_environment, run

from tests.own_processes import SLOW

pytestmark = [pytest.mark.programs, pytest.mark.timeout(240 * SLOW)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    pytest.importorskip("build", reason="building needs pip install -e '.[dev]'")
    tree, out = copy_of_sources(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("out")
    run(sys.executable, "-m", "build", "--outdir", str(out), ".", cwd=tree)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_both_packages_their_data_and_the_licence(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    sources = {
        str(path.relative_to(ROOT))
        for name in ("transfer_queue", "lightning_tq")
        for path in (ROOT / name).rglob("*.py")
    }
    data = {
        "transfer_queue/config.yaml",
        "transfer_queue/version/version",
        "transfer_queue/py.typed",
        "lightning_tq/py.typed",
        *(f"lightning_tq/templates/{kind}/run.yaml" for kind in ("grpo", "sft", "stream")),
    }
    assert sorted((sources | data) - names) == []
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"transfer_queue", "transfer_queue.py", "lightning_tq"}
    assert [name for name in names if name.endswith("LICENSE")]


def test_the_sdist_builds_without_anything_else(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames() if "/" in name]
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/editable/guard.py"} <= set(names)


def test_a_clean_environment_runs_the_ten_lines_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this environment."""
    python, site = empty_environment(tmp_path / "clean")
    zipfile.ZipFile(built[1]).extractall(site)
    program = tmp_path / "ten_lines.py"
    program.write_text(
        "import torch, transfer_queue as tq\n"
        "print(tq.__file__)\n"
        "tq.init()\n"
        "meta = tq.get_client().put({'x': torch.arange(4)}, partition_id='p')\n"
        "print(tq.get_client().get_data(meta)['x'].tolist())\n"
        "tq.close()\n"
    )
    where, values = run(str(python), str(program), cwd=tmp_path).splitlines()
    assert (Path(where).is_relative_to(site), values) == (True, "[0, 1, 2, 3]")
    assert "lightning-tq" in run(str(python), "-m", "lightning_tq", "status", "--help", cwd=tmp_path)
    run(str(python), "-m", "lightning_tq", "new", "grpo", "mine", cwd=tmp_path)
    assert (tmp_path / "mine" / "run.yaml").is_file()
