# SPDX-License-Identifier: Apache-2.0
"""The table of subcommands says what there is, without loading what carries it out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_tq.cli import COMMANDS, OPTIONS_OF_A_TRAINER
from tests.console import lightning_tq
from tests.lightning.conftest import ROOT


def test_help_has_a_line_for_every_subcommand_and_each_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_tq(["--help"]) == 0
    rows = dict(re.findall(r"^  ([\w-]+)  +(\S.*)$", capsys.readouterr().out, re.M))
    assert list(rows) == list(COMMANDS)
    assert [name for name, line in rows.items() if not line.endswith(".")] == []
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            lightning_tq([name, "--help"])
        assert re.match(rf"usage: lightning-tq .*\b{name}\b", capsys.readouterr().out)


def test_the_first_parts_of_a_trainers_options_are_known_without_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    parts = set()
    for name in ("fit", "validate", "test", "predict"):
        with pytest.raises(SystemExit, match="0"):
            lightning_tq([name, "--help"])
        parts |= set(re.findall(r"^  (?:-\w, )?--(\w+)", capsys.readouterr().out, re.M))
    assert parts <= set(OPTIONS_OF_A_TRAINER)


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_tq(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-tq {version('lightning-tq')}\n"


@pytest.mark.parametrize(
    ("words", "meant"), [(["status", "--wach"], "--watch"), (["records", "d", "--stepp=3"], "--step")], ids=str
)
def test_an_unknown_option_is_named_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lightning_tq(words)
    assert f"unrecognized arguments: {words[-1]}; did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fit", "validate"])
def test_a_trainers_command_without_a_run_asks_for_its_file(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert lightning_tq([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: the run to {name} is missing: --config FILE\n")


@pytest.mark.parametrize("given", ["-1", "0", "3601"])
def test_a_demo_of_an_impossible_length_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lightning_tq(["demo", "--seconds", given, str(tmp_path / "demo")])
    assert f"argument --seconds: must be between 1 and 3600 seconds, got {given}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_command_whose_reader_has_gone_ends_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as "| head" does once it has its lines
    command = [sys.executable, "-m", "lightning_tq", "doctor"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_command_whose_output_is_closed_ends_without_a_traceback(tmp_path: Path) -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m lightning_tq keys '{tmp_path}/new keys' >&-"]
    ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "new keys").is_file()
