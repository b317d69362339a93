# SPDX-License-Identifier: Apache-2.0
"""A run in a bounded queue doesn't stand still because the next checkpoint is further away than the queue is large."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from producing import rows
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import PartitionSwitch, Stream, TQCheckpoint, TQDataModule
from tests.lightning.conftest import stream

pytestmark = pytest.mark.programs

MakeTrainer = Callable[..., Trainer]
Indexes = list[int]


@contextmanager
def producer(puts: dict[str, int]) -> Iterator[Indexes]:
    """A client of its own puts so many times 4 rows into these partitions, one after the other, and seals them."""
    indexes: Indexes = []

    def put() -> None:
        for name, count in puts.items():
            for number in range(count):
                meta = tq.get_client().put(rows(4, start=4 * number), partition_id=name)
                indexes.extend(meta.global_indexes)
            tq.get_client().seal_partition(name)

    thread = threading.Thread(target=put)
    thread.start()
    yield indexes
    thread.join()


def start_queue(**storage: Any) -> None:
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1, **storage}}})


ROW_BYTES = 100
"""Fewer than a row has here."""
_A_DAY = timedelta(days=1)
PAIRS = tq.GroupSampler(groups=2, ahead=1)


@pytest.mark.parametrize("bound", [{"memory": 32 * ROW_BYTES}, {"total_storage_size": 32}], ids=["bytes", "samples"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in background"])
def test_a_checkpoint_is_saved_early_where_the_queue_would_be_full_before_the_next_one(
    trainer: MakeTrainer, tmp_path: Path, bound: dict[str, Any], asynchronous: bool
) -> None:
    start_queue(**bound)
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
    with producer({"train": 30}) as indexes:
        dm = TQDataModule(train=stream("train", clear_consumed=True))
        callbacks = [saves, TQCheckpoint(asynchronous=asynchronous)]
        trainer(callbacks=callbacks, enable_checkpointing=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes
    assert {path.name for path in (tmp_path / "kept").glob("last*")} == {"last-early.ckpt", "last-early.ckpt.tq"}


def test_a_trained_batch_frees_its_room_before_training_waits_for_the_batch_after_the_next(
    trainer: MakeTrainer,
) -> None:
    """Lightning fetches one batch ahead where the length is unknown."""
    start_queue(total_storage_size=8)
    model = Recorder()
    with producer({"train": 5}) as indexes:
        trainer().fit(model, datamodule=TQDataModule(train=stream("train", clear_consumed=True)))
    assert model.indexes() == indexes


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("partition", ["train", "train@{epoch}"])
@pytest.mark.parametrize("options", [{}, {"num_batches": 10}, {"num_workers": 1}], ids=["ahead", "length", "worker"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_resumes_from_an_early_checkpoint_as_if_it_had_not_stopped(
    trainer: MakeTrainer, tmp_path: Path, partition: str, options: dict[str, Any], accumulate: int
) -> None:
    start_queue(total_storage_size=48)
    names = {partition.format(epoch=epoch): 10 for epoch in range(3)} if "{" in partition else {"train": 30}
    made = stream(partition, clear_consumed=True, **options)
    once = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    first, second = Recorder(fail_at=22), Recorder()
    with producer(names) as indexes:
        saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
        callbacks = [saves, PartitionSwitch(clear_finished=False)]
        with pytest.raises(ValueError, match="failed on request"):
            trainer(callbacks=callbacks, **once).fit(first, datamodule=TQDataModule(train=made))
        saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
        resumed = trainer(callbacks=[saves], **once)
        resumed.fit(second, datamodule=TQDataModule(train=made), ckpt_path="last")
    again = len(first.indexes()) + len(second.indexes()) - len(indexes)
    assert 0 < again < 48, "what the early checkpoint doesn't hold is trained again"
    assert second.indexes() == indexes[len(first.indexes()) - again :]
    epochs = 3 if "{" in partition or "num_batches" in options else 1
    steps_of_epoch = -(-30 // epochs // accumulate)
    assert (resumed.global_step, resumed.current_epoch) == (epochs * steps_of_epoch, epochs)


def fails_after_save(trainer: Trainer, number: int) -> Trainer:
    """Training fails when this checkpoint is written, and nothing that it holds is acknowledged."""
    save, saves = trainer.save_checkpoint, iter(range(1, number + 1))

    def save_and_fail(*args: Any, **options: Any) -> None:
        save(*args, **options)
        if next(saves) == number:
            raise ValueError("failed on request")

    trainer.save_checkpoint = save_and_fail  # type: ignore[method-assign]
    return trainer


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_frees_the_room_of_what_its_checkpoint_holds_before_it_trains(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    start_queue(total_storage_size=48)
    once = {"enable_checkpointing": True}
    made = stream("train", clear_consumed=True)
    first, second = Recorder(), Recorder()
    with producer({"train": 30}) as indexes:
        saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
        with pytest.raises(ValueError, match="failed on request"):
            fails_after_save(trainer(callbacks=[saves], **once), 1).fit(first, datamodule=TQDataModule(train=made))
        held = tq.get_client().get_stats()["partitions"]["train"]["samples"]
        assert held == 48, "the queue is full, and half of it waits for an ack"
        saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
        trainer(callbacks=[saves], **once).fit(second, datamodule=TQDataModule(train=made), ckpt_path="last")
    assert [*first.indexes(), *second.indexes()] == indexes


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_frees_the_room_of_partitions_that_it_had_left(trainer: MakeTrainer, tmp_path: Path) -> None:
    start_queue()
    made = stream("train@{epoch}", clear_consumed=True)
    once = {"enable_checkpointing": True, "max_epochs": 2}
    first, second = Recorder(), Recorder()
    with producer({"train@0": 4, "train@1": 4}) as indexes:
        saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5)
        with pytest.raises(ValueError, match="failed on request"):
            fails_after_save(trainer(callbacks=[saves], **once), 1).fit(first, datamodule=TQDataModule(train=made))
        path = next((tmp_path / "kept").glob("*.ckpt"))
        trainer(callbacks=[ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5)], **once).fit(
            second, datamodule=TQDataModule(train=made), ckpt_path=path
        )
    assert [*first.indexes(), *second.indexes()] == indexes
    assert tq.get_client().get_stats()["partitions"]["train@0"]["samples"] == 0


@pytest.mark.parametrize(("steps", "ahead"), [(8, {"num_batches": 16}), (7, {})], ids=["length", "ahead"])
def test_a_distance_between_checkpoints_that_is_larger_than_the_queue_is_refused(
    trainer: MakeTrainer, tmp_path: Path, steps: int, ahead: dict[str, Any]
) -> None:
    start_queue(total_storage_size=32)
    dm = TQDataModule(train=stream("train", clear_consumed=True, **ahead))
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=steps + 1)
    text = (
        rf"every {steps} steps \(ModelCheckpoint\(every_n_train_steps={steps}\)\), acknowledge without a checkpoint "
        r"\(TQDataModule\(ack='step'\)\), or raise total_storage_size"
    )
    with pytest.raises(ValueError, match=text):
        trainer(callbacks=[saves], enable_checkpointing=True).fit(Recorder(), datamodule=dm)


@pytest.mark.parametrize("size", [40, 44, 56])
def test_a_checkpoint_is_saved_early_where_a_finished_partition_would_fill_the_queue(
    trainer: MakeTrainer, tmp_path: Path, size: int
) -> None:
    start_queue(total_storage_size=size)
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=17)
    with producer({f"train@{epoch}": 10 for epoch in range(3)}) as indexes:
        once = {"callbacks": [saves, PartitionSwitch()], "enable_checkpointing": True, "max_epochs": 3}
        trainer(**once).fit(model, datamodule=TQDataModule(train=stream("train@{epoch}")))
    assert model.indexes() == indexes
    assert (tmp_path / "kept" / "last-early.ckpt").exists()


def test_a_checkpoint_is_saved_early_where_trained_groups_that_wait_for_one_would_fill_the_queue(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    start_queue(total_storage_size=40)
    made = Stream(partition="train", task="learn", fields=["x", "text"], num_batches=10, sampler=PAIRS)
    dm = TQDataModule(train=made, ack="checkpoint")

    def work() -> None:
        client = tq.get_client()
        for number in range(20):
            client.add_groups({"prompt": torch.tensor([number])}, "train", tasks=["learn"])
            (lease,) = client.lease("train", timeout_s=120)
            lease.close(rows(3, start=3 * number))

    worker = threading.Thread(target=work)
    worker.start()
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
    trainer(callbacks=[saves], enable_checkpointing=True).fit(model, datamodule=dm)
    worker.join()
    assert [len(batch) for _, batch in model.seen["train"]] == [6] * 10
    assert (tmp_path / "kept" / "last-early.ckpt").exists()


def test_groups_that_can_not_wait_for_the_next_checkpoint_are_refused(trainer: MakeTrainer, tmp_path: Path) -> None:
    start_queue(total_storage_size=40)
    dm = TQDataModule(train=Stream(partition="train", task="learn", fields=["x", "text"], sampler=PAIRS))
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=10)
    with pytest.raises(ValueError, match="after 10 batches of at least 4 samples, but the queue holds 40"):
        trainer(callbacks=[saves], enable_checkpointing=True).fit(Recorder(), datamodule=dm)


@pytest.mark.parametrize("clears", [False, True])
def test_samples_that_a_finished_partition_never_gave_take_room_until_it_is_cleared(
    trainer: MakeTrainer, tmp_path: Path, clears: bool
) -> None:
    start_queue(total_storage_size=64)
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", train_time_interval=_A_DAY)
    with producer({f"train@{epoch}": 8 for epoch in range(5)}):
        once = {"callbacks": [saves, PartitionSwitch()], "enable_checkpointing": True, "max_epochs": 5}
        made = stream("train@{epoch}", clear_consumed=clears)
        trainer(limit_train_batches=2, **once).fit(model, datamodule=TQDataModule(train=made))
    assert model.partitions() == [f"train@{epoch}" for epoch in range(5)]


def test_a_batch_that_is_larger_than_the_queue_is_refused(trainer: MakeTrainer) -> None:
    start_queue(total_storage_size=3)
    text = r"stream 'train' takes 4 samples at once .* but the queue holds 3 samples \(total_storage_size\)"
    with pytest.raises(ValueError, match=text):
        trainer().fit(Recorder(), datamodule=TQDataModule(train=stream("train")))


def test_a_distance_that_just_fits_is_trained(trainer: MakeTrainer, tmp_path: Path) -> None:
    start_queue(total_storage_size=32)
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=7)
    with producer({"train": 20}) as indexes:
        dm = TQDataModule(train=stream("train", clear_consumed=True))
        trainer(callbacks=[saves], enable_checkpointing=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes


def test_checkpoints_of_weights_alone_keep_no_batch(trainer: MakeTrainer, tmp_path: Path) -> None:
    start_queue(total_storage_size=32)
    model = Recorder()
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=100, save_weights_only=True)
    with producer({"train": 20}) as indexes:
        dm = TQDataModule(train=stream("train", clear_consumed=True))
        trainer(callbacks=[saves], enable_checkpointing=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes
    assert not list((tmp_path / "kept").glob("last*"))
