# SPDX-License-Identifier: Apache-2.0
"""Trained batches are acknowledged after their step or checkpoint, and samples that no task needs are deleted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import PartitionSwitch, TQCheckpoint, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue.errors import ConfigError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
State = tuple[int, int, int]


class Watched(Callback):
    """Records (acknowledged batches, batches in flight, samples) of a partition at the start of each training batch."""

    def __init__(self, dm: TQDataModule, partition: str = "train") -> None:
        self.dm = dm
        self.partition = partition
        self.seen: list[State] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(state(self.dm, self.partition))


def state(dm: TQDataModule, partition: str = "train", task: str = "learn") -> State:
    found = dm.client.get_stats()["partitions"][partition]
    return found["tasks"][task]["settled"], found["tasks"][task]["in_flight"], found["samples"]


def test_without_checkpoints_a_batch_is_acknowledged_at_the_end_of_its_step(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", micro_batch_size=2, prefetch=False))
    fill(dm.client, "train", 16)
    watched = Watched(dm)
    trainer(callbacks=[watched]).fit(Recorder(), datamodule=dm)
    # Micro-batches of 2 in batches of 4; Lightning fetches one ahead.
    assert [acked for acked, _, _ in watched.seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert state(dm) == (4, 0, 16)


def test_an_accumulated_batch_is_acknowledged_with_the_step_that_takes_it(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 28)
    watched = Watched(dm)
    trainer(callbacks=[watched], accumulate_grad_batches=3).fit(Recorder(), datamodule=dm)
    assert [acked for acked, _, _ in watched.seen] == [0, 0, 0, 3, 3, 3, 6]
    assert state(dm) == (7, 0, 28)


class Manual(Recorder):
    """Uses manual optimization, with a step after each of these batches (counted from 0)."""

    def __init__(self, steps_after: set[int], fail_at: int | None = None) -> None:
        super().__init__(fail_at=fail_at)
        self.automatic_optimization = False
        self.steps_after = steps_after

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx in self.steps_after:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_a_batch_is_acknowledged_with_a_step_of_manual_optimization(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 24)
    watched = Watched(dm)
    trainer(callbacks=[watched]).fit(Manual(steps_after={0, 3}), datamodule=dm)
    assert [acked for acked, _, _ in watched.seen] == [0, 1, 1, 1, 4, 4]
    assert state(dm) == (6, 0, 24)  # gradients of the last two batches are lost with the epoch


def test_batches_without_a_manual_step_are_trained_again_after_a_resume(trainer: MakeTrainer, tmp_path: Path) -> None:
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    indexes = fill(tq.get_client(), "train", 32)
    fitted = trainer()
    with pytest.raises(ValueError, match="failed on request"):
        fitted.fit(Manual(steps_after={3, 7}, fail_at=6), datamodule=TQDataModule(train=stream("train")))
    fitted.save_checkpoint(tmp_path / "failed.ckpt")
    model = Manual(steps_after={3, 7})
    trainer().fit(model, datamodule=TQDataModule(train=stream("train")), ckpt_path=tmp_path / "failed.ckpt")
    assert model.indexes() == indexes[16:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["thread", "workers"])
def test_with_checkpoints_a_batch_is_acknowledged_when_one_holds_it(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    dm = data(train=stream("train", **options))
    fill(dm.client, "train", 32)
    watched = Watched(dm)
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3)
    trainer(callbacks=[watched, saves], enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    assert [acked for acked, _, _ in watched.seen] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert state(dm) == (6, 2, 32)


def test_never_acknowledges_nothing(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), ack="never")
    fill(dm.client, "train", 12)
    trainer().fit(Recorder(), datamodule=dm)
    assert state(dm) == (0, 3, 12)


def test_step_acknowledges_at_the_step_whatever_is_saved(data: Make, trainer: MakeTrainer, tmp_path: Path) -> None:
    dm = data(train=stream("train"), ack="step")
    fill(dm.client, "train", 20)
    watched = Watched(dm)
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2)
    trainer(callbacks=[watched, saves], enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    assert [acked for acked, _, _ in watched.seen] == [0, 1, 2, 3, 4]


def test_from_the_first_checkpoint_that_is_saved_by_hand_batches_wait_for_the_next(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step in (2, 4):
                trainer.save_checkpoint(tmp_path / "by hand.ckpt")

    dm = data(train=stream("train"))
    fill(dm.client, "train", 20)
    watched = Watched(dm)
    trainer(callbacks=[watched, Save()]).fit(Recorder(), datamodule=dm)
    assert [acked for acked, _, _ in watched.seen] == [0, 1, 2, 2, 4]


def test_replayed_batches_are_not_acknowledged(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", replay=True), val=stream("val", task="evaluate"))
    indexes, val = fill(dm.client, "train", 8), fill(dm.client, "val", 4)
    model = Recorder()
    trainer(max_epochs=2).fit(model, datamodule=dm)
    assert model.indexes() == indexes * 2
    assert model.indexes("val") == val * 3  # including the sanity check
    assert (state(dm), state(dm, "val", "evaluate")) == ((0, 2, 8), (0, 1, 4))


def test_a_fit_without_a_checkpoint_starts_after_the_acknowledged_batches(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    trainer(max_steps=3).fit(Recorder(), datamodule=dm)
    model = Recorder()
    trainer().fit(model, datamodule=TQDataModule(train=stream("train")))
    assert model.indexes() == indexes[12:]


@pytest.mark.parametrize("workers", [0, 2])
def test_consumed_samples_of_an_endless_partition_are_cleared(data: Make, trainer: MakeTrainer, workers: int) -> None:
    dm = data(train=stream("train", clear_consumed=True, num_workers=workers))
    indexes = fill(dm.client, "train", 80)
    watched, model = Watched(dm), Recorder()
    trainer(callbacks=[watched]).fit(model, datamodule=dm)
    assert model.indexes() == indexes
    assert [held for _, _, held in watched.seen] == list(range(80, 0, -4))
    assert state(dm) == (20, 0, 0)
    assert [(unit["samples"], unit["live_nbytes"]) for unit in dm.client.get_storage_stats()] == [(0, 0)]


def test_samples_that_another_task_still_reads_stay(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", clear_consumed=["judge"]))
    fill(dm.client, "train", 8)
    trainer().fit(Recorder(), datamodule=dm)
    assert state(dm) == (2, 0, 8)  # the other task has not started
    dm.client.get_meta(["x"], 4, "train", task_name="judge")
    assert dm.client.clear_consumed("train", ["learn", "judge"]) == 4


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_samples_after_the_last_checkpoint_stay_when_consumed_ones_are_cleared(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train", clear_consumed=True))
    indexes = fill(dm.client, "train", 32)
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3)
    trainer(callbacks=[saves], enable_checkpointing=True, max_steps=5).fit(Recorder(), datamodule=dm)
    assert state(dm)[2] == 20
    model = Recorder()
    other = TQDataModule(train=stream("train", clear_consumed=True))
    again = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3)
    resumed = trainer(callbacks=[again], enable_checkpointing=True)
    resumed.fit(model, datamodule=other, ckpt_path=saves.best_model_path)
    assert model.indexes() == indexes[12:]


@pytest.mark.parametrize(
    ("ack", "asynchronous", "first"),
    [
        *((ack, False, [0, 0, 0, 1, 1, 1, 2, 2]) for ack in ("auto", "checkpoint", "step", "never")),
        ("auto", True, [0, 0, 0, 0, 0, 0, 1, 1]),  # one checkpoint later, when all files of theirs are surely complete
    ],
)
def test_finished_partitions_are_cleared_after_the_next_checkpoint_whatever_is_acknowledged(
    data: Make, trainer: MakeTrainer, tmp_path: Path, ack: str, asynchronous: bool, first: list[int]
) -> None:
    dm = data(train=stream("train@{epoch}"), ack=ack)
    for epoch in range(4):
        fill(dm.client, f"train@{epoch}", 8)
    there: list[list[str]] = []

    class Record(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            there.append(dm.client.get_partition_list())

    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_last=True)
    callbacks = [PartitionSwitch(), Record(), saves, *([TQCheckpoint(asynchronous=True)] if asynchronous else [])]
    trainer(max_epochs=4, callbacks=callbacks, enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    # Saved after batches 3 and 6, which are the first of epoch 1 and the second of epoch 2.
    assert [next(int(name[-1]) for name in names) for names in there] == first


@pytest.mark.parametrize("ack", ["auto", "step", "never"])
def test_finished_partitions_wait_for_the_next_checkpoint_once_one_was_saved_by_hand(
    data: Make, trainer: MakeTrainer, tmp_path: Path, ack: str
) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step in (3, 7):
                trainer.save_checkpoint(tmp_path / "by hand.ckpt")
            there.append(dm.client.get_partition_list()[0])

    dm = data(train=stream("train@{epoch}"), ack=ack)
    for epoch in range(4):
        fill(dm.client, f"train@{epoch}", 8)
    there: list[str] = []
    trainer(max_epochs=4, callbacks=[PartitionSwitch(), Save()]).fit(Recorder(), datamodule=dm)
    assert [int(name[-1]) for name in there] == [0, 0, 1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("ack", "callbacks", "is_refused"),
    [
        ("auto", [], True),
        ("never", [PartitionSwitch()], True),
        ("never", [TQCheckpoint(asynchronous=True)], True),
        ("never", [PartitionSwitch(clear_finished=False)], False),
    ],
)
def test_samples_don_t_wait_for_checkpoints_that_nobody_knows_to_be_written(
    data: Make, trainer: MakeTrainer, tmp_path: Path, ack: str, callbacks: list[Callback], is_refused: bool
) -> None:
    dm, model = data(train=stream("train"), ack=ack), Recorder()
    indexes = fill(dm.client, "train", 8)
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1)
    fitted = trainer(callbacks=[saves, *callbacks], plugins=[AsyncCheckpointIO()], enable_checkpointing=True)
    with pytest.raises(ConfigError, match="AsyncCheckpointIO") if is_refused else nullcontext():
        fitted.fit(model, datamodule=dm)
    assert dm.client.get_stats()["partitions"]["train"]["samples"] == 8, "a refused fit leaves the queue open"
    assert model.indexes() == ([] if is_refused else indexes)


def test_contradicting_clear_and_ack_options_are_refused() -> None:
    with pytest.raises(ValueError, match="clear_consumed can't delete them"):
        stream("train", clear_consumed=True, replay=True)
    with pytest.raises(ValueError, match="clear_consumed must be true, false or a list of tasks"):
        stream("train", clear_consumed="judge")
    with pytest.raises(ValueError, match="ack must be one of 'auto', 'checkpoint', 'step', 'never', got 'always'"):
        TQDataModule(train=stream("train"), ack="always")  # type: ignore[arg-type]
