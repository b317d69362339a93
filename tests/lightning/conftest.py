# SPDX-License-Identifier: Apache-2.0
"""Small real Trainers on real queues, and a check that no thread, process or file remains."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Trainer
from producing import FIELDS, rows

import transfer_queue as tq
from lightning_tq import Stream, TQDataModule
from tests.own_processes import own_processes
from tests.warm_python import Program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Rows = list[tuple[str, str, list[int]]]
"""The batches of a rank: (stage, partition, indexes)."""


def stream(partition: str = "train", task: str = "learn", batch_size: int = 4, **options: Any) -> Stream:
    return Stream(partition=partition, task=task, fields=FIELDS, batch_size=batch_size, **options)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, process, socket directory or address remains after a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "TQ_ADDRESS" not in os.environ
    before = {thread.name for thread in threading.enumerate()}
    yield
    tq.close()
    left = {
        "threads": {thread.name for thread in threading.enumerate()} - before - {"pytest_timeout"},
        "processes": {" ".join(child.cmdline()) for child in own_processes()},
        "directories": {path.name for path in tmp_path.glob("tq-*")},
        "address": os.environ.get("TQ_ADDRESS"),
    }
    assert left == {"threads": set(), "processes": set(), "directories": set(), "address": None}


@pytest.fixture
def data() -> Iterator[Callable[..., TQDataModule]]:
    """``data(train=..., ...)``: a TQDataModule with an open queue, closed after the test."""
    made = []

    def make(**streams: Any) -> TQDataModule:
        datamodule = TQDataModule(queue={"units": 1}, **streams)
        datamodule.open()
        made.append(datamodule)
        return datamodule

    yield make
    for datamodule in made:
        datamodule.close()


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str, list[Rows]]]]:
    """``run_ranks("script.py", ..., "LOGS", ...)``: exit code, output, and what each rank recorded under LOGS."""
    logs = tmp_path / "logs"
    logs.mkdir()

    def run(script: str, *args: str) -> tuple[int, str, list[Rows]]:
        output = tmp_path / "output"
        with output.open("w") as file:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "TMPDIR": str(tmp_path)}
            words = (HERE / script, *(logs if arg == "LOGS" else arg for arg in args))
            program = Program(words, ROOT, environment, file, file)
            try:
                code = program.wait(170)
            finally:
                program.end()
        ranks = [
            [tuple(json.loads(line)) for line in path.read_text().splitlines()] for path in sorted(logs.glob("rank*"))
        ]
        return code, output.read_text(), ranks

    yield run
    marker = str(tmp_path)
    # The launcher kills remaining ranks within seconds. Servers and producers end at once.
    left = [each for each in psutil.process_iter(["cmdline", "environ"]) if marker in str(each.info)]
    _, alive = psutil.wait_procs(left, timeout=20)
    for process in alive:
        process.send_signal(signal.SIGKILL)
    assert alive == []


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**options: Any) -> Trainer:
        quiet = {
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "max_epochs": 1, "default_root_dir": tmp_path,
        }  # fmt: skip
        return Trainer(**{**quiet, **options})

    return make


@pytest.fixture
def recorded(tmp_path: Path, data: Callable[..., TQDataModule]) -> Path:
    """Two batches of "train", of 4 and 2 samples."""
    client = data(train=stream()).client
    client.register_task("learn", dp_size=1, tail="uneven_ok")
    client.register_task("copy", follows="learn")
    tags = [{"policy_version": number // 2, "reward": number / 4} for number in range(6)]
    client.put(rows(6), partition_id="train", tags=tags)
    client.seal_partition("train")
    for number in (0, 1):
        of = {"dp_rank": 0, "batch_index": number}
        client.get_meta(["x", "text"], 4, "train", task_name="learn", sampling_config=of)
    client.save_batches(tmp_path / "record" / "000000", "copy")
    tq.close()
    return tmp_path / "record"
