# SPDX-License-Identifier: Apache-2.0
"""PartitionSwitch: each iterator reads the partition that its template names, and no partition in use is cleared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import PartitionSwitch, PublishWeights, Stream, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Ordered(Recorder):
    """Records the partitions of all stages in one list, in the order of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def _note(self, stage: str, batch: Any) -> Any:
        self.order.append(batch[1].partition_ids[0])
        return super()._note(stage, batch)


def test_a_partition_per_policy_version_follows_what_was_published(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{policy_version}"))
    train = [fill(dm.client, f"train@{version}", 12) for version in (0, 2, 6)]  # three steps each
    model = Recorder()
    publish = PublishWeights(every_n_steps=2)
    trainer(max_epochs=3, callbacks=[publish, PartitionSwitch()]).fit(model, datamodule=dm)
    assert model.indexes() == [index for part in train for index in part]
    # The first two are read to their end while versions 2, then 4 and 6 are the newest.
    assert model.partitions() == ["train@0", "train@2", "train@6"]
    assert sorted(dm.client.get_partition_list()) == ["_weights", "train@6"]


def test_without_published_weights_the_policy_version_is_the_step(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{policy_version}"))
    for step in (0, 2):
        fill(dm.client, f"train@{step}", 8)
    model = Recorder()
    trainer(max_epochs=2).fit(model, datamodule=dm)
    assert model.partitions() == ["train@0", "train@2"]


def test_the_batch_fetched_before_a_validation_is_trained_after_it_and_keeps_its_partition(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val@{global_step}", task="evaluate"))
    train = [fill(dm.client, f"train@{epoch}", 16) for epoch in range(2)]
    for step in (2, 4, 6, 8):
        fill(dm.client, f"val@{step}", 4)
    model = Ordered()
    run = trainer(max_epochs=2, val_check_interval=2, num_sanity_val_steps=0, callbacks=[PartitionSwitch()])
    run.fit(model, datamodule=dm)
    assert model.order == [
        "train@0", "train@0", "val@2", "train@0", "train@0", "val@4",
        "train@1", "train@1", "val@6", "train@1", "train@1", "val@8",
    ]  # fmt: skip
    assert model.indexes() == train[0] + train[1]
    assert sorted(dm.client.get_partition_list()) == ["train@1", "val@8"]


def test_validation_reads_the_partition_of_the_sanity_check_again(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{epoch}"), val=[stream("val@{epoch}", task="a"), stream("held-out", task="b")])
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 4)
    val = {name: fill(dm.client, name, 6) for name in ("val@0", "val@1", "held-out")}
    model = Ordered()
    trainer(max_epochs=2, num_sanity_val_steps=1, callbacks=[PartitionSwitch()]).fit(model, datamodule=dm)
    assert model.order == [
        "val@0", "held-out",
        "train@0", "val@0", "val@0", "held-out", "held-out",
        "train@1", "val@1", "val@1", "held-out", "held-out",
    ]  # fmt: skip
    sanity = val["val@0"][:4] + val["held-out"][:4]
    assert model.indexes("val") == sanity + val["val@0"] + val["held-out"] + val["val@1"] + val["held-out"]
    assert sorted(dm.client.get_partition_list()) == ["held-out", "train@1", "val@1"]


def test_a_partition_that_another_stream_reads_is_not_cleared(data: Make, trainer: MakeTrainer) -> None:
    """Validation reads the same partitions as training."""
    dm = data(train=stream("part@{epoch}"), val=stream("part@{epoch}", task="evaluate"))
    parts = [fill(dm.client, f"part@{epoch}", 4) for epoch in range(3)]
    model = Recorder()
    trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=[PartitionSwitch()]).fit(model, datamodule=dm)
    assert model.indexes() == model.indexes("val") == [index for part in parts for index in part]
    assert dm.client.get_partition_list() == ["part@2"]


def test_partition_can_be_overridden_and_partitions_can_stay(data: Make, trainer: MakeTrainer) -> None:
    class Curriculum(PartitionSwitch):
        def partition(self, stream: Stream, **at: Any) -> str:
            return "easy" if at["epoch"] < 2 else f"hard-{at['global_step']}"

    dm = data(train=stream("any", replay=True))
    for name in ("easy", "hard-2"):
        fill(dm.client, name, 4)
    model = Ordered()
    trainer(max_epochs=3, callbacks=[Curriculum(clear_finished=False)]).fit(model, datamodule=dm)
    assert model.order == ["easy", "easy", "hard-2"]
    assert sorted(dm.client.get_partition_list()) == ["easy", "hard-2"]


def test_overridden_names_are_read_to_the_last_epoch_also_after_a_resume(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Named(PartitionSwitch):
        def partition(self, stream: Stream, **at: Any) -> str:
            return ["easy", "fair", "hard"][at["epoch"]]

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    dm = data(train=stream("any"), ack="never")
    indexes = [fill(dm.client, name, 8) for name in ("easy", "fair", "hard")]
    whole = indexes[0] + indexes[1] + indexes[2]
    model = Recorder()
    trainer(max_epochs=3, callbacks=[Named(clear_finished=False), Save()]).fit(model, datamodule=dm)
    assert model.indexes() == whole
    for step in (1, 2):  # within an epoch, and after its last batch
        model = Recorder()
        resumed = trainer(max_epochs=3, callbacks=[Named(clear_finished=False)])
        resumed.fit(model, datamodule=dm, ckpt_path=tmp_path / f"{step}.ckpt")
        assert model.indexes() == whole[4 * step :]


def test_after_a_resume_the_partition_that_the_checkpoint_had_read_to_its_end_is_cleared(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    tq.init()
    for epoch in range(3):
        fill(tq.get_client(), f"train@{epoch}", 8)
    first, second = (TQDataModule(train=stream("train@{epoch}")) for _ in range(2))
    callbacks = [PartitionSwitch(), Save()]
    with pytest.raises(ValueError, match="failed on request"):
        trainer(max_epochs=3, callbacks=callbacks).fit(Recorder(fail_at=2), datamodule=first)
    trainer(max_epochs=3, callbacks=callbacks).fit(Recorder(), datamodule=second, ckpt_path=tmp_path / "2.ckpt")
    assert tq.get_client().get_partition_list() == ["train@2"]


@pytest.mark.parametrize("validates", [False, True])
def test_what_a_checkpoint_has_finished_makes_room_for_the_epoch_that_waits_for_it(
    trainer: MakeTrainer, tmp_path: Path, validates: bool
) -> None:
    val = stream("val", task="evaluate") if validates else None
    dm = TQDataModule(
        train=stream("train@{epoch}"), val=val, queue={"units": 1, "total_storage_size": 20, "put_timeout_s": 60}
    )
    dm.open()
    fill(dm.client, "val", 4)
    failed = list[BaseException]()

    def produce() -> None:
        try:
            for epoch in range(4):
                fill(dm.client, f"train@{epoch}", 8)  # two epochs fill the queue
        except BaseException as error:
            failed.append(error)

    producer, model = threading.Thread(target=produce, daemon=True), Recorder()
    producer.start()
    callbacks = [PartitionSwitch(), ModelCheckpoint(tmp_path / "saved", every_n_epochs=1)]
    try:
        trainer(max_epochs=4, callbacks=callbacks, enable_checkpointing=True).fit(model, datamodule=dm)
        producer.join(30)
    finally:
        dm.close()
    assert model.partitions() == [f"train@{epoch}" for epoch in range(4)]
    assert failed == []


def test_an_unknown_variable_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"uses \{policy\}; did you mean 'policy_version'"):
        stream("train@{policy}")


def test_two_of_them_are_refused(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream())
    with pytest.raises(InvalidRequestError, match="this Trainer has 2 PartitionSwitch callbacks"):
        trainer(callbacks=[PartitionSwitch(), PartitionSwitch()]).fit(Recorder(), datamodule=dm)


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_ranks_switch_and_clear_together_and_keep_the_loader_they_were_given(run_ranks: Any) -> None:
    code, output, ranks = run_ranks("callbacks_script.py", "switching", "ddp", "2", "LOGS")
    assert code == 0, output
    (first,), (second,) = ranks
    for seen, partitions, loader_is_used, warned in (first, second):
        # 16 rows on two ranks, two at a time: four steps per partition, and a validation after every second
        assert [name for name, _ in seen["train"]] == ["train@0"] * 4 + ["train@4"] * 4
        assert [name for name, _ in seen["val"]] == [f"val@{step}" for step in (2, 4, 6, 8) for _ in range(2)]
        assert (partitions, loader_is_used) == (["_weights", "train@4", "val@8"], True)
        assert [text for text in warned if "loader" in text or "sampler" in text or "queue/" in text] == []
    for stage, count in (("train", 32), ("val", 32)):
        indexes = [index for rank in (first, second) for _, batch in rank[0][stage] for index in batch]
        assert len(set(indexes)) == len(indexes) == count
