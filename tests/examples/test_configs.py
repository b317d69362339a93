# SPDX-License-Identifier: Apache-2.0
"""Each file in configs/ runs from the command line and leaves no process.

Those of the GRPO example have their tests in test_grpo_run.py and tests/on_ray/test_ray_grpo.py.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from tests.own_processes import own_processes
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("lightning-tq")

pytestmark = pytest.mark.timeout(150)


def run(config: str, folder: Path, command: str = "fit", **options: object) -> str:
    """Run it and return its output. Keywords are options with "__" for a dot."""
    changes = [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    files = f"--config=configs/{config}", f"--trainer.default_root_dir={folder}"
    done = run_python(COMMAND, command, *files, *changes, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


def test_every_configuration_has_its_test() -> None:
    files = (
        Path(__file__),
        ROOT / "tests/examples/test_grpo_run.py",
        ROOT / "tests/on_ray/test_ray_grpo.py",
        ROOT / "tests/integration/test_metrics.py",
    )
    tests = "".join(path.read_text() for path in files)
    names = [path.name for path in (ROOT / "configs").glob("*.yaml")]
    assert [name for name in names if f'"{name}"' not in tests and f"configs/{name}" not in tests] == []


@pytest.mark.programs
def test_debug_trains_two_epochs_of_five_batches_in_two_parts_each(tmp_path: Path) -> None:
    printed = run("debug.yaml", tmp_path)
    assert re.findall(r"rank 0: 20 optimizer steps, 80 samples, val_loss 0\.", printed) != []


@pytest.mark.programs
def test_ddp_gives_both_ranks_equally_many_steps_and_pads_the_last_round(tmp_path: Path) -> None:
    printed = run("ddp.yaml", tmp_path, trainer__enable_progress_bar=False)
    ranks = sorted(re.findall(r"rank (\d): (\d+) optimizer steps, (\d+) samples", printed))
    assert ranks == [("0", "12", "48"), ("1", "12", "48")]


@pytest.mark.slow
def test_the_student_comes_to_agree_with_the_teacher(tmp_path: Path) -> None:
    printed = run("distillation.yaml", tmp_path, trainer__max_epochs=1, trainer__logger__init_args__save_dir=tmp_path)
    agreement = [float(share) for share in re.findall(r"agreement with the teacher (\S+)%", printed)]
    assert len(agreement) == 2, "untrained, and after the epoch"
    assert agreement[0] < 30 < 70 < agreement[1]
    with (tmp_path / "distillation" / "version_0" / "metrics.csv").open(newline="") as file:
        assert sum(1 for row in csv.DictReader(file) if row["train/loss"]) == 3072 // 64
