# SPDX-License-Identifier: Apache-2.0
"""At the end of a stream, the Trainer stops, continues with the next partition, or reports what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from producing import fill, rows
from recorders import Both, Recorder
from torch.utils.data import DataLoader

from lightning_tq import TQDataModule
from tests.lightning.conftest import stream
from transfer_queue import EndOfPartitionError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


def test_a_partition_read_to_its_end_stops_the_trainer(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    train, val = fill(dm.client, "train", 8), fill(dm.client, "val", 4)
    model = Recorder()
    fitted = trainer(max_epochs=-1, num_sanity_val_steps=0)
    fitted.fit(model, datamodule=dm)
    assert (model.indexes(), model.indexes("val"), fitted.current_epoch) == (train, val, 1)


def test_a_stage_in_a_template_makes_no_partition_per_epoch(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("{stage}@a"), val=stream("{stage}@a", task="evaluate"))
    train, val = fill(dm.client, "train@a", 8), fill(dm.client, "val@a", 4)
    model = Recorder()
    fitted = trainer(max_epochs=20, num_sanity_val_steps=0)
    fitted.fit(model, datamodule=dm)
    assert (model.indexes(), model.indexes("val"), fitted.current_epoch) == (train, val, 1)


@pytest.mark.parametrize(
    "options", [{"partition": "train@{global_step}"}, {"partition": "train@0", "replay": True}], ids=["step", "replay"]
)
def test_a_partition_without_a_batch_stops_the_trainer_if_the_next_epoch_would_read_it_again(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    dm = data(train=stream(tail="drop", **options))
    fill(dm.client, "train@0", 3)
    fitted = trainer(max_epochs=20)
    fitted.fit(Recorder(), datamodule=dm)
    assert (fitted.global_step, fitted.current_epoch) == (0, 0)
    assert "epoch 0 trains nothing: partition 'train@0' has no untrained batch for task 'learn'" in caplog.text


def test_the_partition_of_one_step_is_followed_by_the_next_steps(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train@{global_step}"))
    indexes = [fill(dm.client, f"train@{step}", 4) for step in range(3)]
    model = Recorder()
    trainer(max_epochs=3).fit(model, datamodule=dm)
    assert model.indexes() == indexes[0] + indexes[1] + indexes[2]


def test_an_epoch_that_another_fit_trained_is_reported_and_the_next_one_is_trained(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train@{epoch}"))
    indexes = [fill(dm.client, f"train@{epoch}", 8) for epoch in range(2)]
    trainer().fit(Recorder(), datamodule=dm)
    assert "trains nothing" not in caplog.text
    model = Recorder()
    trainer(max_epochs=2).fit(model, datamodule=dm)
    assert model.indexes() == indexes[1]
    assert [text for text in caplog.messages if "trains nothing" in text] == [
        "epoch 0 trains nothing: partition 'train@0' has no untrained batch for task 'learn'. Its samples were trained "
        "before, or fill no batch. To train them again, set Stream(replay=True) or another task."
    ]


def test_an_epoch_of_an_empty_partition_says_so(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 0)
    trainer().fit(Recorder(), datamodule=dm)
    assert (
        "epoch 0 trains nothing: partition 'train' is empty. Compare the names in Stream(partition=...) and the "
        "producers." in caplog.messages
    )


@pytest.mark.parametrize(
    ("tags", "there_are"), [(None, "They have no tags."), ({"kind": "math"}, "Their tags are 'kind'.")]
)
def test_an_epoch_whose_filter_no_sample_matches_says_which_tags_there_are(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, tags: dict[str, str] | None, there_are: str
) -> None:
    dm = data(train=stream("train", where="env == 'math'"))
    dm.client.put(rows(8), partition_id="train", tags=None if tags is None else [tags] * 8)
    dm.client.seal_partition("train")
    trainer().fit(Recorder(), datamodule=dm)
    assert (
        "epoch 0 trains nothing: none of the 8 samples of partition 'train' matches where=\"env == 'math'\". "
        f"{there_are}" in caplog.messages
    )


@pytest.mark.parametrize(
    ("samples", "more"),
    [
        (
            3,
            " So stream 'val' has no batch, and what it would log is missing. To read them, lower batch_size from 4 to "
            "at most 3 on each rank, or set tail='pad'.",
        ),
        (5, " With Stream(tail='pad') they are read, too."),
    ],
)
def test_a_validation_that_leaves_all_its_samples_over_says_what_would_read_them(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, samples: int, more: str
) -> None:
    dm = data(val=stream("val", task="evaluate", tail="drop"))
    fill(dm.client, "val", samples)
    trainer().validate(Recorder(), datamodule=dm)
    (said,) = [text for text in caplog.messages if "left over" in text]
    assert said.partition("(tail policy).")[2] == more


def test_too_few_samples_that_match_a_filter_are_not_said_to_be_none(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train", where="env == 'math'", tail="drop"))
    dm.client.put(rows(8), partition_id="train", tags=[{"env": "math"}] * 3 + [{"env": "code"}] * 5)
    dm.client.seal_partition("train")
    trainer().fit(Recorder(), datamodule=dm)
    assert "Its samples were trained before, or fill no batch." in caplog.text


def test_a_stream_shorter_than_num_batches_is_an_error(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", num_batches=5))
    fill(dm.client, "train", 12)
    with pytest.raises(EndOfPartitionError, match=r"num_batches=5.*ended after 3"):
        trainer().fit(Recorder(), datamodule=dm)


@pytest.mark.parametrize("limits", [{}, {"max_steps": 3}], ids=["whole epochs", "stopped within one"])
def test_validation_after_a_fit_reads_the_partition_of_the_last_epoch_that_was_trained(
    data: Make, trainer: MakeTrainer, limits: dict[str, Any]
) -> None:
    dm = data(train=stream("train@{epoch}"), val=stream("val@{epoch}", task="evaluate"))
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 8)
    val = [fill(dm.client, f"val@{epoch}", 4) for epoch in range(2)]
    fitted = trainer(max_epochs=2, num_sanity_val_steps=0, limit_val_batches=1, **limits)
    fitted.fit(Recorder(), datamodule=dm)
    model = Recorder()
    fitted.validate(model, datamodule=dm, verbose=False)
    trainer().validate(model, datamodule=dm, verbose=False)  # this Trainer trained nothing
    assert model.indexes("val") == val[1] + val[0]


def test_a_limit_that_the_stream_does_not_reach_is_reported(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train@{epoch}"))
    fill(dm.client, "train@0", 8)
    trainer(limit_train_batches=5).fit(Recorder(), datamodule=dm)
    assert "ended after 2 batches, but limit_train_batches expects 5" in caplog.text


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("beside", "replay"), [(2, None), (1, None), (5, None), (5, True)])
def test_a_stream_beside_a_longer_loader_is_refused_before_it_is_trained_twice_unless_it_replays(
    beside: int, replay: bool | None, accumulate: int, data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream("train@{epoch}", replay=replay))
    rows = [fill(dm.client, f"train@{epoch}", 8) for epoch in range(2)]
    own, model = dm.train_dataloader, Both()
    dm.train_dataloader = lambda: [own(), DataLoader(range(4 * beside), batch_size=4)]  # each may be the shorter one
    fitted = trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    if beside == 5 and not replay:
        with pytest.raises(ValueError, match=r"ended after 2 batches of partition 'train@0', .*replay=True"):
            fitted.fit(model, datamodule=dm)
        assert model.indexes() == rows[0]
    else:
        fitted.fit(model, datamodule=dm)
        assert model.indexes() == [each for one in rows for each in ((one * 3)[:20] if replay else one)]


@pytest.mark.parametrize(("num_batches", "validated"), [(None, 0), (2, 4)])
def test_a_stream_that_ends_before_the_loader_beside_it_is_reported_unless_its_length_is_known(
    num_batches: int | None, validated: int, data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train@{epoch}", num_batches=num_batches), val=stream("val", task="evaluate"))
    train, _ = fill(dm.client, "train@0", 8), fill(dm.client, "val", 4)
    own = dm.train_dataloader
    dm.train_dataloader = lambda: CombinedLoader([own(), DataLoader(range(20), batch_size=4)], "min_size")
    model = Both()
    trainer(num_sanity_val_steps=0).fit(model, datamodule=dm)
    assert (model.indexes(), len(model.indexes("val"))) == (train, validated)
    says = "ended after 2 batches, but the loaders beside it have 5. Lightning then skips the validation"
    assert (says in caplog.text) == (num_batches is None)
