# SPDX-License-Identifier: Apache-2.0
"""Lightning's own callbacks work with a stream: samples are trained once, and progress bars show the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.tuner import Tuner
from producing import fill, rows
from recorders import Recorder
from tqdm import tqdm

import transfer_queue as tq
from lightning_tq import PartitionSwitch, QueueMonitor, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
TRAIN_ROWS, VAL_ROWS, EPOCH_ROWS = 40, 8, 16


@pytest.fixture
def a_queue() -> Iterator[tq.TransferQueueClient]:
    """A queue that outlives a failed fit."""
    tq.init()
    yield tq.get_client()
    tq.close()


def test_checkpoints_every_few_steps_hold_the_position_after_their_step(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", TRAIN_ROWS)
    model = Recorder()
    keeps = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer(callbacks=[keeps], enable_checkpointing=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes
    saved = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert saved == ["step=4.ckpt", "step=8.ckpt"]
    states = [torch.load(tmp_path / "kept" / name, weights_only=True)["TQDataModule"] for name in saved]
    assert [state["positions"]["train"]["batch_index"] for state in states] == [4, 8]


# Warnings of Lightning about resuming that don't concern the data.
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning", "ignore:Be aware that when using:UserWarning")
@pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning", "ignore:.*ckpt_path=.last.:UserWarning")
@pytest.mark.parametrize("kind", ["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_a_checkpoint_on_an_exception_resumes_where_training_failed(
    trainer: MakeTrainer, tmp_path: Path, a_queue: Any, kind: str
) -> None:
    kept = tmp_path / "kept"
    keeps: Callback = OnExceptionCheckpoint(kept, filename="failed")
    if kind == "ModelCheckpoint":
        keeps = ModelCheckpoint(kept, filename="{step}", every_n_train_steps=100, save_on_exception=True)
    dm = TQDataModule(train=stream("train"))
    indexes = fill(a_queue, "train", TRAIN_ROWS)
    first, second = Recorder(fail_at=5), Recorder()
    with pytest.raises(ValueError, match="failed on request"):
        trainer(callbacks=[keeps], enable_checkpointing=True).fit(first, datamodule=dm)
    (saved,) = kept.iterdir()
    trainer().fit(second, datamodule=dm, ckpt_path=saved)
    assert first.indexes() == indexes[:24]  # the sixth batch was delivered and not trained
    assert second.indexes() == indexes[20:]
    dm.close()


def test_early_stopping_ends_after_an_epoch_without_improvement(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val", task="evaluate"))
    train = [fill(dm.client, f"train@{epoch}", EPOCH_ROWS) for epoch in range(4)]
    fill(dm.client, "val", VAL_ROWS)
    model = Recorder()
    stopping = EarlyStopping("val_mean", patience=1)  # val_mean never changes
    trainer(max_epochs=4, num_sanity_val_steps=0, callbacks=[stopping]).fit(model, datamodule=dm)
    assert model.indexes() == train[0] + train[1]


def test_early_stopping_in_an_epoch_leaves_the_batch_fetched_ahead_to_the_next_fit(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    train, _ = fill(dm.client, "train", TRAIN_ROWS), fill(dm.client, "val", VAL_ROWS)
    model = Recorder()
    stopping = EarlyStopping("val_mean", patience=1)
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer(callbacks=[stopping], **options).fit(model, datamodule=dm)
    assert model.indexes() == train[:16]
    trainer(**options).fit(model, datamodule=dm)
    assert model.indexes() == train


@pytest.mark.parametrize("num_batches", [None, 10], ids=["unknown length", "known length"])
@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_progress_bars_show_samples_ready_wait_and_staleness(
    data: Make, trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bar: str,
    num_batches: int | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would remain
    shown: Callback = TQDMProgressBar(refresh_rate=1)
    if bar == "rich":
        shown = RichProgressBar(refresh_rate=1, console_kwargs={"force_terminal": True, "width": 200})
    dm = data(train=stream("train", num_batches=num_batches), val=stream("val", task="evaluate"))
    tags = [{"policy_version": 0}] * TRAIN_ROWS
    indexes = list(dm.client.put(rows(TRAIN_ROWS), partition_id="train", tags=tags).global_indexes)
    dm.client.seal_partition("train")
    fill(dm.client, "val", VAL_ROWS)
    model = Recorder()
    trainer(enable_progress_bar=True, callbacks=[shown, QueueMonitor()]).fit(model, datamodule=dm)
    assert model.indexes() == indexes
    written = capsys.readouterr()
    text = written.out + written.err
    assert [name for name in ("ready", "wait_s", "stale") if name not in text] == []
    assert "queue/" not in text
    assert ("10/10" if num_batches else {"tqdm": "10/?", "rich": "10/--"}[bar]) in text


@pytest.mark.parametrize("finder", [BatchSizeFinder(), LearningRateFinder()])
def test_callbacks_that_use_up_samples_are_refused(data: Make, trainer: MakeTrainer, finder: Callback) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", TRAIN_ROWS)
    model = Recorder()
    with pytest.raises(
        InvalidRequestError, match=f"{type(finder).__name__} tries settings on batches, .* use up samples of the queue"
    ):
        trainer(callbacks=[finder]).fit(model, datamodule=dm)
    assert model.indexes() == []


@pytest.mark.parametrize("tune", ["lr_find", "scale_batch_size"])
def test_a_tuner_is_refused_before_the_run_and_takes_nothing_from_the_fit_that_follows(
    data: Make, trainer: MakeTrainer, tune: str
) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", TRAIN_ROWS)
    model, fitted = Recorder(), trainer()
    with pytest.raises(InvalidRequestError, match="use up samples of the queue"):
        getattr(Tuner(fitted), tune)(model, datamodule=dm)
    fitted.fit(model, datamodule=dm)
    assert model.indexes() == indexes


def test_everything_at_once(data: Make, trainer: MakeTrainer, tmp_path: Path) -> None:
    dm = data(
        train=stream("train@{epoch}", micro_batch_size=2, num_workers=2, persistent_workers=True),
        val=[stream("val@{global_step}", task="a"), stream("val", task="b")],
    )
    train = [fill(dm.client, f"train@{epoch}", EPOCH_ROWS) for epoch in range(2)]
    val = {name: fill(dm.client, name, 4) for name in ("val@2", "val@4", "val@6", "val@8", "val")}
    model = Recorder()
    keeps = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_last=True)
    run = trainer(
        max_epochs=2, val_check_interval=4, accumulate_grad_batches=2, num_sanity_val_steps=0,
        callbacks=[PartitionSwitch(), QueueMonitor(), keeps], enable_checkpointing=True,
    )  # fmt: skip
    run.fit(model, datamodule=dm)
    assert (model.indexes(), run.global_step) == (train[0] + train[1], 8)
    assert model.indexes("val") == [i for step in (2, 4, 6, 8) for i in val[f"val@{step}"] + val["val"]]
