# SPDX-License-Identifier: Apache-2.0
"""Producers with restarts: a process that fails is started again, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import producing
import pytest
import torch
from lightning.pytorch import Trainer
from producing import FIELDS
from recorders import Recorder

from lightning_tq import Producer, ProducerError, ProducerGroup, Stream, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue import GroupSampler

MakeTrainer = Callable[..., Trainer]


def test_a_killed_worker_is_started_again_and_each_prompt_is_trained_once(
    trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Producer(target=producing.work_until_killed, args={"folder": str(tmp_path)}, count=2, restarts=1)
    train = Stream(
        partition="train", task="learn", fields=FIELDS, sampler=GroupSampler(groups=2), head_fields=["number"]
    )
    # The new process takes longer to start than this grace.
    with TQDataModule(train=train, queue={"units": 1, "producer_grace_s": 2.5}, producers=[workers]) as dm:
        dm.client.add_groups({"number": torch.arange(8)}, "train", tasks=["learn"])
        dm.client.seal_partition("train")
        model = Recorder()
        trainer().fit(model, datamodule=dm)
    assert len(model.indexes()) == len(set(model.indexes())) == 16
    started = sorted(path.name.partition("-")[0] for path in tmp_path.glob("?-*"))
    assert started == ["0", "0", "1"], "one that returns is not started again"
    (text,) = [record.message for record in caplog.records if "It is started again" in record.message]
    assert re.match(
        r"producer 'producing:work_until_killed' \(process 1 of 2\), pid \d+, was killed by SIGKILL. "
        r"It is started again in 1 s, with 0 restarts left after that.",
        text,
    )


def test_samples_that_a_killed_process_was_to_add_a_field_to_go_to_others(trainer: MakeTrainer, tmp_path: Path) -> None:
    adders = Producer(target=producing.add_text_until_killed, args={"folder": str(tmp_path)}, count=2, restarts=1)
    numbers = Producer(target=producing.produce_numbers, args={"count": 24})
    train = Stream(partition="train", task="learn", fields=FIELDS, batch_size=4)
    model = Recorder()
    trainer().fit(model, datamodule=TQDataModule(train=train, queue={"units": 1}, producers=[numbers, adders]))
    assert list(tmp_path.iterdir()), "one was killed"
    assert len(model.indexes()) == len(set(model.indexes())) == 24


def test_the_failure_after_the_last_restart_ends_the_run(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    command = ["sh", "-c", 'echo "engine crashed, worker $TQ_WORKER" >&2; exit 3']
    dm = TQDataModule(train=stream(), producers=[Producer(target=command, name="reward", restarts=2)])
    with pytest.raises(
        ProducerError, match=r"ended with exit code 3, after it had been started again 2 times. Its last"
    ):
        trainer().fit(Recorder(), datamodule=dm)
    warnings = [record.message.partition(", ended ")[2] for record in caplog.records if "reward" in record.message]
    assert warnings == [
        f"with exit code 3. It is started again in {then}. Its last line on stderr: engine crashed, worker 0"
        for then in ("1 s, with 1 restart left after that", "2 s, with 0 restarts left after that")
    ]


def test_a_function_that_can_not_be_found_is_not_looked_for_again(
    trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "misspelt_workers.py").write_text("def produce():\n    pass\n")
    dm = TQDataModule(train=stream(), producers=[Producer(target="misspelt_workers:prodcue", restarts=3)])
    with pytest.raises(ProducerError, match=r"(?s)ended with exit code 127\. Its last .*no attribute 'prodcue'"):
        trainer().fit(Recorder(), datamodule=dm)
    assert not [record for record in caplog.records if "It is started again" in record.message]


def test_ctrl_c_while_a_group_ends_kills_what_is_left_of_it(data: Callable[..., TQDataModule], tmp_path: Path) -> None:
    command = ["sh", "-c", f"trap '' TERM; echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 1000"]
    group, pid = ProducerGroup([Producer(target=command)]), tmp_path / "pid"
    group.start(data().address)
    while not pid.exists():
        threading.Event().wait(0.05)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        group.end()
    timer.join()
    status = Path("/proc", pid.read_text().strip(), "status")
    while status.exists() and "zombie" not in status.read_text():
        threading.Event().wait(0.05)
    assert group.running() is None


def test_a_process_that_is_to_be_started_again_counts_as_running_and_ends_with_its_group(
    data: Callable[..., TQDataModule], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    command = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; exit 1"]
    group = ProducerGroup([Producer(target=command, restarts=3)])
    group.start(data().address)
    while not caplog.records:
        threading.Event().wait(0.05)
    assert group.failure() is None
    assert len(group.running() or ()) == 1
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "status")
    assert not child.exists() or "zombie" in child.read_text(), "what a dead process left is killed"
    group.end()
    assert group.running() is None
