# SPDX-License-Identifier: Apache-2.0
"""``simulate`` runs a configuration's producers against steps that sleep."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from test_cli import RUN

from tests.console import lightning_tq
from tests.lightning.conftest import HERE

pytestmark = pytest.mark.timeout(600)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("options", "steps"), [([], 3), pytest.param(["--data.train.micro_batch_size=2"], 6, marks=pytest.mark.slow)]
)
def test_each_optimizer_step_sleeps_and_the_end_says_what_was_the_bottleneck(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: list[str],
    steps: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(sys, "argv", ["lightning-tq"])
    config = copy.deepcopy(RUN)
    config["model"]["init_args"] = {"fail_at": 0}  # where it is trained
    config["trainer"] |= {"accelerator": "gpu", "devices": "auto", "enable_checkpointing": True}
    OmegaConf.save(OmegaConf.create(config), "run.yaml")
    with caplog.at_level("INFO"):
        assert lightning_tq(["simulate", "--config", "run.yaml", "--step-s", "0.1", *options]) == 0
    said = re.search(r"Queue: (\d+) batches in ([\d.]+) s .* (was the bottleneck|kept pace)", caplog.text)
    assert said is not None
    assert int(said[1]) == steps
    assert float(said[2]) >= 0.1 * (steps - 1)
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml"}, "it leaves no files"


@pytest.mark.parametrize("length", ["-1", "nan", "inf", "1e300"])
def test_a_step_takes_a_time_that_a_wait_takes(capsys: pytest.CaptureFixture[str], length: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        lightning_tq(["simulate", f"--step-s={length}"])
    assert f"argument --step-s: must be between 0 and 292 years, got {length}" in capsys.readouterr().err
