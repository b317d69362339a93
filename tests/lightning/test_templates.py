# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq new`` writes runs that train at once and go on after a kill; ``demo`` shows one of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_tq.cli.new_command import KINDS, write_template
from tests.console import lightning_tq
from tests.lightning.conftest import ROOT
from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python, started

TEMPLATES = ROOT / "lightning_tq" / "templates"
MOST_LINES = 120
COMMAND = ("-m", "lightning_tq")
IMPROVES = {"grpo": "accuracy", "sft": "loss", "stream": "loss"}
_STEP = re.compile(r"^step (\d+): \D*([\d.]+)", re.M)


def environment(**more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TQ_") and name != "DISPLAY"}
    return {**mine, "PYTHONPATH": str(ROOT), **more}


def train(*words: str | Path, **more: str) -> str:
    done = run_python(*words, env=environment(**more), timeout=600 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


def steps(printed: str) -> list[tuple[int, float]]:
    return [(int(step), float(value)) for step, value in _STEP.findall(printed)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_short(kind: str) -> None:
    lines = [line for path in (TEMPLATES / kind).iterdir() if path.is_file() for line in path.read_text().splitlines()]
    assert 0 < len([line for line in lines if line.strip()]) <= MOST_LINES


def test_new_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    for where in (tmp_path, tmp_path / "mine"):
        assert lightning_tq(["new", "sft", str(where)]) == 2
        assert "isn't an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize("name", ["$x${y}", "emo\N{GRINNING FACE}dir"])
def test_a_run_writes_into_its_directory_whatever_that_is_named(tmp_path: Path, name: str) -> None:
    write_template("sft", tmp_path / name)
    written = OmegaConf.load(tmp_path / name / "run.yaml")
    assert written.trainer.default_root_dir == str(tmp_path / name / "runs")


def test_new_writes_the_files_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_tq(["new", "grpo", str(tmp_path / "run")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    page = (ROOT / "docs" / "guides" / "grpo_run.md").read_text()
    shown = re.findall(r'^``` \{\.\w+ title="([^"]+)"\}\n--8<-- "([^"]+)"\n```$', page, re.M)
    assert {name for name, _ in shown} == written.keys()
    for name, path in shown:
        runs = f'default_root_dir: "{tmp_path / "run" / "runs"}"'
        assert (ROOT / path).read_text().replace("default_root_dir: runs", runs) == written[name]
    assert f"lightning-tq fit --config {tmp_path / 'run' / 'run.yaml'} --ckpt_path last" in capsys.readouterr().out


@pytest.mark.programs
@pytest.mark.timeout(620 * SLOW)
@pytest.mark.parametrize("kind", ["grpo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft", "stream"))])
def test_a_template_learns_and_goes_on_after_a_kill_from_its_last_checkpoint(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a run"  # a name that a shell would split
    train(*COMMAND, "new", kind, folder)
    epochs = 6 if kind == "grpo" else 10
    options = ("--trainer.enable_progress_bar=false", f"--trainer.max_epochs={epochs}")
    words = ("fit", "--config", folder / "run.yaml", *options)
    before = ""
    with started(*COMMAND, *words, env=environment()) as (first, out, _):
        while len(steps(before)) < 4:  # two epochs are saved: a checkpoint follows its line
            line = out.readline()
            assert line, before
            before += line
        first.send_signal(signal.SIGKILL)
        before += out.read()
        assert first.wait() == -signal.SIGKILL
    after = steps(train(*COMMAND, *words, "--ckpt_path", "last"))
    (start, at_first), (trained, _) = steps(before)[0], steps(before)[-1]
    per_epoch = steps(before)[1][0]
    assert start == 0
    assert after[0][0] in (trained - per_epoch, trained, trained + per_epoch), "it goes on, and doesn't begin anew"
    assert after[-1][0] == epochs * per_epoch
    assert after[-1][1] > 80 > at_first if kind == "grpo" else after[-1][1] < at_first / 10


@pytest.mark.programs
@pytest.mark.timeout(320 * SLOW)
@pytest.mark.parametrize("kind", ["stream", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", "sft"))])
def test_a_template_trains_on_two_ranks_which_share_all_held_out_samples(kind: str, tmp_path: Path) -> None:
    train(*COMMAND, "new", kind, tmp_path / "run")
    ranks = ("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=1")
    words = ("fit", "--config", tmp_path / "run" / "run.yaml", "--trainer.enable_progress_bar=false", *ranks)
    done = run_python(*COMMAND, *words, env=environment(), timeout=300 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps(done.stdout)) == 2, "before the training and after its epoch"
    assert not re.search(r"of partition 'val' .* left over", done.stdout + done.stderr)


@pytest.mark.programs
@pytest.mark.timeout(320 * SLOW)
def test_the_demo_learns_and_ends_with_a_picture_and_a_verdict(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("matplotlib")
    printed = train(*COMMAND, "demo", "--seconds", "10", tmp_path / "demo")
    assert re.search(r"^Watch it live: http://127\.0\.0\.1:\d+/#token=\S+$", printed, re.M)
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {tmp_path / 'demo' / 'demo.png'}\n" in printed
    assert re.search(
        r"^Accuracy 0% → \d+% in \d+ s and \d+ steps; "
        r"((generation|training) was the bottleneck|training and generation kept pace)\.$",
        printed,
        re.M,
    )


@pytest.mark.slow
@pytest.mark.timeout(320 * SLOW)
def test_the_demo_needs_no_page_and_says_what_would_give_one(tmp_path: Path) -> None:
    # Without aiohttp alone: torchmetrics takes matplotlib for installed where pip says so, and would fail.
    (tmp_path / "without.py").write_text(
        "import runpy, sys\n"
        "if __name__ == '__main__':\n"
        "    from lightning_tq.cli import demo_command as demo\n"
        "    found = demo.find_spec\n"
        "    demo.find_spec = lambda name: None if name == 'aiohttp' else found(name)\n"
        "    sys.modules['aiohttp'] = None\n"
        "    runpy.run_module('lightning_tq', run_name='__main__', alter_sys=True)\n"
    )
    printed = train(tmp_path / "without.py", "demo", "--seconds", "5", tmp_path / "demo")
    assert "The live page needs aiohttp, so there is none: pip install aiohttp\n" in printed
    assert "Watch it live" not in printed
    assert re.search(r"^Accuracy \d+% → \d+% ", printed, re.M)
