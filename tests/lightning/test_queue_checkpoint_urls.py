# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Trainer at a URL have their queue there, too; in the background, if asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from producing import fill
from recorders import Recorder

from lightning_tq import TQCheckpoint, TQDataModule
from tests.flaky_files import FlakyFileSystem, flaky_files
from tests.lightning.conftest import stream
from transfer_queue import CheckpointError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
KEPT = "flaky://kept"

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    with flaky_files(monkeypatch) as found:
        yield found


def names() -> set[str]:
    fs = fsspec.filesystem("flaky")
    return {name.rsplit("/", 1)[1] for name in fs.ls("/kept", detail=False)} if fs.exists("/kept") else set()


def saving(asynchronous: bool, folder: str | Path = KEPT, **options: Any) -> list[Callback]:
    return [TQCheckpoint(asynchronous), ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **options)]


@pytest.mark.programs
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_resumed_run_goes_on_from_a_url(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem], asynchronous: bool
) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    files.failures = 3
    fitted = trainer(callbacks=saving(asynchronous, save_top_k=-1), enable_checkpointing=True, max_steps=5)
    fitted.fit(Recorder(), datamodule=dm)
    dm.close()
    assert names() == {f"step={step}.ckpt{suffix}" for step in range(1, 6) for suffix in ("", ".tq")}
    for step in (2, 5):
        model = Recorder()
        with TQDataModule(train=stream("train")) as again:
            trainer().fit(model, datamodule=again, ckpt_path=f"{KEPT}/step={step}.ckpt")
        assert model.indexes() == indexes[4 * step :]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_removed_checkpoint_takes_its_queue_along(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem], asynchronous: bool
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 20)
    trainer(callbacks=saving(asynchronous), enable_checkpointing=True, max_steps=4).fit(Recorder(), datamodule=dm)
    assert names() == {"step=4.ckpt", "step=4.ckpt.tq"}


class Watching(Callback):
    """Keeps copies from starting after step 2, and lets them at the start of batch 3; what is there meanwhile."""

    def __init__(self, files: type[FlakyFileSystem]) -> None:
        self.files = files
        self.seen: dict[int, set[str]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            while "step=1.ckpt" not in names():
                threading.Event().wait(0.01)
            self.files.open_gate.clear()
        self.seen[batch_idx] = names()
        if batch_idx == 1:
            return
        if batch_idx == 2:
            self.files.open_gate.set()


def test_training_goes_on_while_a_checkpoint_is_copied(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem]
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    watching = Watching(files)
    fitted = trainer(callbacks=[watching, *saving(True)], enable_checkpointing=True, max_steps=4)
    fitted.fit(Recorder(), datamodule=dm)
    assert watching.seen[0] == set()
    assert "step=2.ckpt" not in watching.seen[2]  # its queue was kept from being copied, and batch 2 began
    assert {"step=1.ckpt", "step=1.ckpt.tq"} <= watching.seen[2]  # the one before stays until it is whole
    assert names() == {"step=4.ckpt", "step=4.ckpt.tq"}


def test_a_batch_is_acknowledged_when_its_checkpoint_is_surely_written(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """In the background that is one checkpoint later."""
    in_flight = {}
    for asynchronous in (False, True):
        dm = data(train=stream(f"train{asynchronous}", num_batches=4))
        fill(dm.client, f"train{asynchronous}", 16)
        callbacks = saving(asynchronous, tmp_path / str(asynchronous))
        trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=4).fit(Recorder(), datamodule=dm)
        task = dm.client.get_stats()["partitions"][f"train{asynchronous}"]["tasks"]["learn"]
        in_flight[asynchronous] = task["in_flight"]
        dm.close()
    assert in_flight == {False: 0, True: 1}


def test_a_copy_that_fails_in_the_background_ends_the_run(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem]
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    files.failures = 1000
    fitted = trainer(callbacks=saving(True), enable_checkpointing=True, max_steps=5)
    with pytest.raises(CheckpointError, match=r"step=1.ckpt.tq could not be written: ConnectionResetError"):
        fitted.fit(Recorder(), datamodule=dm)
    assert names() == set()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("tells_times", [True, False], ids=["times", "one second"])
@pytest.mark.parametrize(("step", "kept"), [(1, "there is none"), (2, "it is the one from before")])
def test_a_checkpoint_that_may_not_be_written_is_an_error_and_its_batches_stay(
    data: Make,
    trainer: MakeTrainer,
    files: type[FlakyFileSystem],
    asynchronous: bool,
    tells_times: bool,
    step: int,
    kept: str,
) -> None:
    files.tells_times = tells_times

    class Forbid(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == step - 1:
                for each in callbacks:
                    if isinstance(each, TQCheckpoint):
                        each.finish_writing()
                files.forbidden = "last.ckpt"

        def on_exception(self, *_: Any) -> None:
            left.append(dm.client.get_stats()["partitions"]["train"]["samples"])

    left: list[int] = []
    dm = data(train=stream("train", clear_consumed=True))
    fill(dm.client, "train", 40)
    saves = ModelCheckpoint(KEPT, save_top_k=0, save_last=True, every_n_train_steps=1)
    callbacks: list[Callback] = [Forbid(), *([TQCheckpoint(True)] if asynchronous else []), saves]
    fitted = trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=5)
    with pytest.raises(CheckpointError, match=rf"last.ckpt was not written: {kept}. Lightning's writer ignores"):
        fitted.fit(Recorder(), datamodule=dm)
    assert left == [40 - 4 * (step - 1)]


def test_a_checkpoint_that_was_written_in_the_same_second_as_the_one_before_is_there(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem]
) -> None:
    files.tells_times = False
    dm, model = data(train=stream("train", clear_consumed=True)), Recorder()
    indexes = fill(dm.client, "train", 40)
    saves = ModelCheckpoint(KEPT, save_top_k=0, save_last=True, every_n_train_steps=1)
    trainer(callbacks=[saves], enable_checkpointing=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes


def test_a_checkpoint_under_way_is_finished_when_training_fails(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem]
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    fitted = trainer(callbacks=saving(True), enable_checkpointing=True, max_steps=5)
    with pytest.raises(ValueError, match="failed on request"):
        fitted.fit(Recorder(fail_at=3), datamodule=dm)
    assert names() == {"step=3.ckpt", "step=3.ckpt.tq"}


class WritesOnEveryRank(SingleDeviceStrategy):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


def test_a_strategy_that_writes_on_several_ranks_is_refused_in_the_background(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem]
) -> None:
    dm = data(train=stream("train"))
    fitted = trainer(callbacks=saving(True), enable_checkpointing=True, strategy=WritesOnEveryRank("cpu"))
    with pytest.raises(ValueError, match=r"WritesOnEveryRank does so on several. Use asynchronous=False"):
        fitted.fit(Recorder(), datamodule=dm)


def test_a_link_to_what_is_not_written_yet_is_refused(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem], tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    fitted = trainer(callbacks=saving(True, tmp_path, save_last="link"), enable_checkpointing=True)
    with pytest.raises(ValueError, match="Use save_last=True, or asynchronous=False"):
        fitted.fit(Recorder(), datamodule=dm)


class Remembers(Callback):
    """Has state that is no tensor, and changes."""

    def __init__(self) -> None:
        self.steps: set[int] = set()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.add(batch_idx)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "range": range(3)}


def test_a_checkpoint_in_the_background_holds_the_state_of_its_moment(
    data: Make, trainer: MakeTrainer, files: type[FlakyFileSystem], tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    callbacks = [Remembers(), *saving(True, tmp_path, save_top_k=-1)]
    trainer(callbacks=callbacks, enable_checkpointing=True, max_steps=3).fit(Recorder(), datamodule=dm)
    for step in (1, 2, 3):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)["callbacks"]["Remembers"]
        assert saved == {"steps": set(range(step)), "range": range(3)}
