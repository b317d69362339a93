# SPDX-License-Identifier: Apache-2.0
"""With any option, a Trainer trains exactly the expected samples, in order and without warnings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from producing import fill, rows
from recorders import Recorder

from lightning_tq import TQDataModule
from tests.lightning.conftest import stream
from transfer_queue import ConfigError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
TRAIN_ROWS, VAL_ROWS = 40, 8
EPOCH_ROWS = 16


def upto(*rows: int) -> list[int]:
    """Row numbers from 0 up to each of these counts, one count per partition that is read."""
    return [row for count in rows for row in range(count)]


@dataclass(frozen=True)
class Case:
    """Options, and the rows that are trained and validated with them.

    "train" has 40 rows, "train@0" and so on 16 each, "val" 8; batches have 4. Rows are numbered by partition.
    """

    name: str
    options: dict[str, Any]
    train: list[int]
    val: list[int] = field(default_factory=list)
    steps: int | None = None
    """Optimizer steps. Default: a step per batch."""
    stream: dict[str, Any] = field(default_factory=dict)
    by_epoch: bool = False
    """Read "train@{epoch}"."""


CASES = [
    Case("limit_train_batches", {"limit_train_batches": 3, "max_epochs": 2}, upto(24), val=upto(8, 8)),
    Case("limit_val_batches", {"limit_val_batches": 1, "max_epochs": 2}, upto(40), val=upto(4)),
    Case("limits by epoch", {"limit_train_batches": 3, "max_epochs": 2}, upto(12, 12), val=upto(8, 8), by_epoch=True),
    Case("no validation", {"limit_val_batches": 0}, upto(40)),
    Case("max_steps", {"max_steps": 5, "max_epochs": -1}, upto(20)),
    Case("max_steps over epochs", {"max_steps": 6, "max_epochs": -1}, upto(16, 8), val=upto(8), by_epoch=True),
    Case("max_steps of all", {"max_steps": 10, "max_epochs": -1}, upto(40)),
    Case(
        "max_steps and accumulation",
        {"max_steps": 2, "max_epochs": -1, "accumulate_grad_batches": 3},
        upto(24),
        steps=2,
    ),
    Case("max_epochs", {"max_epochs": 3}, upto(16, 16, 16), val=upto(8, 8, 8), by_epoch=True),
    Case("int interval", {"val_check_interval": 4}, upto(40), val=upto(8, 8, 8)),  # and at the end of the stream
    Case("float interval", {"val_check_interval": 0.5}, upto(40), val=upto(8, 8), stream={"num_batches": 10}),
    Case(
        "interval over epochs",
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2},
        upto(16, 16),
        val=upto(8, 8),
        by_epoch=True,
    ),
    Case(
        "every second epoch",
        {"check_val_every_n_epoch": 2, "max_epochs": 3},
        upto(16, 16, 16),
        val=upto(8),
        by_epoch=True,
    ),
    Case("sanity check", {"num_sanity_val_steps": 1}, upto(40), val=upto(4, 8)),
    Case("whole sanity check", {"num_sanity_val_steps": -1}, upto(40), val=upto(8, 8)),
    Case("fast_dev_run", {"fast_dev_run": True}, upto(4), val=upto(4)),
    Case("fast_dev_run of 3", {"fast_dev_run": 3}, upto(12), val=upto(8)),
    Case("overfit_batches", {"overfit_batches": 2, "max_epochs": 3}, upto(8, 8, 8), val=upto(8, 8, 8)),
    Case("overfit by epoch", {"overfit_batches": 2, "max_epochs": 2}, upto(8, 8), val=upto(8, 8), by_epoch=True),
    Case("accumulation", {"accumulate_grad_batches": 3}, upto(40), val=upto(8), steps=4),
    Case(
        "accumulation of limited", {"accumulate_grad_batches": 3, "limit_train_batches": 5}, upto(20), upto(8), steps=2
    ),
    Case(
        "accumulation of micro-batches", {"accumulate_grad_batches": 2}, upto(40), upto(8), 10, {"micro_batch_size": 2}
    ),
    Case(
        "reloading", {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, upto(16, 16), upto(8, 8), by_epoch=True
    ),
    Case("length", {"max_epochs": 2}, upto(24), val=upto(8, 8), stream={"num_batches": 3}),
    Case("workers", {}, upto(40), val=upto(8), stream={"num_workers": 2}),
    Case(
        "persistent workers and pinned memory",
        {"max_epochs": 2, "use_distributed_sampler": True},
        upto(16, 16),
        val=upto(8, 8),
        stream={"num_workers": 2, "persistent_workers": True, "pin_memory": True},
        by_epoch=True,
    ),
    Case("pinned memory without workers", {}, upto(40), val=upto(8), stream={"pin_memory": True}),
    Case("detect_anomaly and inference_mode", {"detect_anomaly": True, "inference_mode": False}, upto(40), upto(8)),
    Case("gradient clipping", {"gradient_clip_val": 0.1, "profiler": "simple"}, upto(40), val=upto(8)),
]


class Loaders(Callback):
    """Records the loaders that the Trainer was given and those it uses."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.used: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        own = trainer.datamodule.train_dataloader

        def recording() -> Any:
            self.given.append(own())
            return self.given[-1]

        trainer.datamodule.train_dataloader = recording

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.used.append(trainer.train_dataloader)


def numbers(model: Recorder, stage: str, partitions: dict[str, list[int]]) -> list[int]:
    """Rows that the model got, by their number in their partition."""
    return [partitions[name].index(index) for name, batch in model.seen[stage] for index in batch]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_options_use_exactly_the_expected_samples_without_a_warning(
    case: Case, data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    name = "train@{epoch}" if case.by_epoch else "train"
    dm = data(train=stream(name, **case.stream), val=stream("val", task="evaluate"))
    sizes = {"train": TRAIN_ROWS, "val": VAL_ROWS}
    if case.by_epoch:
        sizes = {"val": VAL_ROWS, **{f"train@{epoch}": EPOCH_ROWS for epoch in range(3)}}
    partitions = {name: fill(dm.client, name, count) for name, count in sizes.items()}
    model = Recorder()
    with caplog.at_level(logging.WARNING):
        run = trainer(**{"num_sanity_val_steps": 0, **case.options})
        run.fit(model, datamodule=dm)
    assert numbers(model, "train", partitions) == case.train
    assert numbers(model, "val", partitions) == case.val
    assert run.global_step == (len(model.seen["train"]) if case.steps is None else case.steps)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_loader_is_used_unchanged(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{epoch}"))
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 8)
    loaders = Loaders()
    trainer(max_epochs=2, use_distributed_sampler=True, callbacks=[loaders]).fit(Recorder(), datamodule=dm)
    assert len(loaders.given) == 1
    assert all(used is loaders.given[0] for used in loaders.used)


def test_a_model_without_a_validation_step_causes_no_warning(data: Make, trainer: MakeTrainer) -> None:
    class OnlyTrains(Recorder):
        validation_step = LightningModule.validation_step

    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 8)
    model = OnlyTrains()
    trainer().fit(model, datamodule=dm)
    assert model.indexes() == indexes


def test_samples_left_by_max_time_are_trained_by_the_next_fit(data: Make, trainer: MakeTrainer) -> None:
    class Slow(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            threading.Event().wait(0.05)
            return super().training_step(batch, batch_idx)

    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", TRAIN_ROWS)
    model = Slow()
    trainer(max_time=timedelta(seconds=0.3), max_epochs=-1).fit(model, datamodule=dm)
    assert 0 < len(model.indexes()) < TRAIN_ROWS
    trainer().fit(model, datamodule=dm)
    assert model.indexes() == indexes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val_check_interval": 0.5}, r"val_check_interval=0.5\) is a share of an epoch.*stream 'train'.*num_batches"),
        ({"limit_train_batches": 0.5}, r"limit_train_batches=0.5\) is a share.*stream 'train'"),
        ({"limit_val_batches": 0.5}, r"limit_val_batches=0.5\) is a share.*stream 'val'"),
    ],
)
def test_a_share_of_an_unknown_length_is_refused(
    data: Make, trainer: MakeTrainer, options: dict[str, float], says: str
) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    with pytest.raises(ConfigError, match=says):
        trainer(**options, num_sanity_val_steps=0).fit(Recorder(), datamodule=dm)


def test_a_share_of_a_limit_is_none_of_an_unknown_length(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    _, val = fill(dm.client, "train", 16), fill(dm.client, "val", 4)
    model = Recorder()
    run = trainer(limit_train_batches=4, val_check_interval=0.5, num_sanity_val_steps=0)
    run.fit(model, datamodule=dm)
    assert model.indexes("val") == val * 2


# ---- the last step ----


def test_training_ends_at_max_steps_although_no_other_batch_comes(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    indexes = list(dm.client.put(rows(16), partition_id="train").global_indexes)  # not sealed
    model, run = Recorder(), trainer(max_steps=4, max_epochs=-1, num_sanity_val_steps=0)
    run.fit(model, datamodule=dm)
    assert (model.indexes(), run.global_step, model.indexes("val")) == (indexes, 4, [])
    more = fill(dm.client, "train", 8)
    fill(dm.client, "val", 4)
    trainer().fit(model, datamodule=dm)
    assert model.indexes() == indexes + more


def test_a_callback_may_raise_max_steps_at_the_last_step(data: Make, trainer: MakeTrainer) -> None:
    class Longer(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.fit_loop.epoch_loop.max_steps = 4

    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", TRAIN_ROWS)
    model = Recorder()
    trainer(max_steps=2, max_epochs=-1, callbacks=[Longer()]).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:16]


def test_neither_advertisements_nor_warnings_of_lightnings_own_code_are_shown(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 8)
    with caplog.at_level(logging.INFO):
        trainer(enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    assert "GPU available" in caplog.text  # messages of the same logger
    assert "Tip" not in caplog.text


# ---- entry points ----


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"micro_batch_size": 2}], ids=["thread", "workers", "micro"]
)
def test_other_entry_points_read_all_of_their_partition_each_time(
    data: Make, trainer: MakeTrainer, entry: str, options: dict[str, Any]
) -> None:
    stage = {"validate": "val"}.get(entry, entry)
    dm = data(**{stage: stream("samples", task="examine", **options)})
    indexes = fill(dm.client, "samples", 10)
    model, run = Recorder(), trainer()
    results = [getattr(run, entry)(model, datamodule=dm) for _ in range(2)]
    assert model.indexes(stage) == indexes * 2
    if entry == "predict":
        assert [[index for batch in result for index in batch] for result in results] == [indexes, indexes]
    else:
        assert [result[0][f"{stage}_mean"] for result in results] == [4.5, 4.5]  # by rows: batches of 4, 4 and 2


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_limits_hold_for_other_entry_points(data: Make, trainer: MakeTrainer, entry: str) -> None:
    stage = {"validate": "val"}.get(entry, entry)
    dm = data(**{stage: stream("samples", task="examine")})
    indexes = fill(dm.client, "samples", 40)
    model = Recorder()
    getattr(trainer(**{f"limit_{stage}_batches": 3}), entry)(model, datamodule=dm)
    assert model.indexes(stage) == indexes[:12]


def test_one_trainer_fits_validates_tests_and_predicts_on_one_queue(data: Make, trainer: MakeTrainer) -> None:
    names = ("train", "val", "test", "predict")
    dm = data(**{name: stream(name, task=name) for name in names})
    indexes = {name: fill(dm.client, name, 8) for name in names}
    model, run = Recorder(), trainer(num_sanity_val_steps=0)
    for entry in ("fit", "validate", "test", "predict"):
        getattr(run, entry)(model, datamodule=dm)
    assert {name: model.indexes(name) for name in names} == {**indexes, "val": indexes["val"] * 2}


def test_logged_values_are_weighted_by_rows(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    fill(dm.client, "train", 10)  # batches of 4, 4 and 2
    fill(dm.client, "val", 6)
    run = trainer(num_sanity_val_steps=0)
    run.fit(Recorder(), datamodule=dm)
    assert float(run.callback_metrics["rows_mean"]) == 4.5
    assert float(run.callback_metrics["val_mean"]) == 2.5
