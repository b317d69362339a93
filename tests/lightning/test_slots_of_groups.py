# SPDX-License-Identifier: Apache-2.0
"""Streams of whole groups: when a group's slot is free, and that a bound on staleness is kept or refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from grouping import FIELDS, Make, MakeTrainer, Steps, add, groups_of, members, worker
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

import transfer_queue as tq
from lightning_tq import (
    FabricLoader,
    PublishWeights,
    TQCheckpoint,
    TQDataModule,
    wait_hints,
)
from transfer_queue import GroupSampler
from transfer_queue.errors import InvalidRequestError

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


# ---- one step per draw ----


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


class StepPerDraw(Steps):
    """An optimizer step with the last micro-batch of each batch, however many it has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.counts: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        number, count = batch.meta.micro_batch
        self.counts.append((number, count))
        self.manual_backward(super().training_step(batch, batch_idx) / count)
        if number == count:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_micro_batches_by_tokens_are_one_step_per_draw_with_manual_optimization(
    data: Make, trainer: MakeTrainer
) -> None:
    made = {"of_balance": "length", "of_micro_batch_tokens": 30, "of_stale": "wait", "of_max_staleness": 3}
    dm = data(train=groups_of(2, of_ahead=3, **made))
    add(dm.client, 6)
    model, fit = StepPerDraw(), trainer(callbacks=[PublishWeights()])
    with worker(sizes=lambda number: 2 + 2 * (number == 5)):
        fit.fit(model, datamodule=dm)
    assert (model.counts, fit.global_step) == ([(1, 2), (2, 2)] * 3, 3)
    assert [len(groups) for groups in model.groups] == [3, 1, 3, 1, 3, 3]


class RowsOfSteps(StepPerDraw):
    """Notes the rows of each optimizer step. ``last``: the most batches that it trains."""

    def __init__(self, last: int = 1000) -> None:
        super().__init__()
        self.last, self.rows, self.steps = last, list[int](), list[list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if len(self.counts) == self.last:
            raise ValueError("it fails here")
        super().training_step(batch, batch_idx)
        self.rows += batch.data["x"][:, 0].int().tolist()
        if self.counts[-1][0] == self.counts[-1][1]:
            self.steps, self.rows = [*self.steps, self.rows], []


@pytest.mark.filterwarnings("ignore:Be aware that when using")
@pytest.mark.parametrize("cut", [{"of_balance": "length", "of_micro_batch_tokens": 30}, {"micro_batch_size": 2}])
def test_rows_without_a_step_at_the_end_of_an_epoch_are_in_one_also_after_a_resume(
    data: Make, trainer: MakeTrainer, tmp_path: Path, cut: dict[str, Any]
) -> None:
    """Each draw has two micro-batches and an epoch three, so the first one ends within a draw."""
    dm = data(train=groups_of(2, of_ahead=5, num_batches=3, **cut))
    add(dm.client, 4)
    saves = ModelCheckpoint(tmp_path / "kept", save_on_train_epoch_end=True)
    first, second = RowsOfSteps(last=3), RowsOfSteps()
    with worker():
        with pytest.raises(ValueError, match="fails here"):
            trainer(callbacks=[saves, TQCheckpoint()], enable_checkpointing=True, max_epochs=2).fit(
                first, datamodule=dm
            )
        trainer(max_epochs=2).fit(second, datamodule=dm, ckpt_path=saves.best_model_path)
    assert [len(rows) for rows in first.steps + second.steps] == [4, 4]
    assert sorted(chain(*first.steps, *second.steps)) == [0, 1, 100, 101, 200, 201, 300, 301]


def test_a_bounded_queue_is_not_refused_where_many_micro_batches_are_one_draw(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Four rows are one step, so a checkpoint comes after 12 rows and their heads; the queue has room for 40."""
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 40}}})
    dm = TQDataModule(train=groups_of(2, of_ahead=1, micro_batch_size=1), ack="checkpoint")
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
    fit = trainer(callbacks=[saves], enable_checkpointing=True, accumulate_grad_batches=4)
    dm.open()
    add(dm.client, 10)
    with worker():
        fit.fit(Steps(), datamodule=dm)
    assert fit.global_step == 5


def test_rows_and_tokens_of_a_micro_batch_are_not_both_given() -> None:
    with pytest.raises(InvalidRequestError, match="Leave one of them out"):
        groups_of(2, of_balance="length", of_micro_batch_tokens=30, micro_batch_size=2)


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
