# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds the position after the trained batches, and a resumed fit continues exactly there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from producing import fill
from recorders import Both, Recorder
from torch.utils.data import DataLoader

from lightning_tq import PartitionSwitch, TQDataModule
from tests.lightning.conftest import stream

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Save(Callback):
    """Saves a checkpoint at the end of every batch and epoch, like ModelCheckpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.directory / f"step={trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.directory / "end.ckpt")


@pytest.mark.parametrize("options", [{}, {"num_batches": 6}, {"num_workers": 2}], ids=["unknown", "known", "workers"])
@pytest.mark.parametrize("step", [3, 8])
def test_a_resumed_fit_trains_the_rest_and_nothing_twice(
    data: Make, trainer: MakeTrainer, tmp_path: Path, step: int, options: dict[str, Any]
) -> None:
    dm = data(train=stream("train@{epoch}", micro_batch_size=2, **options))
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(2)]
    before = Recorder()
    trainer(max_epochs=2, max_steps=step, callbacks=[Save(tmp_path)]).fit(before, datamodule=dm)
    after = Recorder()
    other = TQDataModule(train=stream("train@{epoch}", micro_batch_size=2, **options))
    trainer(max_epochs=2).fit(after, datamodule=other, ckpt_path=tmp_path / f"step={step}.ckpt")
    trained = before.indexes() + after.indexes()
    assert (len(before.indexes()), len(trained)) == (2 * step, 24)
    assert sorted(trained[:12]) == sorted(indexes[0])
    assert sorted(trained[12:]) == sorted(indexes[1])


def test_an_end_of_epoch_checkpoint_resumes_with_the_next_epoch(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val@{epoch}", task="evaluate"))
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(2)]
    for epoch in range(2):
        fill(dm.client, f"val@{epoch}", 4)
    trainer(max_epochs=1, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    model = Recorder()
    trainer(max_epochs=2).fit(model, datamodule=dm, ckpt_path=tmp_path / "end.ckpt")
    assert (model.indexes(), model.partitions("val")) == (indexes[1], ["val@1"])


def test_an_endless_stream_resumes_after_the_last_trained_batch(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train"), ack="never")
    indexes = fill(dm.client, "train", 40)
    fitted = trainer(max_epochs=-1, max_steps=5, callbacks=[Save(tmp_path)])
    fitted.fit(Recorder(), datamodule=dm)
    model = Recorder()
    trainer(max_epochs=-1, max_steps=6).fit(model, datamodule=dm, ckpt_path=tmp_path / "step=2.ckpt")
    assert model.indexes() == indexes[8:24]


def test_an_older_checkpoint_is_refused_once_its_batches_are_acknowledged(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    trainer(max_epochs=-1, max_steps=5, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    other = TQDataModule(train=stream("train"))
    with pytest.raises(ValueError, match="the batches before 5 were acknowledged since then and are gone"):
        trainer(max_steps=6).fit(Recorder(), datamodule=other, ckpt_path=tmp_path / "step=2.ckpt")
    model = Recorder()
    trainer(max_steps=6).fit(model, datamodule=other, ckpt_path=tmp_path / "step=5.ckpt")
    assert len(model.indexes()) == 4


def test_a_checkpoint_within_a_partition_that_was_cleared_is_refused(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train@{epoch}"), ack="never")
    for epoch in range(3):
        fill(dm.client, f"train@{epoch}", 8)
    callbacks = [PartitionSwitch(), Save(tmp_path)]
    trainer(max_epochs=2, callbacks=callbacks).fit(Recorder(), datamodule=dm)
    model, other = Recorder(), TQDataModule(train=stream("train@{epoch}"))
    error = (
        r"at batch 1 of partition 'train@0', which was cleared or never was in this queue\. The queue holds "
        r"'train@1', 'train@2'\. Resume from"
    )
    with pytest.raises(ValueError, match=error):
        trainer(max_epochs=2).fit(model, datamodule=other, ckpt_path=tmp_path / "step=1.ckpt")
    assert model.indexes() == []


@pytest.mark.parametrize(
    ("max_steps", "error"),
    [
        (3, r"at batch 0 of partition 'train@1', but the batches before 1 were acknowledged since then and are gone"),
        (6, r"'train@1' comes next\. Both are gone from the queue, and training has come to 'train@2'\. Resume from"),
    ],
    ids=["read", "cleared"],
)
def test_the_end_of_an_epoch_is_refused_once_the_next_partition_was_read(
    data: Make, trainer: MakeTrainer, tmp_path: Path, max_steps: int, error: str
) -> None:
    dm = data(train=stream("train@{epoch}"))
    indexes = [fill(dm.client, f"train@{epoch}", 8) for epoch in range(3)]
    callbacks = [PartitionSwitch(), Save(tmp_path)]
    trainer(max_epochs=3, max_steps=max_steps, callbacks=callbacks).fit(Recorder(), datamodule=dm)
    model, other = Recorder(), TQDataModule(train=stream("train@{epoch}"))
    with pytest.raises(ValueError, match=error):
        trainer(max_epochs=3).fit(model, datamodule=other, ckpt_path=tmp_path / "step=2.ckpt")
    assert model.indexes() == []
    trainer(max_epochs=3).fit(model, datamodule=other, ckpt_path=tmp_path / f"step={max_steps}.ckpt")
    assert model.indexes() == [index for each in indexes for index in each][4 * max_steps :]


def test_a_partition_that_a_switch_returns_to_goes_on_after_a_resume(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Alternates(PartitionSwitch):
        def partition(self, stream: Any, *, epoch: int, **_: Any) -> str:
            return ("easy", "hard")[epoch % 2]

    streams = {"train": stream("train", num_batches=1)}
    dm = data(**streams)
    easy, hard = fill(dm.client, "easy", 8), fill(dm.client, "hard", 8)
    callbacks = [Alternates(clear_finished=False), Save(tmp_path)]
    trainer(max_epochs=2, callbacks=callbacks).fit(Recorder(), datamodule=dm)
    model = Recorder()
    again = trainer(max_epochs=4, callbacks=[Alternates(clear_finished=False)])
    again.fit(model, datamodule=TQDataModule(**streams), ckpt_path=tmp_path / "step=2.ckpt")
    assert model.indexes() == easy[4:] + hard[4:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_fit_resumes_within_a_batch_after_its_first_rows_were_cleared(
    data: Make, trainer: MakeTrainer, tmp_path: Path, step: int, workers: int
) -> None:
    class Clears(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if clears:
                dm.client.clear_samples(batch.meta)
            return loss

    clears = True
    dm = data(train=stream("train", batch_size=7, micro_batch_size=2, num_workers=workers))
    indexes = fill(dm.client, "train", 14)
    before, after = Clears(), Clears()
    trainer(max_steps=step, callbacks=[Save(tmp_path)]).fit(before, datamodule=dm)
    clears = False
    again = TQDataModule(train=stream("train", batch_size=7, micro_batch_size=2, num_workers=workers))
    trainer().fit(after, datamodule=again, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert before.indexes() + after.indexes() == indexes
    assert [len(rows) for _, rows in after.seen["train"]] == [2, 2, 2, 1, 2, 2, 2, 1][step:]


class Steps(Recorder):
    """Records (optimizer step, epoch, batch_idx, indexes)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer.reset_parameters()
        self.steps: list[tuple[int, int, int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps.append((self.global_step, self.current_epoch, batch_idx, list(batch.meta.global_indexes)))
        return super().training_step(batch, batch_idx)


LIMITS: dict[str, dict[str, Any]] = {"epochs": {}, "steps": {"max_steps": 12}, "validation": {"val_check_interval": 4}}


WORKERS = {"num_workers": 2}


@pytest.mark.programs
@pytest.mark.parametrize(
    ("limits", "options"),
    [
        *(pytest.param(limits, {}, id=f"{limits}-unknown") for limits in LIMITS),
        *(pytest.param(limits, {"num_batches": 10}, id=f"{limits}-known") for limits in LIMITS),
        pytest.param("validation", WORKERS, id="validation-workers"),
        *(
            pytest.param(limits, WORKERS, id=f"{limits}-workers", marks=pytest.mark.slow)
            for limits in ("epochs", "steps")
        ),
    ],
)
def test_a_fit_resumes_from_any_checkpoint_as_if_it_had_not_stopped(
    data: Make, trainer: MakeTrainer, tmp_path: Path, limits: str, options: dict[str, Any]
) -> None:
    class SaveEach(Callback):
        """Saves at the end of some batches (also within accumulations) and of validation, and around epochs."""

        def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
            self.save(trainer, "start")

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if len(whole.steps) in (1, 6, 10, 11, 19):
                self.save(trainer, "batch")

        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            self.save(trainer, "epoch")

        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            self.save(trainer, "validation")

        def save(self, trainer: Trainer, where: str) -> None:
            trainer.save_checkpoint(tmp_path / f"{where}{len(whole.steps)}.ckpt")

    common = {"max_epochs": 3, "accumulate_grad_batches": 3, "num_sanity_val_steps": 0, **LIMITS[limits]}
    dm = data(
        train=stream("train@{epoch}", micro_batch_size=2, **options), val=stream("val", task="judge"), ack="never"
    )
    for epoch in range(3):
        fill(dm.client, f"train@{epoch}", 20)
    fill(dm.client, "val", 4)
    whole = Steps()
    trainer(callbacks=[SaveEach()], **common).fit(whole, datamodule=dm)
    assert len(whole.steps) == 30
    for saved in sorted(tmp_path.glob("*.ckpt")):
        step = torch.load(saved, weights_only=True)["global_step"]
        model = Steps()
        trainer(**common).fit(model, datamodule=dm, ckpt_path=saved)
        assert model.steps == [line for line in whole.steps if line[0] >= step], saved.name
        assert torch.equal(model.layer.weight, whole.layer.weight), saved.name


def test_changed_sizes_are_refused_within_a_partition_and_allowed_in_the_next(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train@{epoch}"))
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(2)]
    trainer(callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    other = TQDataModule(train=stream("train@{epoch}", batch_size=6), ack="never")
    error = (
        "in stream 'train', which was read with batch_size=4, micro_batch_size=4. It is now read with batch_size=6, "
        "micro_batch_size=6"
    )
    with pytest.raises(ValueError, match=error):
        trainer(max_epochs=2).fit(Recorder(), datamodule=other, ckpt_path=tmp_path / "step=2.ckpt")
    model = Recorder()
    trainer(max_epochs=2).fit(model, datamodule=other, ckpt_path=tmp_path / "end.ckpt")
    assert [rows for _, rows in model.seen["train"]] == [indexes[1][:6], indexes[1][6:]]


def test_another_number_of_ranks_validates_on_all_samples(data: Make, trainer: MakeTrainer) -> None:
    """The queue of an earlier run, or its checkpoint, holds the batches that two ranks had."""
    dm = data(val=stream("{stage}", task="learn"))
    indexes = fill(dm.client, "val", 16)
    dm.client.register_task("learn", "RankAwareSampler", 2)
    for rank in range(2):
        for index in range(2):
            at = {"dp_rank": rank, "batch_index": index}
            assert dm.client.get_meta(["x"], 4, "val", task_name="learn", sampling_config=at).size == 4
    model = Recorder()
    trainer().validate(model, datamodule=dm, verbose=False)
    assert model.seen["val"] == [("val", indexes[start : start + 4]) for start in range(0, 16, 4)]


def test_a_replayed_validation_leaves_a_live_task_of_more_ranks_where_it_was(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    client = data(val=stream("val")).client
    client.register_task("copy", follows="learn")
    recorded = fill(client, "val", 8)
    for index in range(2):
        client.get_meta(["x"], 4, "val", task_name="learn", sampling_config={"dp_rank": 0, "batch_index": index})
    client.save_batches(tmp_path / "record" / "000000", "copy")
    client.clear_partition("val")
    client.register_task("learn", "RankAwareSampler", 2)
    fill(client, "val", 24)
    for rank in range(2):
        at = {"dp_rank": rank, "batch_index": 0}
        client.ack(client.get_meta(["x"], 4, "val", task_name="learn", sampling_config=at), "learn")
        client.get_meta(["x"], 4, "val", task_name="learn", sampling_config={**at, "batch_index": 1})
    before = client.get_stats()["partitions"]["val"]["tasks"]["learn"]
    model = Recorder()
    replay = TQDataModule(val=stream("val", replay_from=str(tmp_path / "record")))
    trainer().validate(model, datamodule=replay, verbose=False)
    assert [index for _, indexes in model.seen["val"] for index in indexes] == recorded
    after = client.get_stats()["partitions"]["val"]["tasks"]["learn"]
    assert {**after, "asked_s_ago": None} == {**before, "asked_s_ago": None}


@pytest.mark.parametrize(
    ("partition", "advice"),
    [
        (
            "train@{epoch}",
            r"Keep the sizes until the partition ends, or resume from the end of an epoch: in a new queue",
        ),
        (
            "train@0",
            r"Keep the sizes, or begin a new run with its weights \(load_from_checkpoint",
        ),
    ],
)
def test_the_end_of_an_epoch_is_advised_for_changed_sizes_only_where_the_next_reads_another_partition(
    data: Make, trainer: MakeTrainer, tmp_path: Path, partition: str, advice: str
) -> None:
    dm = data(train=stream(partition))
    fill(dm.client, "train@0", 12)
    trainer(callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    other = TQDataModule(train=stream(partition, batch_size=6), ack="never")
    with pytest.raises(ValueError, match=advice):
        trainer(max_epochs=2).fit(Recorder(), datamodule=other, ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize("options", [{}, {"num_batches": 3}], ids=["unknown", "known"])
def test_a_checkpoint_from_the_last_batch_or_validation_resumes_with_the_next_epoch(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    class SaveAfterValidation(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"validated{trainer.current_epoch}.ckpt")

    dm = data(train=stream("train@{epoch}", **options), val=stream("val@{epoch}", task="evaluate"), ack="never")
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(3)]
    for epoch in range(3):
        fill(dm.client, f"val@{epoch}", 4)
    callbacks = [Save(tmp_path), SaveAfterValidation()]
    trainer(max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0).fit(Recorder(), datamodule=dm)
    for name in ("step=3", "validated0"):
        model = Recorder()
        trainer(max_epochs=3).fit(model, datamodule=dm, ckpt_path=tmp_path / f"{name}.ckpt")
        assert model.indexes() == indexes[1] + indexes[2], name


@pytest.mark.parametrize("limit", [1.0, 1], ids=["unknown", "known"])
def test_validating_a_checkpoint_keeps_the_partitions_that_training_moved_on_from(
    data: Make, trainer: MakeTrainer, tmp_path: Path, limit: float
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val", task="evaluate"))
    for name in ("train@0", "train@1", "val"):
        fill(dm.client, name, 8)
    trainer(max_epochs=2, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["TQDataModule"]
    assert saved["left"] == ["train@0"]
    other = TQDataModule(val=stream("val", task="evaluate"))
    judge = trainer(callbacks=[PartitionSwitch()], limit_val_batches=limit)
    judge.validate(Recorder(), datamodule=other, ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert sorted(dm.client.get_partition_list()) == ["train@0", "train@1", "val"]


@pytest.mark.programs
@pytest.mark.parametrize("options", [{}, {"num_batches": 4}, {"num_workers": 2}], ids=["unknown", "known", "workers"])
def test_a_replayed_stream_resumes_within_the_saved_epoch(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    dm = data(train=stream("train", micro_batch_size=2, replay=True, **options))
    indexes = fill(dm.client, "train", 8)
    whole = Recorder()
    trainer(max_epochs=2, callbacks=[Save(tmp_path)]).fit(whole, datamodule=dm)
    assert whole.indexes() == indexes * 2
    for step in (1, 3, 4, 5, 7):
        model = Recorder()
        trainer(max_epochs=2).fit(model, datamodule=dm, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert model.indexes() == (indexes * 2)[2 * step :], step


def test_overfit_batches_resume_within_the_saved_epoch(data: Make, trainer: MakeTrainer, tmp_path: Path) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)[:12]
    trainer(max_epochs=2, overfit_batches=3, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    model = Recorder()
    resumed = trainer(max_epochs=2, overfit_batches=3)
    resumed.fit(model, datamodule=dm, ckpt_path=tmp_path / "step=2.ckpt")
    assert model.indexes() == indexes[8:] + indexes


@pytest.mark.parametrize("suffix", ["@{epoch}", "@{global_step}"])
@pytest.mark.parametrize("saved", ["step=2", "step=3", "end"])
def test_overfit_batches_of_a_resumed_run_are_those_of_the_first_epoch(
    data: Make, trainer: MakeTrainer, tmp_path: Path, saved: str, suffix: str
) -> None:
    """Also after a resume at an epoch's end, where the templates would name the next epoch's partitions."""
    streams = {"train": stream(f"train{suffix}"), "val": stream(f"val{suffix}", task="judge")}
    dm = data(**streams)
    for number in range(7):
        fill(dm.client, f"train@{number}", 20)
        fill(dm.client, f"val@{number}", 20)
    options = {"overfit_batches": 3, "num_sanity_val_steps": 0}
    whole = Recorder()
    trainer(max_epochs=1, callbacks=[Save(tmp_path)], **options).fit(whole, datamodule=dm)
    train, val = whole.indexes(), whole.indexes("val")
    model, other = Recorder(), TQDataModule(**streams)
    trainer(max_epochs=3, **options).fit(model, datamodule=other, ckpt_path=tmp_path / f"{saved}.ckpt")
    assert model.indexes() == (train * 3)[8 if saved == "step=2" else 12 :]
    if saved == "end":  # the validation of the first epoch was before
        assert model.indexes("val") == val * 2


@pytest.mark.parametrize("saved", ["end.ckpt", "after.ckpt"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_batches": 5}], ids=["unknown", "known"])
def test_a_fit_that_stopped_within_an_epoch_resumes_with_the_rest_of_it(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any], accumulate: int, saved: str
) -> None:
    """Lightning counts such an epoch as ended, and its ModelCheckpoint saves then."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.fit_loop.total_batch_idx == 7  # with accumulation, after half of a step

    def streams() -> dict[str, Any]:
        return {"train": stream("train@{epoch}", batch_size=2, **options)}

    dm, limits = data(**streams()), {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    indexes = [fill(dm.client, f"train@{epoch}", 10) for epoch in range(3)]
    first, rest = Recorder(), Recorder()
    stopped = trainer(callbacks=[Stop(), Save(tmp_path)], **limits)
    stopped.fit(first, datamodule=dm)
    stopped.save_checkpoint(tmp_path / "after.ckpt")
    fitted = trainer(**limits)
    fitted.fit(rest, datamodule=TQDataModule(**streams()), ckpt_path=tmp_path / saved)
    kept = [index for each in indexes for index in each][: 16 if accumulate == 1 else 14]
    assert first.indexes()[: len(kept)] == kept
    assert kept + rest.indexes() == [index for each in indexes for index in each]
    assert (fitted.current_epoch, fitted.global_step) == (3, 15 if accumulate == 1 else 9)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended:UserWarning")  # the loader beside it
@pytest.mark.parametrize(
    ("options", "beside"),
    [({}, False), ({"num_batches": 3}, False), ({}, True)],
    ids=["unknown", "known", "beside a loader of known length"],
)
def test_a_run_resumes_from_a_checkpoint_of_a_resumed_run(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any], beside: bool
) -> None:
    """First from an epoch's last batch, then from the middle of the next epoch, which is as long as any other."""
    dm = data(train=stream("train" if options else "train@{epoch}", **options), ack="never")
    if beside:
        own = dm.train_dataloader
        dm.train_dataloader = lambda: CombinedLoader([own(), DataLoader(range(20), batch_size=1)], "min_size")
    if options:
        indexes = fill(dm.client, "train", 40)
    else:
        indexes = [index for epoch in range(2) for index in fill(dm.client, f"train@{epoch}", 12)]
    trained = []
    for last, found in ((3, None), (5, "step=3.ckpt"), (-1, "step=5.ckpt")):
        model = Both() if beside else Recorder()
        fitted = trainer(max_epochs=2, max_steps=last, callbacks=[Save(tmp_path)])
        fitted.fit(model, datamodule=dm, ckpt_path=found and tmp_path / found)
        trained.append((fitted.current_epoch, model.indexes()))
    assert [rows for _, rows in trained] == [indexes[:12], indexes[12:20], indexes[20:24]]
    assert fitted.current_epoch == 2


def test_a_replayed_stream_resumes_at_the_end_of_an_epoch_with_as_many_epochs_as_are_left(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A run that its number of steps ended does not know that its last batch was the epoch's last."""
    dm = data(train=stream("train", replay=True))
    indexes = fill(dm.client, "train", 12)
    trainer(max_epochs=3, max_steps=3, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    model = Recorder()
    resumed = trainer(max_epochs=3, callbacks=[Save(tmp_path)])
    resumed.fit(model, datamodule=dm, ckpt_path=tmp_path / "step=3.ckpt")
    assert (model.indexes(), resumed.current_epoch) == (indexes * 2, 3)
    for step in (4, 6, 8):
        model = Recorder()
        trainer(max_epochs=3).fit(model, datamodule=dm, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert model.indexes() == (indexes * 3)[4 * step :], step
    trainer(max_epochs=3, max_steps=6, callbacks=[Save(tmp_path / "again")]).fit(
        Recorder(), datamodule=dm, ckpt_path=tmp_path / "step=3.ckpt"
    )
    model, last = Recorder(), trainer(max_epochs=3)
    last.fit(model, datamodule=dm, ckpt_path=tmp_path / "again" / "step=6.ckpt")
    assert (model.indexes(), last.current_epoch) == (indexes, 3)


@pytest.mark.parametrize("options", [{}, {"num_batches": 3}], ids=["unknown", "known"])
def test_a_run_that_resumes_at_an_epochs_last_batch_logs_its_steps_as_if_it_had_not_stopped(
    data: Make, trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    class Steps(DummyLogger):
        """Keeps the steps that were logged."""

        def log_metrics(self, metrics: Any = None, step: int | None = None) -> None:
            if metrics and "one" in metrics:
                logged.append(step)

    class Logs(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("one", 1.0)
            return super().training_step(batch, batch_idx)

    logged: list[int | None] = []
    dm = data(train=stream("train@{epoch}", **options), ack="never")
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 12)
    trainer(max_epochs=1, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    fitted = trainer(max_epochs=2, log_every_n_steps=1, logger=Steps())
    fitted.fit(Logs(), datamodule=dm, ckpt_path=tmp_path / "step=3.ckpt")
    assert logged == [3, 4, 5]


def test_an_epoch_that_a_resumed_run_goes_on_with_begins_and_ends_once(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A run that its number of steps ended does not know that its last batch was the epoch's last."""

    class Hooks(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            called.append(("start", trainer.current_epoch))

        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            called.append(("end", trainer.current_epoch))

    called: list[tuple[str, int]] = []
    dm = data(train=stream("train@{epoch}"), ack="never")
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(2)]
    trainer(max_epochs=2, max_steps=3, callbacks=[Save(tmp_path)]).fit(Recorder(), datamodule=dm)
    model = Recorder()
    trainer(max_epochs=2, callbacks=[Hooks()]).fit(model, datamodule=dm, ckpt_path=tmp_path / "step=3.ckpt")
    assert model.indexes() == indexes[1]
    assert called == [("start", 1), ("end", 1)]
