# SPDX-License-Identifier: Apache-2.0
"""A small run of the GRPO example on Ray (configs/grpo_ray.yaml) trains as the one without does."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_processes import SLOW

pytest.importorskip("ray")
pytest.importorskip("reasoning_gym")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
SMALL = {
    "trainer.max_epochs": 2,
    "data.train.num_batches": 3,
    "data.train.sampler.init_args.groups": 8,
    "model.warmup.steps": 10,
}


def test_trainer_feeder_and_rollout_are_actors_of_one_run(tmp_path: Path) -> None:
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "-m", "examples.grpo.ray_main", *options, f"--trainer.logger.init_args.save_dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500.0 * SLOW,
        check=False,
        env={**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "grpo" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row["train/reward"]]) == 6
    assert len([row for row in rows if row["val/accuracy"]]) == 3  # after the warm-up and after each epoch
    assert max(float(row["train/staleness_max"]) for row in rows if row["train/staleness_max"]) <= 1.0
    assert (tmp_path / "grpo" / "reward.png").exists()
