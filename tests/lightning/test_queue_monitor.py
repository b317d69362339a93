# SPDX-License-Identifier: Apache-2.0
"""QueueMonitor: values show whether training or generation is slow, and exclude validation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from producing import fill, rows
from recorders import Recorder
from torch.utils.data import DataLoader

from lightning_tq import QueueMonitor, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Slow(Recorder):
    """Steps of a given duration."""

    def __init__(self, train_s: float = 0.0, val_s: float = 0.0) -> None:
        super().__init__()
        self.train_s, self.val_s = train_s, val_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        threading.Event().wait(self.train_s)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        threading.Event().wait(self.val_s)
        super().validation_step(batch, batch_idx)


class Logged(Callback):
    """What was logged after each batch."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("queue/")}
        self.values.append(found)


def test_slow_training_shows_samples_ready_and_no_waiting(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=5, prefetch=False))
    fill(dm.client, "train", 40)
    logged = Logged()
    trainer(callbacks=[QueueMonitor(), logged]).fit(Slow(train_s=0.1), datamodule=dm)
    assert [values["queue/ready"] for values in logged.values] == [36.0, 32.0, 28.0, 24.0, 20.0]
    assert [values["queue/in_flight"] for values in logged.values] == [0.0] * 5
    assert all(values["queue/starved"] < 0.5 for values in logged.values)


def test_slow_generation_shows_waiting_and_nothing_ready(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=3))

    def produce() -> None:
        for _ in range(3):
            threading.Event().wait(0.3)
            dm.client.put(rows(4), partition_id="train")

    producer, logged = threading.Thread(target=produce), Logged()
    producer.start()
    trainer(callbacks=[QueueMonitor(), logged]).fit(Slow(), datamodule=dm)
    producer.join()
    last = logged.values[-1]
    assert (last["queue/ready"], last["queue/in_flight"]) == (0.0, 0.0)
    assert 0.1 < last["queue/wait_s"] < 2.0
    assert last["queue/starved"] > 0.5


def test_values_come_every_n_batches_and_exclude_validation(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=4, prefetch=False), val=stream("val", task="evaluate"))
    fill(dm.client, "train", 16)
    fill(dm.client, "val", 4)
    logged = Logged()
    run = trainer(callbacks=[QueueMonitor(every_n_steps=2), logged], val_check_interval=1, num_sanity_val_steps=0)
    run.fit(Slow(train_s=0.1, val_s=1.0), datamodule=dm)
    # A ready batch takes a visible share of a 0.1 s step. With the seconds of validation counted, it would not.
    assert [values.get("queue/ready") for values in logged.values] == [None, 8.0, 8.0, 0.0]
    assert all(values["queue/wait_s"] < 0.1 for values in logged.values[1:])
    assert logged.values[3]["queue/starved"] > logged.values[3]["queue/wait_s"] * 2 / 1.0


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="every_n_steps must be an int of at least 1, got 0"):
        QueueMonitor(every_n_steps=0)


def test_the_progress_bar_shows_three_short_names(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=2, prefetch=False))
    dm.client.put(rows(40), partition_id="train", tags=[{"policy_version": -3}] * 40)
    run = trainer(callbacks=[QueueMonitor()])
    run.fit(Slow(), datamodule=dm)
    assert set(run.progress_bar_metrics) == {"ready", "wait_s", "stale"}
    assert (run.progress_bar_metrics["ready"], run.progress_bar_metrics["stale"]) == (32.0, 4.0)
    assert run.logged_metrics["queue/staleness"] == 4.0
    assert not {"ready", "wait_s", "stale"} & set(run.logged_metrics)


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_a_batch_that_a_hook_replaced_has_no_staleness(data: Make, trainer: MakeTrainer) -> None:
    class OnlyData(Recorder):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0]["x"]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).mean()
            return loss

    dm = data(train=stream("train", num_batches=2))
    dm.client.put(rows(8), partition_id="train", tags=[{"policy_version": 0}] * 8)
    run = trainer(callbacks=[QueueMonitor()])
    run.fit(OnlyData(), datamodule=dm)
    assert "queue/ready" in run.logged_metrics
    assert "queue/staleness" not in run.logged_metrics


@pytest.mark.parametrize("kind", [list, dict])
def test_the_staleness_of_a_batch_among_those_of_other_loaders_is_logged(
    data: Make, trainer: MakeTrainer, kind: type
) -> None:
    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["rl"] if kind is dict else batch[1], batch_idx)

    dm = data(train=stream("train", num_batches=2))
    dm.client.put(rows(8), partition_id="train", tags=[{"policy_version": -3}] * 8)
    own = dm.train_dataloader

    def both() -> CombinedLoader:
        other = DataLoader(range(8), batch_size=4)
        return CombinedLoader({"sft": other, "rl": own()} if kind is dict else [other, own()], "min_size")

    dm.train_dataloader = both
    logged = Logged()
    trainer(callbacks=[QueueMonitor(), logged]).fit(Both(), datamodule=dm)
    assert [values["queue/staleness"] for values in logged.values] == [3.0, 4.0]
