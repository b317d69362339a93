# SPDX-License-Identifier: Apache-2.0
"""A stream that waits long says why it may never end: a full queue, a look-ahead, a partition that nobody makes."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from producing import fill, produce, produce_epochs, rows
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
        self.texts.append(re.sub(r"waited \d+\.\d s for", "waits for", record.getMessage()))
        self.then(self.texts[-1])


def waits(partition: str) -> str:
    """How a hint begins if there is no such partition."""
    label = partition.partition("@")[0]
    return f"stream {label!r} waits for 4 samples of {partition!r}: the partition is not in the queue, "


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
        "stream 'train' waits for 4 samples of 'train': 0 ready. This is batch 1 while batch 0 is untrained, because "
        "Lightning fetches one batch ahead when the length is unknown. If producers wait for that step (for new "
        "weights), this is a deadlock: set Stream(num_batches=...) or Trainer(limit_train_batches=...). If no more "
        "samples come, seal the partition: client.seal_partition('train')."
    ]


def test_where_nobody_leases_groups_workers_are_asked_for_first(data: Make, trainer: MakeTrainer, hints: Hints) -> None:
    sampler = tq.GroupSampler(groups=1, ahead=1)
    dm = data(train=Stream(partition="train", task="learn", fields=["x", "text"], sampler=sampler))
    dm.client.register_task("learn", sampler)
    dm.client.add_groups({"n": torch.arange(2)}, "train", tasks=["learn"])
    dm.client.seal_partition("train")

    def work(text: str = "") -> None:
        for lease in dm.client.lease("train"):
            lease.close(rows(4))

    work()
    hints.then = work
    trainer().fit(Recorder(), datamodule=dm)
    (text,) = hints.texts
    assert "1 waiting for a worker" in text
    assert ". No group is worked on: if none run, start workers that lease groups. This is batch 1 while" in text


def test_a_rank_that_knows_no_producers_calls_nothing_a_deadlock(
    data: Make, trainer: MakeTrainer, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_rank = rollout("on_train_start", lambda _: monkeypatch.setattr(Trainer, "is_global_zero", False))
    dm = data(train=stream("train"))
    dm.client.put(rows(4), partition_id="train")
    hints.then = lambda text: dm.client.seal_partition("train")
    trainer(callbacks=[other_rank]).fit(Recorder(), datamodule=dm)
    (text,) = hints.texts
    assert re.match(r"stream 'train' waits for 4 samples of 'train': 0 ready", text)
    assert "deadlock" not in text


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
        f"{waits('train')}which is empty. Lightning fetches the first batch before on_train_start and "
        f"on_train_epoch_start when the length is unknown. If Rollout.{hook} makes what is missing, this is a "
        "deadlock: make it in on_fit_start, or set Stream(num_batches=...)."
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
        f"{waits('val')}which holds 'train' (8 samples, sealed). This is the sanity check, which runs before "
        "training. If what it lacks is made later, this is a deadlock: set Trainer(num_sanity_val_steps=0)."
    ]


@pytest.mark.programs
@pytest.mark.parametrize(("count", "ready"), [(10, 2), (8, 0)], ids=["a rest", "no rest"])
def test_producers_that_ended_without_a_seal_are_told_to_seal(
    trainer: MakeTrainer, hints: Hints, count: int, ready: int
) -> None:
    def seal(text: str) -> None:
        if "have ended" in text:
            tq.get_client().seal_partition("train")

    hints.then, model = seal, Recorder()
    producer = Producer(target=produce, args={"partition": "train", "count": count, "seal": False})
    with TQDataModule(train=stream("train"), queue={"units": 1}, producers=[producer]) as dm:
        trainer().fit(model, datamodule=dm)
    assert len(model.indexes()) == count
    assert hints.texts[-1] == (
        f"stream 'train' waits for 4 samples of 'train': {ready} ready. All producers of this run have ended. None has "
        "sealed the partition. If nothing else fills it, seal it when it is complete: client.seal_partition('train')."
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
        "stream 'train' waits for 4 samples of 'train': 0 ready, 4 lack field 'rewards', nobody has put field "
        "'rewards' so far (there are 'x', 'text'). Check the producers, or compare the names of the fields."
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
        "stream 'train' waits for 4 samples of 'train': 0 ready, 8 lack field 'reward', nobody has put field "
        "'reward' so far (there are 'x', 'text'), the partition is sealed. Put what is missing, or clear those "
        "samples."
    ]


COMPARE = "compare the names in Stream(partition=...) and the producers."


@pytest.mark.parametrize(
    ("partition", "switch"),
    [
        ("train", "S"),
        ("train@{epoch}", "Add the callback PartitionSwitch(), which clears finished partitions, s"),
    ],
    ids=["one partition", "a partition per epoch"],
)
def test_a_queue_that_is_full_is_named_before_any_other_cause(
    trainer: MakeTrainer, hints: Hints, partition: str, switch: str
) -> None:
    read = partition.format(epoch=0)

    def put() -> None:
        client = tq.get_client()
        client.put(rows(8).set("image", torch.zeros(8, 1024)), partition_id=read)  # 32 KiB
        client.seal_partition(read)

    with TQDataModule(train=stream(partition), queue={"units": 1, "memory": "64KiB"}) as dm:
        dm.client.put({"x": torch.zeros(8, 1536)}, partition_id="old")  # 48 KiB
        hints.then = lambda text: dm.client.clear_partition("old") if "is full" in text else None
        writer = threading.Thread(target=put)
        writer.start()
        trainer().fit(Recorder(), datamodule=dm)
        clients = list(dm.client.get_stats()["clients"])
        writer.join()
    beginning, client, end = re.split(r"(TransferQueueClient_\S+)", hints.texts[-1])
    assert client in clients
    assert beginning == (
        f"stream 'train' waits for 4 samples of {read!r}: the partition is not in the queue, which holds 'old' (8 "
        "samples), and the queue is full: a put of "
    )
    assert end == (
        " waits for room for 32.23 KiB in a queue of 64 KiB: no task reads 8 samples. "
        f"{switch}et Stream(clear_consumed=True), raise memory, or raise put_timeout_s."
    )


def test_what_a_sanity_check_reads_is_to_be_put_before_what_fills_the_queue(trainer: MakeTrainer, hints: Hints) -> None:
    def put() -> None:
        tq.get_client().put(rows(8).set("image", torch.zeros(8, 1024)), partition_id="val")
        tq.get_client().seal_partition("val")

    streams = {"train": stream("train", clear_consumed=True), "val": stream("val", task="evaluate")}
    with TQDataModule(**streams, queue={"units": 1, "memory": "64KiB"}) as dm:
        dm.client.put(rows(4), partition_id="train")
        dm.client.put({"x": torch.zeros(8, 1536)}, partition_id="train@1")  # 48 KiB
        hints.then = lambda text: dm.client.clear_partition("train@1") if "is full" in text else None
        writer = threading.Thread(target=put)
        writer.start()
        trainer(num_sanity_val_steps=1, max_steps=1).fit(Recorder(), datamodule=dm)
        writer.join()
    assert hints.texts[0].endswith(
        "Put 'val' before what fills the queue, set Trainer(num_sanity_val_steps=0), or raise memory."
    )


@pytest.mark.programs
@pytest.mark.parametrize(
    ("target", "args", "holds", "epoch", "advice"),
    [
        (produce, {"partition": "train", "count": 8}, "'train' (8 samples, sealed)", 0, f"C{COMPARE[1:]}"),
        (
            produce_epochs, {"epochs": 1, "train": 4, "val": 1},
            "'train@0' (4 samples, sealed), 'val@0' (1 sample, sealed)", 1,
            "Make samples for epoch 1 as well, or lower max_epochs.",
        ),
    ],
    ids=["another name", "too few epochs"],
)  # fmt: skip
def test_a_partition_that_no_producer_made_is_compared_with_those_that_there_are(
    trainer: MakeTrainer,
    hints: Hints,
    target: Callable[..., None],
    args: dict[str, Any],
    holds: str,
    epoch: int,
    advice: str,
) -> None:
    hints.then = lambda text: fill(tq.get_client(), f"train@{epoch}", 4) if "have ended" in text else None
    producer = Producer(target=target, args=args)
    with TQDataModule(train=stream("train@{epoch}"), queue={"units": 1}, producers=[producer]) as dm:
        trainer(max_epochs=epoch + 1).fit(Recorder(), datamodule=dm)
    assert hints.texts[-1] == (
        f"{waits(f'train@{epoch}')}which holds {holds}. All producers of this run have ended. {advice}"
    )


@pytest.mark.parametrize("holds", ["", "train"])
def test_without_producers_the_ways_to_fill_the_queue_are_named(
    data: Make, trainer: MakeTrainer, hints: Hints, holds: str
) -> None:
    dm = data(train=stream("train@{epoch}"))
    if holds:
        fill(dm.client, holds, 8)
    hints.then = lambda text: fill(dm.client, "train@0", 8)
    trainer().fit(Recorder(), datamodule=dm)
    there = "which holds 'train' (8 samples, sealed)" if holds else "which is empty"
    assert hints.texts == [
        f"{waits('train@0')}{there}. This data module has no producers, so only this process (dm.client) or others "
        f"that join {dm.address} can fill it.{f' If it should be there, {COMPARE}' if holds else ''}"
    ]


STARTS = (
    r" Producer 'tail -f /dev/null' \(process 1 of 2\), pid \d+, started \d+ s ago, has not joined the queue yet, nor "
    r"have 1 other: it may still be importing\."
)


@pytest.mark.parametrize("of", ["train@{epoch}", "val"])
def test_while_producers_start_no_wait_is_called_a_deadlock(
    data: Make, trainer: MakeTrainer, hints: Hints, of: str
) -> None:
    """Neither the sanity check nor a hook that comes too late: the samples may still come."""
    partition = of.format(epoch=0)
    hints.then = lambda text: fill(tq.get_client(), partition, 8)
    producers = [Producer(target=["tail", "-f", "/dev/null"], count=2)]
    dm = data(train=stream("train@{epoch}"), val=stream("val", task="evaluate"), producers=producers)
    fill(dm.client, "val" if partition != "val" else "train@0", 8)
    trainer(callbacks=[rollout("on_train_start", lambda trainer: None)]).fit(Recorder(), datamodule=dm)
    (text,) = hints.texts
    assert re.fullmatch(re.escape(waits(partition)) + "which holds .* sealed\\)\\." + STARTS, text), text


def join_and_wait() -> None:
    tq.get_client().get_partition_list()
    threading.Event().wait()


@pytest.mark.programs
def test_a_producer_that_has_joined_and_put_nothing_is_said_to_run(trainer: MakeTrainer, hints: Hints) -> None:
    hints.then = lambda text: fill(tq.get_client(), "train@0", 8) if "is running" in text else None
    with TQDataModule(
        train=stream("train@{epoch}"), queue={"units": 1}, producers=[Producer(target=join_and_wait)]
    ) as dm:
        trainer().fit(Recorder(), datamodule=dm)
    assert hints.texts[-1] == f"{waits('train@0')}which is empty. 1 producer is running."


def test_a_partition_without_a_sample_is_reported_as_such(data: Make, trainer: MakeTrainer, hints: Hints) -> None:
    dm = data(train=stream("train"))
    dm.client.create_partition("train")
    hints.then = lambda text: fill(dm.client, "train", 8)
    trainer().fit(Recorder(), datamodule=dm)
    assert hints.texts == ["stream 'train' waits for 4 samples of 'train': 0 ready, nothing was published yet."]


@pytest.mark.parametrize(
    ("partition", "said"),
    [("train", "If Rollout.on_train_start makes what is missing, this is a deadlock"), ("val", "the sanity check")],
    ids=["hook", "sanity check"],
)
def test_prompts_without_answers_do_not_hide_a_deadlock(
    data: Make, trainer: MakeTrainer, hints: Hints, partition: str, said: str
) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    meta = {name: dm.client.put(rows(8).select("x"), partition_id=name) for name in ("train", "val")}

    def answer(text: str) -> None:
        for name in meta:
            dm.client.put(rows(8).select("text"), metadata=meta[name])
            dm.client.seal_partition(name)

    hints.then = answer
    check = {"num_sanity_val_steps": 2 if partition == "val" else 0}
    trainer(callbacks=[rollout("on_train_start", lambda trainer: None)], **check).fit(Recorder(), datamodule=dm)
    (text,) = hints.texts
    assert text.startswith(
        f"stream {partition!r} waits for 4 samples of {partition!r}: 0 ready, 8 lack field 'text', nobody has put "
        "field 'text' so far (there are 'x'). "
    )
    assert said in text


def test_a_validation_that_waits_for_a_missing_partition_repeats_the_reason(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(val=stream("val"), producers=[Producer(target=["true"])])
    hints.then = lambda text: fill(dm.client, "val", 4) if len(hints.texts) == 3 else None
    trainer().validate(Recorder(), datamodule=dm, verbose=False)
    reason = "The producers of this data module don't run in validate: set Producer(stages=['fit', 'validate'])."
    repeated = f"{waits('val')}which is empty. {reason}"
    assert reason in hints.texts[0]
    assert hints.texts[1:] == [repeated, repeated]


def test_a_wait_that_needs_no_hint_is_reported_by_the_run_alone_with_its_length(
    data: Make, trainer: MakeTrainer, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train", num_batches=1))  # whose length is known, so that no hint applies
    dm.client.put(rows(2), partition_id="train")

    def put(text: str) -> None:
        if sum("2 ready" in each for each in hints.texts) == 2:  # between two requests, a report knows no number
            dm.client.put(rows(2), partition_id="train")

    hints.then = put
    fitted = trainer()
    fitted.fit(Recorder(), datamodule=dm)
    assert fitted.train_dataloader.dataset.report_every_s == math.inf
    said = [record.getMessage() for record in caplog.records if "2 ready" in record.getMessage()]
    assert len(said) == 2
    assert all(
        re.fullmatch(
            r"stream 'train' waited \d\.\d s for 4 samples of 'train': 2 ready\. Check the producers, .*", text
        )
        for text in said
    )


def test_a_partition_that_an_earlier_fit_may_have_cleared_is_reported_as_such(
    data: Make, trainer: MakeTrainer, hints: Hints
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 8)
    trainer().fit(Recorder(), datamodule=dm)
    dm.client.clear_partition("train")
    hints.then = lambda text: fill(dm.client, "train", 8)
    trainer().fit(Recorder(), datamodule=dm)
    (text,) = hints.texts
    assert text.endswith("can fill it. An earlier fit of this process may have cleared it.")


def test_producers_of_a_second_fit_in_the_queue_of_the_first_one_are_told_what_it_holds(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=stream("train@{epoch}"), producers=[Producer(target=["true"])])
    for epoch in range(2):
        fill(dm.client, f"train@{epoch}", 4)
    told = (
        "The queue of an earlier fit holds 'train@0', 'train@1', and producers can't put into what is sealed. For a "
        "new queue, call close() of that fit's data module first."
    )
    trainer().fit(Recorder(), datamodule=dm)
    assert told not in caplog.messages
    trainer(max_epochs=2).fit(Recorder(), datamodule=dm)
    assert told in caplog.messages


def test_a_queue_that_is_full_of_batches_that_wait_for_their_ack_says_what_acknowledges_them(
    trainer: MakeTrainer, hints: Hints
) -> None:
    def put() -> None:
        put_six()
        tq.get_client().seal_partition("train")

    # A checkpoint by hand may come at any time, so nothing can be refused, and nobody says where an early one belongs.
    streamed = stream("train", clear_consumed=True)
    with TQDataModule(train=streamed, queue={"units": 1, "total_storage_size": 12}, ack="checkpoint") as dm:
        hints.then = lambda text: dm.client.clear_partition("train") if "is full" in text else None
        writer = threading.Thread(target=suppressed, args=(put,))
        writer.start()
        trainer().fit(Recorder(), datamodule=dm)
        writer.join()
    assert hints.texts[-1].endswith(
        "task 'learn' has not acknowledged 12 samples, among them 2 trained batches. Save checkpoints more often "
        "(ModelCheckpoint(every_n_train_steps=...)), acknowledge without a checkpoint (TQDataModule(ack='step')), "
        "raise total_storage_size, or raise put_timeout_s."
    )


def test_a_queue_that_is_full_of_batches_that_a_recorder_has_not_read_says_so(
    trainer: MakeTrainer, hints: Hints
) -> None:
    streamed = stream("train", clear_consumed=True)
    with TQDataModule(train=streamed, queue={"units": 1, "total_storage_size": 12}, ack="step") as dm:
        hints.then = lambda text: dm.client.clear_partition("train") if "copy" in text else None
        dm.client.register_task("copy", follows="learn")
        writer = threading.Thread(target=suppressed, args=(put_six,))
        writer.start()
        trainer().fit(Recorder(), datamodule=dm)
        writer.join()
    assert "Start the reader of task 'copy' again if it has ended, forget that task (lightning-tq f" in hints.texts[-1]
    assert "ack='step'" not in hints.texts[-1]


def put_six() -> None:
    for number in range(6):
        tq.get_client().put(rows(4, start=4 * number), partition_id="train")


def suppressed(act: Callable[[], None]) -> None:
    with suppress(tq.TransferQueueError):  # its partition was cleared
        act()
