# SPDX-License-Identifier: Apache-2.0
"""A stream that waits long says why it may never end: a look-ahead, a missing seal, a field that nobody puts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from producing import fill, produce, rows
from recorders import Recorder
from tensordict import TensorDict

import transfer_queue as tq
from lightning_tq import Producer, Stream, TQDataModule, run, wait_hints
from tests.lightning.conftest import stream

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Hints(logging.Handler):
    """The hints of a run. At each it calls ``then``, which ends the wait, so that no test waits for a deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.then: Callable[[str], Any] = lambda text: None

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.then(self.texts[-1])


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hints]:
    monkeypatch.setattr(wait_hints, "_LOOK_EVERY_S", 0.1)
    heard = Hints()
    run.logger.addHandler(heard)
    yield heard
    run.logger.removeHandler(heard)


class OnPolicy(Callback):
    """Makes batch k + 1 after step k, for 5 batches in all."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step < 5:
            trainer.datamodule.client.put(rows(4), partition_id="train")


def test_a_deadlock_with_producers_that_wait_for_a_step_is_explained(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(train=stream("train"))
    dm.client.put(rows(4), partition_id="train")
    hints.then = lambda text: dm.client.seal_partition("train")
    trainer().fit(Recorder(), datamodule=dm)
    assert hints.texts == [
        "stream 'train' waits for batch 1 while batch 0 is untrained, because Lightning fetches one batch ahead when "
        "the length is unknown. If producers wait for that step (for new weights), this is a deadlock: set "
        "Stream(num_batches=...) or Trainer(limit_train_batches=...). If no more samples come, seal the partition: "
        "client.seal_partition('train')."
    ]


@pytest.mark.parametrize(
    ("of_stream", "of_trainer"),
    [({"num_batches": 5}, {}), ({}, {"limit_train_batches": 5})],
    ids=["num_batches", "limit_train_batches"],
)
def test_with_a_known_length_such_producers_work(
    data: Make, trainer: MakeTrainer, of_stream: dict[str, Any], of_trainer: dict[str, Any]
) -> None:
    dm = data(train=stream("train", **of_stream))
    dm.client.put(rows(4), partition_id="train")
    model = Recorder()
    trainer(callbacks=[OnPolicy()], **of_trainer).fit(model, datamodule=dm)
    assert len(model.indexes()) == 20


def rollout(hook: str, generate: Callable[[Trainer], Any]) -> Callback:
    """A user's callback of that name, with one hook."""

    def call(self: Any, trainer: Trainer, *_: Any) -> None:
        generate(trainer)

    cls: type[Callback] = type("Rollout", (Callback,), {hook: call})
    return cls()


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
def test_a_hook_that_is_too_late_for_the_first_batch_is_named(
    data: Make, trainer: MakeTrainer, hints: Hints, hook: str
) -> None:
    dm = data(train=stream("train"))
    hints.then = lambda text: fill(dm.client, "train", 8)
    trainer(callbacks=[rollout(hook, lambda trainer: None)]).fit(Recorder(), datamodule=dm)
    assert hints.texts == [
        "stream 'train' waits for its first batch, which Lightning fetches before on_train_start and "
        f"on_train_epoch_start when the length is unknown. If Rollout.{hook} makes its samples, this is a deadlock: "
        "make them in on_fit_start, or set Stream(num_batches=...)."
    ]


@pytest.mark.parametrize(
    ("hook", "options"),
    [("on_fit_start", {}), ("on_train_start", {"num_batches": 2}), ("on_train_epoch_start", {"num_batches": 2})],
)
def test_generating_where_that_hint_says_works(
    data: Make, trainer: MakeTrainer, hook: str, options: dict[str, Any]
) -> None:
    model = Recorder()
    callback = rollout(hook, lambda trainer: fill(trainer.datamodule.client, "train", 8))
    trainer(callbacks=[callback]).fit(model, datamodule=data(train=stream("train", **options)))
    assert len(model.indexes()) == 8


def test_a_sanity_check_before_there_are_validation_samples_is_explained(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    fill(dm.client, "train", 8)
    hints.then = lambda text: fill(dm.client, "val", 4)
    trainer().fit(Recorder(), datamodule=dm)
    assert hints.texts == [
        "stream 'val' waits for more of partition 'val', but this is the sanity check, which runs before training. If "
        "producers make validation samples later, this is a deadlock: set Trainer(num_sanity_val_steps=0)."
    ]


@pytest.mark.parametrize("count", [10, 8], ids=["a rest", "no rest"])
def test_producers_that_ended_without_a_seal_are_told_to_seal(trainer: MakeTrainer, hints: Hints, count: int) -> None:
    def seal(text: str) -> None:
        if "have ended" in text:
            tq.get_client().seal_partition("train")

    hints.then, model = seal, Recorder()
    producer = Producer(target=produce, args={"partition": "train", "count": count, "seal": False})
    with TQDataModule(train=stream("train"), queue={"units": 1}, producers=[producer]) as dm:
        trainer().fit(model, datamodule=dm)
    assert len(model.indexes()) == count
    assert hints.texts[-1] == (
        "stream 'train' waits for more of partition 'train', but all producers of this run have ended and none has "
        "sealed it. If nothing else fills it, seal it when it is complete: client.seal_partition('train')."
    )


def test_a_field_that_nobody_has_put_is_named_with_those_that_there_are(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(train=Stream(partition="train", task="learn", fields=["x", "text", "rewards"], batch_size=4))
    meta = dm.client.put(rows(4), partition_id="train")

    def put(text: str) -> None:
        dm.client.put(TensorDict({"rewards": torch.ones(4)}, batch_size=[4]), metadata=meta)
        dm.client.seal_partition("train")

    hints.then = put
    trainer().fit(Recorder(), datamodule=dm)
    assert hints.texts == [
        "stream 'train' waits for more of partition 'train', but none of its samples has 'rewards' so far; they have "
        "'x', 'text'. Check the name in Stream(fields=...), and who puts it."
    ]


def test_a_sealed_partition_that_lacks_a_field_is_not_told_to_seal(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(train=Stream(partition="train", task="learn", fields=["x", "text", "reward"], batch_size=4))
    meta = dm.client.put(rows(8), partition_id="train")
    dm.client.seal_partition("train")
    hints.then = lambda text: dm.client.put(TensorDict({"reward": torch.ones(8)}, batch_size=[8]), metadata=meta)
    model = Recorder()
    trainer().fit(model, datamodule=dm)
    assert len(model.indexes()) == 8
    assert hints.texts == [
        "stream 'train' waits for more of partition 'train', but it is sealed and 8 samples lack field 'reward'. Put "
        "what is missing, or clear those samples."
    ]
