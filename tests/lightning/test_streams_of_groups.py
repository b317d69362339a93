# SPDX-License-Identifier: Apache-2.0
"""Streams of whole groups: what a batch is, when a group's slot is free, heads, versions and resumes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, Trainer
from producing import rows
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import (
    FabricLoader,
    PartitionSwitch,
    PublishWeights,
    QueueMonitor,
    Stream,
    TQBatch,
    TQCheckpoint,
    TQDataModule,
    wait_hints,
)
from tests.integration.clients import connect
from transfer_queue import GroupSampler
from transfer_queue.errors import InvalidRequestError, SamplerError

FIELDS = ["x", "text"]
Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


def groups_of(groups: int = 2, partition: str = "train", task: str = "learn", **options: Any) -> Stream:
    """A stream of whole groups; options of its sampler begin with ``of_``."""
    own = {name.removeprefix("of_"): options.pop(name) for name in list(options) if name.startswith("of_")}
    sampler = GroupSampler(groups=groups, **own)
    return Stream(partition=partition, task=task, fields=FIELDS, sampler=sampler, **options)


def add(client: tq.TransferQueueClient, count: int, partition: str = "train", seal: bool = True, **terms: Any) -> None:
    """Groups q0, q1, ... whose heads have an "image" and a "prompt"."""
    heads = {
        "image": torch.arange(count * 3.0).view(count, 3),
        "prompt": [f"prompt {number}" for number in range(count)],
    }
    client.add_groups(heads, partition, keys=[f"q{n}" for n in range(count)], **{"tasks": ["learn"], **terms})
    if seal:
        client.seal_partition(partition)


def members(key: str, count: int) -> Any:
    """Rows with the number of their group, so that a test sees whose they are."""
    return rows(count, start=100 * int(key[1:]))


@contextmanager
def worker(
    sizes: Callable[[int], int] = lambda number: 2, has_all: bool = True, **asked: Any
) -> Iterator[list[tuple[str, Any]]]:
    """A thread that leases each group and closes it with so many rows. Gives (key, version) of its leases.

    ``has_all``: whether it leases all groups, however long after the body. Else it ends with the body.
    """
    client, leased, failed = connect("worker", tq.init()), list[tuple[str, Any]](), list[BaseException]()
    on_lease = asked.pop("on_lease", lambda: None)

    def work() -> None:
        try:
            for lease in client.leases(asked.pop("partition", "train"), timeout_s=30, **asked):
                with lease:  # a group that is left over meanwhile ends the block
                    on_lease()
                    leased.append((lease.key, lease.version))
                    lease.close(members(lease.key, sizes(int(lease.key[1:]))))
        except BaseException as error:
            if has_all:
                failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield leased
    finally:
        if has_all:
            thread.join(30)
        client.close()
        thread.join(30)
    assert (failed, thread.is_alive()) == ([], False)


class Steps(Recorder):
    """Also records the groups of each batch, and what it was given of their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[int]] = []
        self.heads: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.groups.append((batch.data["x"][:, 0] / 100).int().tolist())
        self.heads.append(batch.heads)
        return super().training_step(batch, batch_idx)


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


# ---- slots ----


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_slot_is_free_once_the_step_with_its_group_is_done_and_never_before(
    data: Make, trainer: MakeTrainer, prefetch: bool, workers: int
) -> None:
    dm = data(
        train=groups_of(2, of_ahead=0, micro_batch_size=1, num_batches=16, prefetch=prefetch, num_workers=workers)
    )
    add(dm.client, 8)
    fit, model = trainer(accumulate_grad_batches=4), Steps()
    steps: list[int] = []
    with worker(on_lease=lambda: steps.append(fit.global_step)):
        fit.fit(model, datamodule=dm)
    assert [number for batch in model.groups for number in batch] == [n for n in range(8) for _ in range(2)]
    assert all(done >= group // 2 for group, done in enumerate(steps)), steps


def test_the_last_step_of_a_partition_frees_its_slots_for_the_next_one(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=groups_of(2, "train@{epoch}"), ack="never")
    for epoch in range(3):
        add(dm.client, 4, f"train@{epoch}")
    model = Steps()
    with worker(partition="train@*"):
        trainer(max_epochs=3).fit(model, datamodule=dm)
    assert [number for batch in model.groups for number in batch] == [
        n for _ in range(3) for n in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


def test_a_plain_loader_frees_the_slots_of_a_batch_when_the_loop_asks_for_the_next_one(data: Make) -> None:
    client = data().client
    client.register_task("learn", GroupSampler(groups=1, ahead=0))
    add(client, 3)
    for workers in (0, 2):
        dataset = tq.StreamingDataset(None, None, None, FIELDS, "train", "learn", dp_rank=0)
        loop: list[int] = []
        done: list[int] = []
        with worker(on_lease=lambda loop=loop, done=done: done.append(len(loop))):
            for _, meta in tq.StreamingDataLoader(dataset, num_workers=workers):
                loop.append(meta.size)
        dataset.close()
        assert (loop, [after >= number for number, after in enumerate(done)]) == ([2, 2, 2], [True] * 3)
        client.clear_partition("train")
        add(client, 3)


def test_a_fabric_loop_frees_the_slots_of_a_batch_when_it_asks_for_the_next_one(data: Make) -> None:
    client = data().client
    add(client, 3)
    loop: list[int] = []
    done: list[int] = []
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    stream = groups_of(1, of_ahead=0)
    with FabricLoader(fabric, stream, ack="never") as loader, worker(on_lease=lambda: done.append(len(loop))):
        for _, meta in loader:
            loop.append(meta.size)
    assert (loop, [after >= number for number, after in enumerate(done)]) == ([2, 2, 2], [True] * 3)


def test_a_resume_within_a_batch_lacks_only_the_group_that_was_rejected_and_counts_as_before(data: Make) -> None:
    client = data().client
    add(client, 8)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    stream = groups_of(4, micro_batch_size=2)
    with FabricLoader(fabric, stream) as loader, worker():
        client.reject(next(iter(loader)).meta, "longer than the context")
        state = loader.state_dict()
    assert (state["position"]["batch_index"], state["position"]["micro_batch"]) == (0, 1)
    with FabricLoader(fabric, stream) as loader:
        loader.load_state_dict(state)
        again = [(batch.meta.batch_index, batch.position.micro_batch, int(batch.data["x"][0, 0])) for batch in loader]
        taken = loader.state_dict()["taken"]
    assert again == [(0, 2, 100), (0, 3, 200), (0, 0, 300), *((1, (n + 1) % 4, 400 + 100 * n) for n in range(4))]
    assert taken == 8
    assert list(client.kv_list("train")["train"]) == ["q0"], "what was trained is gone, what was rejected stays"


def test_within_a_partition_a_batch_may_grow_but_not_have_fewer_groups(data: Make) -> None:
    client = data().client
    add(client, 8)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    with FabricLoader(fabric, groups_of(3, of_ahead=8)) as loader, worker():
        next(iter(loader))
        state = loader.state_dict()
    with FabricLoader(fabric, groups_of(1, of_ahead=8)) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"which was read with groups=3\. It is now read with groups=1"):
            next(iter(loader))
    with FabricLoader(fabric, groups_of(4, of_ahead=8)) as loader, worker():
        loader.load_state_dict(state)
        batch = next(iter(loader))
        assert len(set(batch.meta.group_index)) in (3, 4)  # it may have been drawn ahead


def test_a_replay_frees_no_slot_of_the_live_groups_and_announces_no_version(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=groups_of(1, of_ahead=3))
    client, record, model = dm.client, tmp_path / "record", Steps()
    client.register_task("learn", GroupSampler(groups=1, ahead=3))
    client.register_task("copy", follows="learn")
    add(client, 5, seal=False)
    for lease in client.lease("train", 4, timeout_s=30):
        lease.close(members(lease.key, 2))
    trainer(max_steps=2, callbacks=[PublishWeights()]).fit(Steps(), datamodule=dm)
    client.save_batches(record / "000000", "copy")
    before = client.get_stats()["partitions"]["train"]
    again = replace(groups_of(1), replay_from=str(record))
    trainer(max_epochs=9, callbacks=[PublishWeights()]).fit(model, datamodule=TQDataModule(train=again))
    trainer().validate(model, datamodule=TQDataModule(val=again))
    assert model.groups[:2] == [[0, 0], [1, 1]]
    after = client.get_stats()["partitions"]["train"]
    assert after["groups"] == before["groups"]
    assert after["tasks"]["learn"]["settled"] == before["tasks"]["learn"]["settled"] == 2
    assert client.lease("train", timeout_s=30)[0].version == 2


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"of_ahead": 0}, False),
        ({"of_ahead": 0, "num_batches": 2}, True),
        ({"of_ahead": 1}, True),
        ({"of_stale": "wait", "of_max_staleness": 0}, False),
    ],
)
def test_a_budget_that_no_step_could_start_with_is_refused(
    data: Make, trainer: MakeTrainer, options: dict[str, Any], fits: bool
) -> None:
    dm = data(train=groups_of(2, **options))
    add(dm.client, 4)
    model = Steps()
    if fits:
        with worker():
            trainer().fit(model, datamodule=dm)
        assert len(model.groups) == 2
    else:
        with pytest.raises(InvalidRequestError, match="needs 2 batches of 2 groups at once, because Lightning fetches"):
            trainer().fit(model, datamodule=dm)


@pytest.mark.parametrize(
    ("stream", "options", "every_n_steps", "why"),
    [
        ({"of_stale": "drop", "of_max_staleness": 0, "of_ahead": 1}, {}, 1, "would drop every group. To go on, set"),
        ({"of_stale": "wait", "micro_batch_size": 1, "num_batches": 2}, {}, 1, "each micro-batch of a draw is a step"),
        ({"of_stale": "drop", "num_batches": 2}, {"accumulate_grad_batches": 2}, 1, "2 draws are one step"),
        ({"of_stale": "wait", "num_batches": 2}, {}, 2, "workers get weights that are up to 2 steps old"),
    ],
)
def test_a_bound_on_staleness_that_the_run_could_not_keep_is_refused(
    data: Make, trainer: MakeTrainer, stream: dict[str, Any], options: dict[str, Any], every_n_steps: int, why: str
) -> None:
    dm = data(train=groups_of(2, **{"of_max_staleness": 1, **stream}))
    publish = PublishWeights(every_n_steps=every_n_steps)
    with pytest.raises(InvalidRequestError, match=why):
        trainer(callbacks=[publish], **options).fit(Steps(), datamodule=dm)


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
        "added": 6, "states": {"waiting": 3, "running": 2, "closed": 1}, "rejected": {},
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


class TwoSteps(Steps):
    """Two optimizer steps with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


@pytest.mark.parametrize("stale", ["wait", "drop", "train"])
def test_a_bound_on_staleness_is_refused_where_one_draw_is_several_steps(
    data: Make, trainer: MakeTrainer, stale: str
) -> None:
    dm = data(train=groups_of(1, of_ahead=3, of_max_staleness=2, of_stale=stale))
    add(dm.client, 2)
    with worker():
        if stale == "train":
            trainer(callbacks=[PublishWeights()]).fit(TwoSteps(), datamodule=dm)
        else:
            with pytest.raises(InvalidRequestError, match=f"stale='{stale}'.*made 2 with this one"):
                trainer(callbacks=[PublishWeights()]).fit(TwoSteps(), datamodule=dm)


@pytest.mark.parametrize(
    ("accumulate", "why"),
    [(2, "2 micro-batches into a draw that has more"), (4, ""), (6, "2 micro-batches into"), (8, "with 2 draws")],
)
def test_a_bound_on_staleness_is_refused_where_a_step_is_not_with_the_micro_batches_of_one_draw(
    data: Make, trainer: MakeTrainer, accumulate: int, why: str
) -> None:
    dm = data(train=groups_of(2, of_ahead=3, of_max_staleness=3, of_stale="wait", micro_batch_size=1))
    add(dm.client, 8)
    fit = trainer(callbacks=[PublishWeights()], accumulate_grad_batches=accumulate)
    with worker(has_all=not why):
        if why:
            with pytest.raises(InvalidRequestError, match=why):
                fit.fit(Steps(), datamodule=dm)
        else:
            fit.fit(Steps(), datamodule=dm)
            assert fit.global_step == 4


@pytest.mark.parametrize("limit", [{"fast_dev_run": True}, {"limit_train_batches": 3, "max_epochs": 2}])
def test_a_draw_that_a_limit_cuts_off_is_a_step_where_no_other_one_trains_the_rest(
    data: Make, trainer: MakeTrainer, limit: dict[str, Any]
) -> None:
    stream = groups_of(2, "train@{epoch}", of_max_staleness=1, of_stale="wait", micro_batch_size=1)
    dm = data(train=stream)
    for epoch in range(2):
        add(dm.client, 8, f"train@{epoch}")
    fit = trainer(callbacks=[PublishWeights()], accumulate_grad_batches=4, **limit)
    with worker(has_all=False, partition="train@*"):
        fit.fit(Steps(), datamodule=dm)
    assert fit.global_step == limit.get("max_epochs", 1)


def test_a_step_of_more_draws_than_have_slots_ends_the_run_instead_of_waiting_for_ever(
    data: Make, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_hints, "_LOOK_EVERY_S", 0.1)
    dm = data(train=groups_of(1, micro_batch_size=2, num_batches=8))
    add(dm.client, 8)
    says = "2 draws without an optimizer step hold 2 of the 2 slots .*accumulate_grad_batches is 4., or raise ahead"
    with worker(has_all=False), pytest.raises(InvalidRequestError, match=says):
        trainer(accumulate_grad_batches=4).fit(Steps(), datamodule=dm)
