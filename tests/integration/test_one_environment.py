# SPDX-License-Identifier: Apache-2.0
"""lightning-tq and TransferQueue in one environment, from real wheels: in any order it works, or says what mends it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_environments import copy_of_sources, empty_environment, outcome, run

from tests.integration.test_own_files import PACKAGES_OF_TRANSFER_QUEUE
from tests.own_processes import SLOW

pytestmark = [pytest.mark.programs, pytest.mark.timeout(400 * SLOW)]

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
USE = """
import torch, transfer_queue as tq
tq.init({"launch": "local", "backend": {"SimpleStorage": {"memory": "16MiB"}}})
meta = tq.get_client().put({"x": torch.arange(4)}, partition_id="p")
print(tq.get_client().get_data(meta)["x"].tolist())
tq.close()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name of the distribution."""
    pytest.importorskip("build", reason="building needs pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheels")
    download = (*PIP, "download", "--no-deps", "--dest", str(folder), "TransferQueue==0.1.11")
    got = subprocess.run(download, capture_output=True, text=True, timeout=200 * SLOW, check=False)
    if got.returncode:
        pytest.skip(f"pip can't download TransferQueue 0.1.11: {got.stderr.strip().splitlines()[-1]}")
    tree = copy_of_sources(tmp_path_factory.mktemp("tree"))
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ".", cwd=tree)
    return {"theirs": next(folder.glob("[tT]*.whl")), "ours": next(folder.glob("lightning_tq*.whl"))}


class Installation:
    """A fresh environment, and what pip does there."""

    def __init__(self, folder: Path, wheels: dict[str, Path]) -> None:
        self.folder, self._wheels = folder, wheels
        self.python, self.site = empty_environment(folder / "env")

    def pip(self, *arguments: str | Path) -> None:
        run(*PIP, "--python", self.python, *arguments, cwd=self.folder)

    def take(self, step: str) -> None:
        """\"ours\", "theirs again" or "without theirs"."""
        name = {"theirs": "TransferQueue", "ours": "lightning-tq"}
        if step.startswith("without "):
            self.pip("uninstall", "-y", name[step.removeprefix("without ")])
        else:
            again = ["--force-reinstall"] if step.endswith(" again") else []
            self.pip("install", "--no-deps", *again, self._wheels[step.removesuffix(" again")])

    def says(self, program: str) -> subprocess.CompletedProcess[str]:
        return outcome(self.python, "-c", program, cwd=self.folder)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return outcome(self.python.with_name("lightning-tq"), *arguments, cwd=self.folder)

    def mend(self, said: str) -> None:
        """Run the two commands that end a text."""
        for line in said.rstrip().splitlines()[-2:]:
            pip, *arguments = shlex.split(line)
            assert pip == "pip"
            self.pip(*arguments)


@pytest.fixture
def installation(wheels: dict[str, Path], tmp_path: Path) -> Installation:
    return Installation(tmp_path, wheels)


def test_the_recorded_packages_are_those_of_the_wheel(wheels: dict[str, Path]) -> None:
    names = [Path(name) for name in zipfile.ZipFile(wheels["theirs"]).namelist()]
    found = {str(path.parent) for path in names if path.name == "__init__.py" and path.parts[0] == "transfer_queue"}
    assert found == PACKAGES_OF_TRANSFER_QUEUE


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["theirs, ours", "ours, theirs, ours again"])
def test_where_ours_came_last_it_works_and_warns(installation: Installation, steps: str) -> None:
    for step in steps.split(", "):
        installation.take(step)
    used = installation.says(USE)
    assert (used.returncode, used.stdout) == (0, "[0, 1, 2, 3]\n"), used.stderr
    assert "UserWarning: TransferQueue 0.1.11 is installed beside lightning-tq" in used.stderr
    doctor = installation.command("doctor")
    assert (doctor.returncode, doctor.stderr) == (1, "")
    assert "PROBLEM  TransferQueue 0.1.11 is installed, too" in doctor.stdout


@pytest.mark.parametrize(
    "steps",
    [
        "ours, theirs",
        pytest.param("ours, theirs, without theirs", marks=pytest.mark.slow),
        pytest.param("theirs, ours, theirs again", marks=pytest.mark.slow),
        pytest.param("theirs, ours, without theirs", marks=pytest.mark.slow),
    ],
)
def test_where_theirs_came_last_each_import_says_what_mends_it(installation: Installation, steps: str) -> None:
    for step in steps.split(", "):
        installation.take(step)
    for program in ("import transfer_queue", "import lightning_tq", "from transfer_queue.client import connect"):
        said = installation.says(program)
        assert said.returncode == 1
        assert "\nImportError: " in said.stderr
        assert "pip uninstall -y TransferQueue\n  pip install --force-reinstall --no-deps " in said.stderr
    for command in (["doctor"], ["status", "--watch"], ["--help"]):
        told = installation.command(*command)
        assert (told.returncode, told.stdout) == (1, "")
        assert told.stderr.startswith("error: ")
        assert "Traceback" not in told.stderr
    installation.mend(told.stderr)
    used = installation.says(USE)
    assert (used.returncode, used.stdout) == (0, "[0, 1, 2, 3]\n"), used.stderr
    assert "TransferQueue 0.1.11" not in used.stderr
    assert installation.command("doctor").stdout.startswith("fine     lightning-tq ")


@pytest.mark.slow
@pytest.mark.parametrize("theirs_first", [True, False])
def test_an_editable_installation_notices_theirs(
    installation: Installation, tmp_path: Path, theirs_first: bool
) -> None:
    tree = copy_of_sources(tmp_path)
    steps: list[Callable[[], None]] = [
        lambda: installation.take("theirs"), lambda: installation.pip("install", "--no-deps", "--editable", tree)
    ]  # fmt: skip
    for step in steps if theirs_first else reversed(steps):
        step()
    for program in ("import transfer_queue", "import lightning_tq", "from transfer_queue.client import connect"):
        said = installation.says(program)
        assert said.returncode == 1
        assert f"'import transfer_queue' finds {installation.site}/transfer_queue/__init__.py" in said.stderr
        assert f"pip install --force-reinstall --no-deps -e {tree}\n" in said.stderr
    told = installation.command("doctor")
    assert (told.returncode, told.stdout) == (1, "")
    installation.mend(told.stderr)
    used = installation.says(f"import lightning_tq; {USE}")
    assert (used.returncode, used.stdout) == (0, "[0, 1, 2, 3]\n"), used.stderr


def test_a_file_that_is_edited_is_named(installation: Installation) -> None:
    installation.take("ours")
    with (installation.site / "transfer_queue" / "errors.py").open("a") as file:
        file.write("# edited\n")
    shutil.rmtree(installation.site / "transfer_queue" / "contrib")
    doctor = installation.command("doctor")
    assert doctor.returncode == 1
    assert "4 files of lightning-tq" in doctor.stdout
    assert "changed since the installation, such as transfer_queue/contrib/__init__.py" in doctor.stdout
