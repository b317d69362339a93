# SPDX-License-Identifier: Apache-2.0
"""Streams of whole groups: what a batch is, heads, versions and resumes."""

from __future__ import annotations

import pickle
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grouping import FIELDS, Make, MakeTrainer, Steps, add, groups_of, members, worker
from lightning.pytorch import Callback, Trainer

import transfer_queue as tq
from lightning_tq import (
    PartitionSwitch,
    PublishWeights,
    QueueMonitor,
    Stream,
    TQBatch,
    TQCheckpoint,
    TQDataModule,
)
from transfer_queue import GroupSampler
from transfer_queue.errors import InvalidRequestError, SamplerError

# ---- batches ----


def test_a_batch_is_whole_groups_and_micro_batches_cut_its_rows(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=groups_of(2, micro_batch_size=3))
    add(dm.client, 4)
    model = Steps()
    with worker(sizes=lambda number: number + 1):
        trainer().fit(model, datamodule=dm)
    assert model.groups == [[0, 1, 1], [2, 2, 2], [3, 3, 3], [3]]


def test_without_micro_batches_a_step_gets_all_rows_of_its_groups(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=groups_of(2, num_batches=2))
    add(dm.client, 4)
    model = Steps()
    with worker(sizes=lambda number: number + 1):
        trainer().fit(model, datamodule=dm)
    assert model.groups == [[0, 1, 1], [2, 2, 2, 3, 3, 3, 3]]


@pytest.mark.parametrize(("micro", "cut"), [(2, [[2, 1], [2, 2]]), (3, [[2, 1], [3, 1]]), (4, [[3], [4]])])
def test_ranks_cut_batches_of_different_sizes_into_equally_many_micro_batches(
    data: Make, micro: int, cut: list[list[int]]
) -> None:
    client = data().client
    client.register_task("learn", GroupSampler(groups=2, dp_size=2), dp_size=2, tail="drop")
    add(client, 2)
    with worker(sizes=lambda number: number + 3):
        pass
    found = []
    for rank in range(2):
        dataset = tq.StreamingDataset(None, None, micro, FIELDS, "train", "learn", dp_rank=rank, dp_size=2)
        found.append([meta.size for _, meta in dataset])
        dataset.close()
    assert found == cut


def test_a_rank_with_fewer_rows_than_others_have_micro_batches_says_so(data: Make) -> None:
    client = data().client
    client.register_task("learn", GroupSampler(groups=2, dp_size=2), dp_size=2, tail="drop")
    add(client, 2)
    with worker(sizes=lambda number: 1 + 7 * number):
        pass
    dataset = tq.StreamingDataset(None, None, 2, FIELDS, "train", "learn", dp_rank=0, dp_size=2)
    with pytest.raises(InvalidRequestError, match="got 1 rows of a round in which another one got 8"):
        list(dataset)
    dataset.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 4}, "batch_size=4 has no effect with a GroupSampler"),
        ({"tail": "pad"}, "would count twice"),
        ({"head_fields": []}, "head_fields must be a list of field names, at least one"),
        ({"micro_batch_size": 0}, "micro_batch_size must be an int of at least 1"),
    ],
)
def test_a_stream_of_groups_that_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        groups_of(2, **options)


def test_only_a_task_with_a_group_sampler_needs_no_batch_size(data: Make) -> None:
    client = data().client
    with pytest.raises(InvalidRequestError, match="batch_size must be an int of at least 1, got None"):
        Stream(partition="train", task="sft", fields=["x"])
    with pytest.raises(InvalidRequestError, match="task 'sft' needs a batch_size"):
        client.get_meta(["x"], None, "train", task_name="sft")
    with pytest.raises(SamplerError, match="would count twice"):
        client.register_task("learn", GroupSampler(groups=2), tail="pad")
    client.register_task("learn", GroupSampler(groups=2))
    add(client, 2)
    with worker():
        pass
    assert client.get_meta(["x"], None, "train", task_name="learn").size == 4


# ---- versions ----


def test_a_lease_has_the_version_that_trains_when_it_is_answered(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=groups_of(2, "train@{epoch}", of_ahead=0, of_max_staleness=0, of_stale="drop", num_batches=2))
    for epoch in range(2):
        add(dm.client, 4, f"train@{epoch}")
    model, fit = Steps(), trainer(max_epochs=2, callbacks=[PublishWeights(), QueueMonitor()])
    with worker(partition="train@*") as leased:  # it asks before there is a version
        fit.fit(model, datamodule=dm)
    names = ("staleness/mean", "staleness/max", "staleness/dropped", "queue/staleness")
    assert [float(fit.logged_metrics[name]) for name in names] == [0.0] * 4
    assert [version for _, version in leased] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(model.groups) == 4


def test_a_resumed_run_says_its_version_before_it_admits_groups(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    path, versions = str(tmp_path / "a.ckpt"), []
    for epochs, resumes in ((1, None), (2, path)):
        with TQDataModule(train=groups_of(2, "train@{epoch}"), queue={"units": 1}) as dm:
            add(dm.client, 4, f"train@{epochs - 1}")
            fit = trainer(max_epochs=epochs, callbacks=[PublishWeights()])
            with worker(partition="train@*") as leased:
                fit.fit(Steps(), datamodule=dm, ckpt_path=resumes)
            fit.save_checkpoint(path)
            versions.append([version for _, version in leased])
    assert versions[0][0] == 0
    assert versions[1][0] == 2, "the queue is a new one, where nobody has trained before"
    assert sorted(versions[1]) == versions[1]


def test_a_new_run_in_a_queue_may_begin_before_the_version_of_the_last_one(data: Make, trainer: MakeTrainer) -> None:
    class Named(PartitionSwitch):
        def partition(self, stream: Stream, **_: Any) -> str:
            return f"run{number}"

        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            add(dm.client, 4, f"run{number}")

    dm = data(train=groups_of(2, "train"))
    for number in range(2):
        with worker(partition=f"run{number}") as leased:
            trainer(callbacks=[PublishWeights(), Named()]).fit(Steps(), datamodule=dm)
        assert leased[0][1] == 0


# ---- heads ----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_a_row_of_heads_for_each_group_of_a_micro_batch(
    data: Make, trainer: MakeTrainer, workers: int
) -> None:
    dm = data(train=groups_of(2, micro_batch_size=3, head_fields=["image", "prompt"], num_workers=workers))
    add(dm.client, 4)
    model = Steps()
    with worker(sizes=lambda number: number + 1):
        trainer().fit(model, datamodule=dm)
    assert model.groups == [[0, 1, 1], [2, 2, 2], [3, 3, 3], [3]]
    for groups, heads in zip(model.groups, model.heads, strict=True):
        own = list(dict.fromkeys(groups))
        assert heads["image"].tolist() == [[3.0 * n, 3.0 * n + 1, 3.0 * n + 2] for n in own]
        assert list(heads["prompt"]) == [f"prompt {n}" for n in own]


def test_heads_go_with_a_batch_that_is_moved_pickled_or_cut(data: Make) -> None:
    client = data().client
    client.register_task("learn", GroupSampler(groups=3))
    add(client, 3)
    with worker():
        pass
    meta = client.get_meta(["x"], None, "train", task_name="learn")
    batch = TQBatch(client.get_data(meta), meta, heads=client.get_heads(meta, "image"))
    picked = pickle.loads(pickle.dumps(batch.to("cpu").select([4, 5, 0])))
    assert picked.meta.group_index == [0, 0, 1]
    assert [row[0].item() for row in picked.heads["image"].unbind()] == [6.0, 0.0]
    assert [row[0].item() for row in picked.data["x"].unbind()] == [200.0, 201.0, 0.0]


# ---- what is said of them ----


def test_the_fit_report_says_what_became_of_the_groups(
    data: Make, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    dm = data(train=groups_of(2, of_gate="max(x) > 0"))
    add(dm.client, 4)
    model = Steps()
    leased = []
    with caplog.at_level("INFO"):
        client, thread = dm.client, threading.Thread(target=lambda: trainer().fit(model, datamodule=dm))
        thread.start()
        for lease in client.leases("train", timeout_s=30):
            leased.append(lease.key)
            if lease.key == "q3":
                lease.reject("too easy")
            else:
                lease.close(members(lease.key, 2), tags=[{"x": int(lease.key[1:])}] * 2)
        thread.join(30)
    assert (leased, model.groups) == (["q0", "q1", "q2", "q3"], [[1, 1, 2, 2]])
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Queue: 1 batch")]
    assert "1 rejected by max(x) > 0, 1 rejected by too easy." in said[0]


def test_statistics_name_the_states_the_oldest_work_and_the_slots_of_groups(data: Make) -> None:
    client = data().client
    client.register_task("learn", GroupSampler(groups=2))
    add(client, 6)
    held = client.lease("train", 3)
    held[0].close(members("q0", 2))
    groups = client.get_stats()["partitions"]["train"]["groups"]
    oldest = groups.pop("oldest")
    assert groups == {
        "added": 6, "states": {"waiting": 3, "running": 2, "closed": 1}, "rejected": {}, "left": {},
        "slots": {"learn": {"used": 3, "here": 3, "budget": 4, "per_step": 2, "limits": ["ahead"]}},
    }  # fmt: skip
    assert (oldest["worker"].partition(".")[0], oldest["key"]) == (client.client_id, "q1")
    with pytest.raises(tq.BatchTimeoutError, match=r"for 2 groups of 'train': 1 ready, 2 running \(oldest 0 s, "):
        client.get_meta(["x"], None, "train", task_name="learn", timeout_s=0.2)


# ---- resumes ----


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_groups_that_were_under_work_at_a_checkpoint_are_trained_once_after_it(
    trainer: MakeTrainer, tmp_path: Path, closed: int
) -> None:
    """The trainer fails, and the queue is gone. When it was saved, leases were held, groups closed, or drawn ahead."""
    path = str(tmp_path / "a.ckpt")

    class Saves(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            for lease in trainer.datamodule.client.lease("train", 4):
                lease.close(members(lease.key, 2))

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                held.extend(trainer.datamodule.client.lease("train", 2))  # the two that may begin
                held[0].put(members(held[0].key, 2))
                for lease in held[2 - closed :]:
                    lease.close(members(lease.key, 2) if lease is held[1] else None)
                trainer.save_checkpoint(path)
                raise RuntimeError("the trainer falls over")

    def stream_of() -> Stream:
        return groups_of(2, num_batches=6)

    held: list[tq.Lease] = []
    first, second = Steps(), Steps()
    with TQDataModule(train=stream_of(), queue={"units": 1}) as dm:
        add(dm.client, 12)
        with pytest.raises(RuntimeError, match="falls over"):
            trainer(callbacks=[TQCheckpoint(), PublishWeights(), Saves()]).fit(first, datamodule=dm)
    before = [number for batch in first.groups for number in batch]
    assert (before, [lease.key for lease in held]) == ([0, 0, 1, 1, 2, 2, 3, 3], ["q4", "q5"])
    with TQDataModule(train=stream_of(), queue={"units": 1}) as dm:

        class Works(Callback):
            def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
                stack.enter_context(worker())

        fit = trainer(callbacks=[TQCheckpoint(), PublishWeights(), Works()])
        with ExitStack() as stack:
            fit.fit(second, datamodule=dm, ckpt_path=path)
    after = [number for batch in second.groups for number in batch]
    assert sorted(after) == [number for number in range(4, 12) for _ in range(2)]
    assert fit.global_step == 6


# ---- ranks ----


@pytest.mark.programs
@pytest.mark.timeout(170)
def test_ranks_share_the_groups_of_a_step_and_no_group_is_older_than_the_bound(run_ranks: Any) -> None:
    code, output, ranks = run_ranks("callbacks_script.py", "groups", "ddp", "2", "LOGS")
    assert code == 0, output
    (first, (steps, oldest)), (second, _) = (rank[0] for rank in ranks)
    assert (steps, oldest) == (3, 0.0)
    own = [[sorted(set(batch)) for batch in rank] for rank in (first, second)]
    assert [len(batch) for rank in own for batch in rank] == [2] * 6, "half of each step's four groups"
    trained = sorted(number for rank in (first, second) for batch in rank for number in batch)
    assert trained == [number for number in range(12) for _ in range(1 + number % 3)]


# ---- partitions of an epoch ----


@pytest.mark.parametrize("clears", [False, True])
def test_groups_that_a_limit_leaves_hold_no_slots_of_the_next_epoch(
    data: Make, trainer: MakeTrainer, clears: bool
) -> None:
    dm = data(train=groups_of(1, "train@{epoch}"), val=groups_of(1, "val@{epoch}", "judge"))
    for epoch in range(2):
        add(dm.client, 2 if epoch else 6, f"train@{epoch}")
        add(dm.client, 2 if epoch else 6, f"val@{epoch}", tasks=["judge"])
    model, switch = Steps(), PartitionSwitch(clear_finished=clears)
    limits = {"limit_train_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    with worker(partition=["train@*", "val@*"]):
        trainer(max_epochs=2, callbacks=[switch], **limits).fit(model, datamodule=dm)
    assert model.partitions() == ["train@0", "train@1"]
    assert [number for own in model.groups for number in dict.fromkeys(own)] == [0, 1, 0, 1]
