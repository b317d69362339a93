# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq doctor`` says in a sentence each what is wrong with the environment and with a queue."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run

import transfer_queue as tq
from lightning_tq.cli.doctor_command import check_environment, check_queue
from tests.console import lightning_tq
from tests.own_processes import SLOW
from transfer_queue.environment import Environment, read_environment

FINE = Environment(
    version="0.1.0", folder="/site/transfer_queue", changed_files=(), other_version=None,
    remedy=("pip uninstall -y TransferQueue", "pip install lightning-tq"), torch="2.13.0+cpu", torch_device=None,
    gpus=0, shm_free=8 << 30, open_files=20_000, machine_memory=16 << 30, memory=8 << 30, key_file="keys",
    key_mode=0o600,
)  # fmt: skip
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    (
        {"other_version": "0.1.11"},
        "TransferQueue 0.1.11 is installed, too, .*: pip uninstall -y TransferQueue && pip i",
    ),
    ({"changed_files": ("a.py", "b.py")}, "2 files of lightning-tq 0.1.0 .*, such as a.py: pip install lightning-tq"),
    ({"torch": None}, "torch is not installed in this environment: install lightning-tq here"),
    ({"gpus": 8}, "torch 2.13.0.cpu is built for CPUs only, but this host has 8 GPUs: install the build for CUDA"),
    ({"shm_free": 64 << 20}, "/dev/shm has 64.0 MiB left; .*: start the container with --shm-size=2g"),
    ({"shm_free": None}, "/dev/shm can't be written, .*: start the container with --shm-size=2g"),
    ({"open_files": 1024}, r"may open only 1,024 files \(ulimit -Hn\), .*: raise nofile in limits.conf"),
    ({"memory": 32 << 30}, "the queue's memory is 32.0 GiB, but this machine or container has 16.0 GiB, .*: lower mem"),
    ({"key_mode": 0o640}, r"other users can read the keys in keys \(mode 640\): run chmod 600"),
    ({"key_mode": None}, "the key file keys is missing, or not yours to read: copy it from"),
]


def test_an_environment_without_problems_gets_short_lines() -> None:
    lines = check_environment(FINE)
    assert [line.text for line in lines if line.is_problem] == []
    assert max(len(line.text) for line in lines) < 80


@pytest.mark.parametrize(("readings", "said"), PROBLEMS, ids=[str(list(readings)) for readings, _ in PROBLEMS])
def test_a_problem_is_one_sentence_with_what_mends_it(readings: dict[str, Any], said: str) -> None:
    (line,) = [each for each in check_environment(replace(FINE, **readings)) if each.is_problem]
    assert re.search(said, line.text)


def test_readings_are_those_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "keys").touch(mode=0o600)
    found = read_environment({"key_file": str(tmp_path / "keys"), "backend": {"SimpleStorage": {"memory": "1GiB"}}})
    assert (found.torch, found.memory, found.key_mode) == (torch.__version__, 1 << 30, 0o600)
    assert (found.torch_device is None) == (torch.version.cuda is None)
    assert found.folder == str(Path(tq.__file__).parent)


def test_only_old_waits_are_problems() -> None:
    stats = {"partitions": {"train": {"samples": 3}, "_weights": {"samples": 1}}}
    young, old = (
        tq.Finding(kind="fetch", what="task 'ppo'", waits_for="4 samples of 'train'", age_s=age) for age in (2.0, 90.0)
    )
    gone = tq.Finding(kind="gone", what="all producers of 'x'", held_up_by=("have died",), to_do=("restart them",))
    lines = list(check_queue("ipc:///q", stats, [young, old, gone], 60.0))
    assert [tuple(line) for line in lines] == [
        (False, "queue ipc:///q: 3 samples in 1 partition"),
        (False, "task 'ppo' waited 2.0 s for 4 samples of 'train'."),
        (True, "task 'ppo' waited 90.0 s for 4 samples of 'train'."),
        (True, "all producers of 'x' have died. Restart them."),
    ]


def test_it_looks_at_the_queue_that_it_is_given_and_reports_by_its_exit_code(tmp_path: Path) -> None:
    too_large = tmp_path / "queue.yaml"
    too_large.write_text("memory: 4000TiB\n")
    address = tq.init({"launch": "local", "backend": {"SimpleStorage": {"memory": "64MiB"}}}).address
    try:
        tq.get_client().put({"x": torch.arange(4)}, partition_id="train")
        said = run(["doctor", address, "--config", str(too_large)], ["doctor", "ipc:///nowhere/controller"])
        (named,) = run(["doctor"], TQ_ADDRESS=address)
    finally:
        tq.close()
    assert [code for code, _, _ in said] == [1, 1]
    assert "PROBLEM  the queue's memory is 4000 TiB, but" in said[0][1]
    assert "PROBLEM  no queue at ipc:///nowhere/controller: there is no such socket" in said[1][1]
    assert f"fine     queue {address}: 4 samples in 1 partition" in named[1]
    assert "fine     memory: 64.0 MiB of" in named[1]


@pytest.mark.parametrize(
    "options", [["queue"], ["--config", "missing.yaml"], ["--wait", "long"], ["--wait", "-1"], ["--wait", "nan"]]
)
def test_a_mistake_in_the_options_is_exit_code_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        lightning_tq(["doctor", *options])
    assert "lightning-tq doctor: error: " in capsys.readouterr().err


def test_the_environment_is_looked_at_without_loading_anything_heavy() -> None:
    program = (
        "import sys; from lightning_tq.cli import main; main(['doctor'])\n"
        "assert not {'torch', 'lightning', 'tensordict', 'zmq', 'omegaconf'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100 * SLOW
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert " torch " in done.stdout
