# SPDX-License-Identifier: Apache-2.0
"""A fit in one process trains every sample once, in the partition that the template names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from producing import fill, rows
from recorders import Recorder

from lightning_tq import PartitionSwitch, QueueMonitor, TQDataModule
from tests.lightning.conftest import stream

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


def flat(lists: Any) -> list[int]:
    return [index for each in lists for index in each]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch": False}],
    ids=["thread", "workers", "persistent workers"],
)
def test_every_sample_is_trained_once_in_the_epoch_of_its_partition(
    data: Make, trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    dm = data(train=stream("train@{epoch}", micro_batch_size=2, **options))
    indexes = [fill(dm.client, f"train@{epoch}", 10) for epoch in range(3)]
    model = Recorder()
    trainer(max_epochs=3).fit(model, datamodule=dm)
    assert model.partitions() == ["train@0", "train@1", "train@2"]
    assert [len(batch) for _, batch in model.seen["train"]] == [2] * 15
    assert sorted(model.indexes()) == sorted(flat(indexes))


def test_a_stream_with_a_filter_trains_what_matches_and_leaves_the_rest(data: Make, trainer: MakeTrainer) -> None:
    first, second = stream(where="env == 'math'"), stream(where="env == 'code'", task="other")
    dm = data(train=first, val=second)
    meta = dm.client.put(rows(20), partition_id="train")
    meta.update_custom_meta([{"env": ("math", "code")[index % 2]} for index in range(20)])
    dm.client.set_custom_meta(meta)
    dm.client.seal_partition("train")
    model = Recorder()
    trainer(num_sanity_val_steps=0).fit(model, datamodule=dm)
    assert model.indexes() == meta.global_indexes[::2]
    assert model.indexes("val") == meta.global_indexes[1::2]


def test_validation_reads_the_partition_of_its_epoch_and_the_sanity_check_costs_it_nothing(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val@{epoch}", task="evaluate"))
    train = [fill(dm.client, f"train@{epoch}", 8) for epoch in range(2)]
    val = [fill(dm.client, f"val@{epoch}", 6) for epoch in range(2)]
    model = Recorder()
    trainer(max_epochs=2, num_sanity_val_steps=2).fit(model, datamodule=dm)
    assert model.indexes() == train[0] + train[1]
    assert model.indexes("val") == val[0] + val[0] + val[1]  # the first six rows are the sanity check


def test_validation_in_the_middle_of_an_epoch_leaves_the_training_iterator_alone(
    data: Make, trainer: MakeTrainer
) -> None:
    first, second = stream("val@{epoch}", task="a"), stream("other@{epoch}", task="b")
    dm = data(train=stream("train@{epoch}", num_batches=4), val=[first, second])
    train = [fill(dm.client, f"train@{epoch}", 16) for epoch in range(2)]
    val = {name: [fill(dm.client, f"{name}@{epoch}", 4) for epoch in range(2)] for name in ("val", "other")}
    model = Recorder()
    switch = PartitionSwitch()
    trainer(max_epochs=2, val_check_interval=2, num_sanity_val_steps=0, callbacks=[switch]).fit(model, datamodule=dm)
    assert model.indexes() == train[0] + train[1]
    assert model.indexes("val") == 2 * (val["val"][0] + val["other"][0]) + 2 * (val["val"][1] + val["other"][1])
    assert sorted(dm.client.get_partition_list()) == ["other@1", "train@1", "val@1"]


def test_without_a_partition_switch_templates_work_and_nothing_is_cleared(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{epoch}"))
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 4)
    trainer(max_epochs=2).fit(Recorder(), datamodule=dm)
    assert sorted(dm.client.get_partition_list()) == ["train@0", "train@1"]


def test_an_endless_partition_continues_where_the_last_epoch_stopped(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", micro_batch_size=2, num_batches=3))
    indexes = fill(dm.client, "train", 40)
    model = Recorder()
    trainer(max_epochs=3).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:18]
    trainer(max_epochs=1).fit(model, datamodule=dm)  # also exactly once with another Trainer
    assert model.indexes() == indexes[:24]


def test_limit_train_batches_loses_nothing_between_epochs(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    model = Recorder()
    trainer(max_epochs=3, limit_train_batches=2).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:24]


def test_what_lightning_fetched_ahead_is_trained_by_the_next_fit(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    model = Recorder()
    trainer(max_epochs=-1, max_steps=3).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:12]
    trainer(max_epochs=-1, max_steps=2).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:20]


def test_replay_reads_the_partition_again_every_epoch(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", replay=True))
    indexes = fill(dm.client, "train", 8)
    model = Recorder()
    trainer(max_epochs=3).fit(model, datamodule=dm)
    assert model.indexes() == indexes * 3


@pytest.mark.parametrize("suffix", ["", "@{epoch}", "@{global_step}"])
def test_overfit_batches_repeats_the_batches_of_the_first_epoch(data: Make, trainer: MakeTrainer, suffix: str) -> None:
    dm = data(train=stream(f"train{suffix}"), val=stream(f"val{suffix}", task="evaluate"))
    names = list(dict.fromkeys(suffix.format(epoch=number, global_step=2 * number) for number in range(4)))
    indexes = [fill(dm.client, f"train{name}", 40) for name in names]
    val = [fill(dm.client, f"val{name}", 40) for name in names]
    model = Recorder()
    trainer(max_epochs=3, overfit_batches=2, num_sanity_val_steps=0).fit(model, datamodule=dm)
    first_val = val[1 if "step" in suffix else 0]  # it is read after the first epoch's two steps
    assert (model.indexes(), model.indexes("val")) == (indexes[0][:8] * 3, first_val[:8] * 3)


def test_fast_dev_run_takes_one_batch(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    model = Recorder()
    trainer(fast_dev_run=True).fit(model, datamodule=dm)
    assert model.indexes() == indexes[:4]


def test_gradient_accumulation_steps_once_per_group(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    indexes = fill(dm.client, "train", 40)
    model = Recorder()
    fitted = trainer(accumulate_grad_batches=4)
    fitted.fit(model, datamodule=dm)
    assert (model.indexes(), fitted.global_step) == (indexes, 3)


def test_loaders_made_again_every_epoch_lose_no_batch(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{epoch}"))
    indexes = [fill(dm.client, f"train@{epoch}", 12) for epoch in range(3)]
    model = Recorder()
    trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model, datamodule=dm)
    assert model.indexes() == flat(indexes)


def test_fit_then_validate_test_and_predict_use_one_queue(data: Make, trainer: MakeTrainer) -> None:
    val, test = stream("val", task="evaluate"), stream("test", task="examine")
    dm = data(train=stream("train"), val=val, test=test, predict=stream("test", task="answer"))
    fill(dm.client, "train", 8)
    expected = {name: fill(dm.client, name, 6) for name in ("val", "test")}
    address = dm.address
    model, fitted = Recorder(), trainer(num_sanity_val_steps=0)
    fitted.fit(model, datamodule=dm)
    fitted.validate(model, datamodule=dm, verbose=False)
    fitted.test(model, datamodule=dm, verbose=False)
    assert flat(fitted.predict(model, datamodule=dm)) == expected["test"]
    assert (model.indexes("val"), model.indexes("test")) == (expected["val"] * 2, expected["test"])
    assert dm.address == address


def test_self_log_weights_by_rows_without_a_batch_size_and_without_a_warning(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    fill(dm.client, "train", 6)  # batches of 4 and 2 with means 1.5 and 4.5; the mean of all rows is 2.5
    fill(dm.client, "val", 5)  # batch means 1.5 and 4.0; the mean of all rows is 2.0
    fitted = trainer(num_sanity_val_steps=0)
    fitted.fit(Recorder(), datamodule=dm)
    assert {name: value.item() for name, value in fitted.callback_metrics.items()} == {
        "rows_mean": 2.5,
        "val_mean": 2.0,
    }


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_no_precision_takes_the_tensordict_apart(data: Make, trainer: MakeTrainer, precision: str) -> None:
    class AsItComes(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            data, _ = self._note("train", batch)
            loss: torch.Tensor = self.layer(data["x"].to(self.layer.weight.dtype)).mean()
            return loss

    dm = data(train=stream("train"))
    fill(dm.client, "train", 8)
    model = AsItComes()
    trainer(precision=precision).fit(model, datamodule=dm)
    assert model.types == [((4,), torch.float32, "BatchMeta")] * 2


def test_the_monitor_logs_waits_and_ready_samples(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=2))
    fill(dm.client, "train", 40)
    fitted = trainer(callbacks=[QueueMonitor()])
    fitted.fit(Recorder(), datamodule=dm)
    values = {name: value.item() for name, value in fitted.logged_metrics.items() if name.startswith("queue/")}
    assert set(values) == {"queue/wait_s", "queue/starved", "queue/ready", "queue/in_flight"}
    assert 0 <= values["queue/starved"] <= 1
    # Of 10 batches of 4, 2 are trained, up to 3 more are drawn ahead, and the rest is ready.
    assert values["queue/ready"] == 40 - 8 - 4 * values["queue/in_flight"]
    assert 0 <= values["queue/in_flight"] <= 3


def test_a_callback_reads_statistics_of_the_queue_and_of_each_stream(data: Make, trainer: MakeTrainer) -> None:
    class AtTheEnd(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            found.append(trainer.datamodule.stats())  # type: ignore[attr-defined]

    found: list[dict[str, Any]] = []
    dm = data(train=stream("train@{epoch}"))
    fill(dm.client, "train@0", 8)
    trainer(max_epochs=1, callbacks=[AtTheEnd()]).fit(Recorder(), datamodule=dm)
    (own,) = found[0]["streams"].values()
    assert (own["partition"], own["trained"], own["position"]["batch_index"]) == ("train@0", 2, 2)
    assert found[0]["partitions"]["train@0"]["samples"] == 8


def test_printing_the_datamodule_starts_nothing(data: Make) -> None:
    assert "Train dataloader: None" in str(TQDataModule(train=stream()))


def test_names_of_partitions_follow_the_epoch(data: Make, trainer: MakeTrainer) -> None:
    class Names(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            dm = trainer.datamodule
            self.seen.append((dm.partition("train"), dm.partition("val", 0)))

    dm = data(train=stream("train@{epoch}"), val=stream("val@{global_step}/{stage}", task="evaluate"))
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 8)
    for name in ("val@2/val", "val@4/val"):
        fill(dm.client, name, 4)
    names, model = Names(), Recorder()
    trainer(max_epochs=2, callbacks=[names], num_sanity_val_steps=0).fit(model, datamodule=dm)
    assert names.seen == [("train@0", "val@0/val"), ("train@1", "val@2/val")]
    assert model.partitions("val") == ["val@2/val", "val@4/val"]


def test_jagged_fields_arrive_as_jagged_tensors(data: Make, trainer: MakeTrainer) -> None:
    class Jagged(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            data, _ = batch
            self.types.append((data["x"].is_nested, data["x"].layout))
            self.log("one", 1.0, on_step=False, on_epoch=True)
            loss: torch.Tensor = self.layer(data["x"].values().reshape(-1, 4)).mean()
            return loss

    dm = data(train=stream(layout="jagged"))
    fill(dm.client, "train", 4)
    model = Jagged()
    trainer().fit(model, datamodule=dm)
    assert model.types == [(True, torch.jagged)]
