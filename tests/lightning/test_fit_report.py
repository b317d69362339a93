# SPDX-License-Identifier: Apache-2.0
"""At the end of a fit, one paragraph says which side was the bottleneck, by how much, and what helps."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from producing import fill, rows
from recorders import Recorder
from torch.utils.data import DataLoader

from lightning_tq import Producer, TQDataModule
from tests.lightning.conftest import stream

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


def report_of(caplog: pytest.LogCaptureFixture) -> str:
    (text,) = [record.getMessage() for record in caplog.records if "without validation" in record.getMessage()]
    return text


class Slow(Recorder):
    """Steps that take longer than anything else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        threading.Event().wait(0.3)
        return super().training_step(batch, batch_idx)


def test_slow_training_is_reported_once_also_without_a_monitor(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val", task="evaluate"))
    for name in ("train@0", "train@1", "val"):
        fill(dm.client, name, 8)
    with caplog.at_level(logging.INFO):
        trainer(max_epochs=2).fit(Slow(), datamodule=dm)
    text = report_of(caplog)
    assert text.startswith("Queue: 4 batches in ")
    assert "training was the bottleneck" in text
    assert text.endswith("(more or faster producers would not help).")


@pytest.mark.parametrize("how", ["interrupt", "SIGTERM"])
def test_a_run_that_is_interrupted_is_reported(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    with caplog.at_level(logging.INFO), pytest.raises((SystemExit, SIGTERMException)):
        trainer().fit(Recorder(fail_at=2, how=how), datamodule=dm)
    assert report_of(caplog).startswith("Queue: 3 batches in ")


def test_waits_for_producers_that_still_start_do_not_count_although_there_were_batches(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    late = Producer(target="producing:produce_late", args={"partition": "train", "count": 8, "start_s": 2.0})
    dm = data(train=stream("train", num_batches=4), producers=[late])
    dm.client.put(rows(8), partition_id="train")
    with caplog.at_level(logging.INFO):
        trainer().fit(Recorder(), datamodule=dm)
    found = re.search(r"the first one after [\d.]+ s, then [\d.]+ s more while producers started; ", report_of(caplog))
    assert found is not None


class InterruptsWhen(logging.Handler):
    """Interrupts this process when a message has this text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            os.kill(os.getpid(), signal.SIGINT)


def test_a_wait_when_all_producers_had_ended_is_no_slow_generation(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    made = Producer(target="producing:produce", args={"partition": "train", "count": 8, "seal": False})
    dm = TQDataModule(train=stream("train"), queue={"units": 1}, producers=[made])
    interrupts, logger = InterruptsWhen("All producers of this run have ended"), logging.getLogger("lightning_tq")
    logger.addHandler(interrupts)
    try:
        with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
            trainer().fit(Recorder(), datamodule=dm)
    finally:
        logger.removeHandler(interrupts)
    dm.close()
    assert re.search(r" Then it waited \d+ s, when all its producers had ended\.$", report_of(caplog))


class SlowProducer(Callback):
    """Makes batch k + 1 well after step k."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        client, version = trainer.datamodule.client, trainer.global_step
        tags = [{"policy_version": version}] * 4
        threading.Timer(0.5, lambda: client.put(rows(4), partition_id="train", tags=tags)).start()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "Add producers (Producer(count=...)) or make them faster."),
        (
            {"prefetch": False},
            "Add producers (Producer(count=...)) or make them faster, or set Stream(prefetch=True).",
        ),
    ],
    ids=["producers", "prefetch"],
)
def test_slow_generation_is_reported_with_what_helps(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, options: dict[str, Any], advice: str
) -> None:
    dm = data(train=stream("train", num_batches=4, **options))
    dm.client.put(rows(4), partition_id="train", tags=[{"policy_version": 0}] * 4)
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[SlowProducer()]).fit(Recorder(), datamodule=dm)
    text = report_of(caplog)
    assert text.startswith("Queue: 4 batches in ")
    assert "generation was the bottleneck: it took " in text
    assert text.endswith(advice)
    threads = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    for each in threads:
        each.join()


class Plain(Recorder):
    """Trains plain tensors."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).mean()
        return loss


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, about the other data
def test_a_later_fit_of_the_same_trainer_may_use_other_data(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 8)
    run = trainer()
    run.fit(Recorder(), datamodule=dm)
    run.fit_loop.max_epochs = 2
    run.fit(Plain(), train_dataloaders=DataLoader(torch.ones(4, 4), batch_size=2))
    assert run.global_step == 4


def test_a_fit_that_trains_nothing_reports_nothing(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train", tail="drop"))
    fill(dm.client, "train", 3)
    with caplog.at_level(logging.INFO):
        trainer().fit(Recorder(), datamodule=dm)
    assert "bottleneck" not in caplog.text
