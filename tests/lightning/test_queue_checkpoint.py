# SPDX-License-Identifier: Apache-2.0
"""TQCheckpoint: each kept checkpoint has its queue next to it, and a new queue is restored from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import PartitionSwitch, TQCheckpoint, TQDataModule
from tests.lightning.conftest import stream
from tests.own_processes import own_processes
from transfer_queue import CheckpointError, CheckpointNotFoundError, QueueUnreachableError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*ckpt_path=.last."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def saved(data: Make, trainer: MakeTrainer, folder: Path) -> Callable[..., list[int]]:
    """Fit some steps with these ModelCheckpoint options, then end the queue. Returns its indexes."""

    def fit(max_steps: int = 5, partitions: int = 1, **options: Any) -> list[int]:
        dm = data(train=stream("train@{epoch}"))
        indexes = [index for each in range(partitions) for index in fill(dm.client, f"train@{each}", 40)]
        callbacks = [TQCheckpoint(), ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **options)]
        trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=max_steps).fit(Recorder(), datamodule=dm)
        dm.close()
        return indexes

    return fit


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"step=5"}),
        ({"save_top_k": -1}, {f"step={step}" for step in range(1, 6)}),
        ({"save_top_k": 2, "monitor": "step", "mode": "max"}, {"step=4", "step=5"}),
        ({"save_last": True}, {"step=5", "last"}),
        ({"save_weights_only": True}, set()),
    ],
    ids=["one", "all", "two", "last", "weights"],
)
def test_as_many_queues_are_kept_as_checkpoints(
    saved: Callable[..., list[int]], folder: Path, options: dict[str, Any], kept: set[str]
) -> None:
    saved(**options)
    assert {name for name in names(folder) if name.endswith(".tq")} == {f"{name}.ckpt.tq" for name in kept}
    assert not kept or {name for name in names(folder) if name.endswith(".ckpt")} == {f"{name}.ckpt" for name in kept}


@pytest.mark.parametrize("name", ["step=2", "step=5"])
def test_a_new_queue_is_restored_from_next_to_the_checkpoint(
    saved: Callable[..., list[int]], trainer: MakeTrainer, folder: Path, name: str
) -> None:
    indexes = saved(save_top_k=-1)
    model = Recorder()
    with TQDataModule(train=stream("train@{epoch}"), queue={"units": 2}) as dm:
        trainer().fit(model, datamodule=dm, ckpt_path=folder / f"{name}.ckpt")
    assert model.indexes() == indexes[4 * int(name[-1]) :]


class LosesAUnit(Callback):
    """After step 2, the storage unit ends that holds what nobody trains."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.datamodule.client.evict_client(self._name, unit=True)


def test_a_checkpoint_with_all_values_stays_once_later_ones_lack_some(
    trainer: MakeTrainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def held(client: tq.TransferQueueClient) -> dict[str, int]:
        return {each["unit"]: each["samples"] for each in client.get_storage_stats()}

    kept = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=True)
    with TQDataModule(train=stream("train"), queue={"units": 2, "server_processes": "each"}) as dm:
        fill(dm.client, "train", 40)
        before, count = held(dm.client), 0
        while not (others := [unit for unit, samples in held(dm.client).items() if samples and not before[unit]]):
            fill(dm.client, f"other@{count}", 1)
            count += 1
        (name,) = [each for each in dm.client.get_stats()["clients"] if each.startswith(f"unit {others[0]}.")]
        callbacks = [LosesAUnit(name), TQCheckpoint(), kept]
        trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=4).fit(Recorder(), datamodule=dm)
    steps = {path for path in names(folder) if path.startswith("step")}
    assert steps == {f"step={step}.ckpt{end}" for step in (1, 4) for end in ("", ".tq")}
    lost = {step: describe_lost(folder / f"step={step}.ckpt.tq") for step in (1, 4)}
    assert lost == {1: {}, 4: {f"other@{count - 1}": dict.fromkeys(("text", "x"), 1)}}
    said = [record.getMessage() for record in caplog.records]
    assert any("step=4.ckpt.tq is saved without the values that ended" in text for text in said)
    assert any("step=1.ckpt stays: its queue has all values" in text for text in said)


def describe_lost(saved: Path) -> dict[str, Any]:
    return {name: each["lost"] for name, each in tq.describe_checkpoint(saved)["partitions"].items() if each["lost"]}


def test_a_link_to_the_last_checkpoint_is_followed(
    saved: Callable[..., list[int]], trainer: MakeTrainer, folder: Path
) -> None:
    indexes = saved(save_last="link")
    assert (folder / "last.ckpt").is_symlink()
    model = Recorder()
    with TQDataModule(train=stream("train@{epoch}")) as dm:
        trainer().fit(model, datamodule=dm, ckpt_path=folder / "last.ckpt")
    assert model.indexes() == indexes[20:]


def test_clearing_finished_partitions_keeps_what_a_resumed_run_reads(
    data: Make, trainer: MakeTrainer, folder: Path
) -> None:
    dm = data(train=stream("train@{epoch}"))
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(3)]
    callbacks = [PartitionSwitch(), TQCheckpoint(), ModelCheckpoint(folder, "{step}", every_n_train_steps=2)]
    trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=3, max_steps=5).fit(Recorder(), datamodule=dm)
    dm.close()
    model = Recorder()
    again = [PartitionSwitch(), TQCheckpoint(), ModelCheckpoint(folder / "again", every_n_train_steps=2)]
    with TQDataModule(train=stream("train@{epoch}")) as dm:
        fitted = trainer(callbacks=again, enable_checkpointing=True, max_epochs=3)
        fitted.fit(model, datamodule=dm, ckpt_path=folder / "step=4.ckpt")
        assert model.indexes() == indexes[1][4:] + indexes[2]
        assert dm.client.get_partition_list() == ["train@2"]


def test_a_live_queue_is_used_unchanged(data: Make, trainer: MakeTrainer, folder: Path) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 16)
    callbacks = [TQCheckpoint(), ModelCheckpoint(folder, "{step}", every_n_train_steps=2)]
    trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=3).fit(Recorder(), datamodule=dm)
    dm.client.create_partition("made since")
    model = Recorder()
    other = TQDataModule(train=stream("train"))
    trainer().fit(model, datamodule=other, ckpt_path=folder / "step=2.ckpt")
    assert model.indexes() == indexes[8:]
    assert dm.client.get_partition_list() == ["train", "made since"]


@pytest.mark.parametrize("task", ["learn", "renamed"])
def test_a_queue_that_never_gave_the_task_the_saved_batches_is_refused(
    saved: Callable[..., list[int]], trainer: MakeTrainer, folder: Path, task: str
) -> None:
    saved()
    model = Recorder()
    with TQDataModule(train=stream("train@{epoch}", task=task)) as dm:
        if task == "learn":  # the program fills its queue, as before the first fit
            fill(dm.client, "train@0", 40)
        with pytest.raises(ValueError, match="this queue has given the stream's task only 0 batches of it"):
            trainer().fit(model, datamodule=dm, ckpt_path=folder / "step=5.ckpt")
    assert model.indexes() == []


@pytest.mark.parametrize("step", [5, 10], ids=["within an epoch", "at its end"])
def test_a_queue_with_other_partitions_is_refused_where_the_saved_one_has_samples_to_train(
    saved: Callable[..., list[int]], trainer: MakeTrainer, folder: Path, step: int
) -> None:
    indexes = saved(step, partitions=2)
    path, model = folder / f"step={step}.ckpt", Recorder()
    with TQDataModule(train=stream("train@{epoch}")) as dm:
        fill(dm.client, "val", 4)
        with pytest.raises(CheckpointError, match=r"but was not restored: this queue is not empty\. It holds 'val'"):
            trainer(max_epochs=2).fit(model, datamodule=dm, ckpt_path=path)
        dm.open()
        trainer(max_epochs=2).fit(model, datamodule=dm, ckpt_path=path)
    assert model.indexes() == indexes[4 * step :]


def test_a_live_queue_whose_samples_were_all_trained_and_cleared_goes_on_with_new_ones(
    data: Make, trainer: MakeTrainer, folder: Path
) -> None:
    dm = data(train=stream("train@{epoch}"))
    fill(dm.client, "train@0", 8)
    saves = [TQCheckpoint(), ModelCheckpoint(folder, "{step}", every_n_train_steps=2)]
    trainer(callbacks=saves, enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    dm.client.clear_partition("train@0")
    dm.client.create_partition("val")
    other, model = TQDataModule(train=stream("train@{epoch}")), Recorder()
    fill_later(other, "train@1")
    trainer(max_epochs=2).fit(model, datamodule=other, ckpt_path=folder / "step=2.ckpt")
    assert (model.partitions("train"), len(model.indexes())) == (["train@1"], 8)


@pytest.mark.parametrize("name", ["metadata.json", "controller_state.msgpack"])
def test_a_saved_queue_that_lacks_a_file_is_refused(
    saved: Callable[..., list[int]], trainer: MakeTrainer, folder: Path, name: str
) -> None:
    saved()
    (folder / "step=5.ckpt.tq" / name).unlink()
    with (
        TQDataModule(train=stream("train@{epoch}")) as dm,
        pytest.raises(CheckpointError, match=rf"{name}.* So its queue can't be restored\. Copy all of"),
    ):
        trainer().fit(Recorder(), datamodule=dm, ckpt_path=folder / "step=5.ckpt")


def test_an_empty_queue_without_a_saved_one_is_logged(
    data: Make, trainer: MakeTrainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    trainer(callbacks=[saves], enable_checkpointing=True, max_steps=2).fit(Recorder(), datamodule=dm)
    dm.close()
    model = Recorder()
    with TQDataModule(train=stream("train")) as new:
        fill_later(new)
        trainer(max_steps=3).fit(model, datamodule=new, ckpt_path=folder / "step=2.ckpt")
    assert "the queue is empty and none was saved next to it" in caplog.text
    assert len(model.indexes()) == 4


def test_a_checkpoint_that_is_not_there_is_named_before_anything_is_said_of_the_queue(
    data: Make, trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"there is no checkpoint '.*/lats' \(ckpt_path\)"):
        trainer().fit(Recorder(), datamodule=data(train=stream("train")), ckpt_path=tmp_path / "lats")
    assert "is lost" not in caplog.text


def fill_later(dm: TQDataModule, partition: str = "train") -> None:
    """Fill the queue after the run has prepared it."""
    prepare = dm._prepare

    def prepared(*args: Any) -> str:
        address = prepare(*args)
        fill(dm.client, partition, 8)
        return address

    dm._prepare = prepared  # type: ignore[method-assign]


def test_a_queue_that_cannot_be_saved_ends_the_run_and_keeps_the_previous_checkpoint(
    data: Make, trainer: MakeTrainer, folder: Path
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    (folder / "step=2.ckpt.tq").mkdir(parents=True)
    (folder / "step=2.ckpt.tq" / "of another program").touch()
    callbacks = [TQCheckpoint(), ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    with pytest.raises(CheckpointError, match="of another program"):
        trainer(callbacks=callbacks, enable_checkpointing=True).fit(Recorder(), datamodule=dm)
    assert names(folder) == {"step=1.ckpt", "step=1.ckpt.tq", "step=2.ckpt.tq"}


def test_a_checkpoint_on_an_exception_is_saved_even_if_the_queue_died(
    data: Make, trainer: MakeTrainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Killing(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                servers = own_processes()
                for server in servers:
                    server.kill()
                psutil.wait_procs(servers, timeout=20)
            return super().training_step(batch, batch_idx)

    dm = data(train=stream("train", prefetch=False))
    fill(dm.client, "train", 40)
    dm.client.save_checkpoint(str(folder / "failed.ckpt.tq"))  # from an earlier run
    callbacks = [TQCheckpoint(), OnExceptionCheckpoint(folder, filename="failed")]
    with pytest.raises(QueueUnreachableError):
        trainer(callbacks=callbacks, enable_checkpointing=True).fit(Killing(), datamodule=dm)
    assert names(folder) == {"failed.ckpt"}
    assert "failed.ckpt is saved without its queue: controller" in caplog.text
    with pytest.raises(tq.errors.NotInitializedError):  # the datamodule closed it on the exception
        tq.get_client()


def test_a_checkpoint_can_be_saved_by_hand_after_an_exception_ended_the_queue(
    data: Make, trainer: MakeTrainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    dm.client.save_checkpoint(str(folder / "rescue.ckpt.tq"))  # from an earlier run
    fitted = trainer(callbacks=[TQCheckpoint()])
    with pytest.raises(ValueError, match="failed on request"):
        fitted.fit(Recorder(fail_at=3), datamodule=dm)
    fitted.save_checkpoint(folder / "rescue.ckpt")
    assert names(folder) == {"rescue.ckpt"}
    assert "rescue.ckpt is saved without its queue: this process has left the queue at ipc:" in caplog.text


def test_a_rescue_checkpoint_within_an_accumulation_resumes_after_the_last_step(
    trainer: MakeTrainer, folder: Path
) -> None:
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    indexes = fill(tq.get_client(), "train", 36)
    fitted = trainer(callbacks=[TQCheckpoint()], accumulate_grad_batches=3)
    with pytest.raises(ValueError, match="failed on request"):
        fitted.fit(Recorder(fail_at=5), datamodule=TQDataModule(train=stream("train", num_batches=9)))
    fitted.save_checkpoint(folder / "rescue.ckpt")
    tq.close()
    model = Recorder()
    with TQDataModule(train=stream("train", num_batches=9)) as dm:
        again = trainer(accumulate_grad_batches=3)
        again.fit(model, datamodule=dm, ckpt_path=folder / "rescue.ckpt")
    assert (again.global_step, model.indexes()) == (3, indexes[12:])


def test_a_foreign_directory_is_kept_when_the_checkpoint_is_saved_without_a_queue(
    data: Make, trainer: MakeTrainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 8)
    fitted = trainer(callbacks=[TQCheckpoint()])
    fitted.fit(Recorder(), datamodule=dm)
    (folder / "final.ckpt.tq").mkdir(parents=True)
    (folder / "final.ckpt.tq" / "of another program").touch()
    fitted.save_checkpoint(folder / "final.ckpt")
    assert "holds something else (of another program)" in caplog.text
    assert (names(folder), names(folder / "final.ckpt.tq")) == (
        {"final.ckpt", "final.ckpt.tq"}, {"of another program"}
    )  # fmt: skip


def test_a_checkpoint_saved_after_the_fit_has_its_queue_while_the_queue_lives(
    data: Make, trainer: MakeTrainer, folder: Path
) -> None:
    dm = data(train=stream("train"), test=stream("test", task="examine"))
    indexes = fill(dm.client, "train", 40)
    fill(dm.client, "test", 4)
    fitted = trainer(callbacks=[TQCheckpoint()], max_steps=3)
    fitted.fit(Recorder(), datamodule=dm)
    fitted.test(Recorder(), datamodule=dm, verbose=False)
    fitted.save_checkpoint(folder / "final.ckpt")
    fitted.save_checkpoint(folder / "again.ckpt")
    dm.close()
    fitted.save_checkpoint(folder / "again.ckpt")
    assert names(folder) == {"final.ckpt", "final.ckpt.tq", "again.ckpt"}
    model = Recorder()
    with TQDataModule(train=stream("train")) as new:
        trainer(max_epochs=2).fit(model, datamodule=new, ckpt_path=folder / "final.ckpt")
    assert model.indexes() == indexes[12:]
