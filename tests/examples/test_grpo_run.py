# SPDX-License-Identifier: Apache-2.0
"""A small run of the GRPO example: its command succeeds, draws its picture and prints its summary."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("matplotlib")

from examples.grpo import compare
from tests.warm_python import run_python

COMMAND = Path(sys.executable).with_name("lightning-tq")
SMALL = {
    "trainer.max_epochs": 2,
    "data.train.num_batches": 3,
    "data.train.sampler.init_args.groups": 8,
    "model.warmup.steps": 10,
}


def run(folder: Path, *more: str, **trainer: str | int) -> str:
    """Run it, with more configurations, and return its output. Its files are in ``folder / "grpo"``."""
    options = {**SMALL, "trainer.logger.init_args.save_dir": folder}
    options.update({f"trainer.{name}": value for name, value in trainer.items()})
    configs = [f"--config=configs/{name}" for name in ("grpo.yaml", *more)]
    done = run_python(COMMAND, "fit", *configs, *(f"--{name}={options[name]}" for name in options), timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metric(folder: Path, name: str, run: str = "grpo") -> list[float]:
    with (folder / run / "version_0" / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def summary(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^  ([a-z -]+?)  +(.+)$", printed, re.MULTILINE))


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """Its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("main_job")
    return folder, run(folder)


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_the_main_job_trains_on_fresh_answers_validates_each_epoch_and_reports(main_job):
    tmp_path, printed = main_job[0], summary(main_job[1])
    assert printed["optimizer steps"] == "6"
    assert printed["answers trained on"] == str(6 * 64)
    assert printed["picture"] == str(tmp_path / "grpo" / "reward.png")
    assert (tmp_path / "grpo" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len(metric(tmp_path, "val/accuracy")) == 3  # after the warm-up and after each epoch
    assert len(metric(tmp_path, "train/reward")) == 6
    assert max(metric(tmp_path, "train/staleness_max")) <= 1.0
    assert all(seconds >= 0.0 for seconds in metric(tmp_path, "queue/wait_s"))


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_the_gate_trains_no_group_of_equal_rewards_and_compare_draws_both_runs(main_job):
    tmp_path, _ = main_job
    run(tmp_path, "grpo_dapo.yaml")
    assert len(metric(tmp_path, "train/reward", "grpo_dapo")) == 6
    curves = {name: compare.read(tmp_path, name) for name in compare.RUNS}
    assert [prompts for prompts, _ in curves["grpo_dapo"]] == [0, 3 * 64, 6 * 64]
    compare.main(str(tmp_path))
    assert (tmp_path / "grpo_compared.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_until_an_accuracy_are_those_of_its_first_time():
    assert compare.prompts_until([(0, 0.3), (64, 0.6), (128, 0.5)], 0.5) == 64
    assert compare.prompts_until([(0, 0.3)], 0.5) is None


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_data_parallel_ranks_share_the_groups_of_each_step(tmp_path):
    printed = summary(run(tmp_path, devices=2, strategy="ddp"))
    assert printed["optimizer steps"] == "6"
    assert printed["answers trained on"] == str(6 * 64)
    assert max(metric(tmp_path, "train/staleness_max")) <= 1.0
