# SPDX-License-Identifier: Apache-2.0
"""Fits on several gloo ranks with one of the callbacks, and records the results."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import producing
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from recorders import Recorder
from strategies_script import Sharded

from lightning_tq import (
    PartitionSwitch,
    Producer,
    PublishWeights,
    QueueMonitor,
    Stream,
    TQDataModule,
    WeightsReader,
    WriteBack,
)
from transfer_queue import GroupSampler, TransferQueueClient


class NamesItsRank(Recorder):
    """Returns, for every sample, the rank that trained it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rank": torch.full((batch[1].size,), self.global_rank)}


class ShardedNamesItsRank(NamesItsRank, Sharded):
    """The same model on a mesh."""


class AtEnd(Callback):
    """Calls a function on every rank at the end of training, before the queue ends."""

    def __init__(self, note: Callable[[Trainer, Any], None]) -> None:
        self.note = note

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note(trainer, pl_module)


def indexes_by_rank(trainer: Trainer, model: Any) -> list[list[int]]:
    gathered: list[list[int]] = [[] for _ in range(trainer.world_size)]
    torch.distributed.all_gather_object(gathered, model.indexes())
    return gathered


@dataclass
class Job:
    """What to fit, and what every rank records at its end."""

    note: Callable[[Trainer, Any], None]
    callbacks: list[Callback]
    train: str = "train"
    val: str | None = None
    fill: Callable[[TransferQueueClient], None] = field(default_factory=lambda: put_samples)
    options: dict[str, Any] = field(default_factory=lambda: {"max_epochs": 1})
    producers: list[Producer] = field(default_factory=list)
    sampler: GroupSampler | None = None


def put_samples(client: TransferQueueClient) -> None:
    """24 rows."""
    client.put(producing.rows(24), partition_id="train")
    client.seal_partition("train")


def write_back(logs: Path) -> Job:
    def note(trainer: Trainer, model: Any) -> None:
        wrote = indexes_by_rank(trainer, model)
        if trainer.is_global_zero:
            client = trainer.datamodule.client
            meta = client.get_meta(["rank"], partition_id="train", mode="force_fetch")
            (logs / "indexes").write_text(str(meta.global_indexes))
            (logs / "ranks").write_text(str([int(rank) for rank in client.get_data(meta)["rank"]]))
            (logs / "wrote").write_text(str(wrote))

    return Job(note, [WriteBack(["rank"], "train")])


def weights(logs: Path) -> Job:
    def note(trainer: Trainer, model: Any) -> None:
        whole = {}
        for name, value in model.state_dict().items():
            whole[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        if trainer.is_global_zero:
            newest = WeightsReader(trainer.datamodule.client).latest()
            equal = all(torch.equal(newest.state_dict[name], whole[name]) for name in whole)
            (logs / "weights").write_text(str((newest.version, sorted(newest.state_dict), equal)))

    return Job(note, [PublishWeights()])


def switching(logs: Path) -> Job:
    """Training partitions by version, and validation partitions by step, in the middle of an epoch."""
    warned: list[str] = []
    warnings.showwarning = lambda message, *_, **__: warned.append(str(message))

    class Loader(Callback):
        given: Any = None
        is_used: bool | None = None

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.given = trainer.datamodule.train_dataloader()
            trainer.datamodule.train_dataloader = lambda: self.given

        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            self.is_used = trainer.train_dataloader is self.given

    loader = Loader()

    def fill(client: TransferQueueClient) -> None:
        for version in (0, 4):
            producing.fill(client, f"train@{version}", 16)
        for step in (2, 4, 6, 8):
            producing.fill(client, f"val@{step}", 8)

    def note(trainer: Trainer, model: Any) -> None:
        trainer.strategy.barrier("recorded")  # the first rank clears, and may be slower
        partitions = sorted(trainer.datamodule.client.get_partition_list())
        seen = {stage: model.seen[stage] for stage in ("train", "val")}
        (logs / f"rank{trainer.global_rank}").write_text(json.dumps([seen, partitions, loader.is_used, warned]) + "\n")

    callbacks = [PublishWeights(every_n_steps=4), PartitionSwitch(), QueueMonitor(), loader]
    options = {"max_epochs": 2, "val_check_interval": 2}
    return Job(note, callbacks, "train@{policy_version}", "val@{global_step}", fill, options)


def groups(logs: Path) -> Job:
    """Two workers lease a prompt each. Groups have 1 to 3 rows, so ranks get different numbers of them."""
    seen: list[list[int]] = []

    class Noting(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            seen.append((batch.data["x"][:, 0] / 100).int().tolist())

    def note(trainer: Trainer, model: Any) -> None:
        steps = [
            trainer.global_step,
            trainer.callback_metrics["staleness/max"].item() if trainer.is_global_zero else 0.0,
        ]
        (logs / f"rank{trainer.global_rank}").write_text(json.dumps([seen, steps]) + "\n")

    producers = [
        Producer(target="producing:feed_numbers", args={"count": 12}),
        Producer(target="producing:work_on_groups", count=2),
    ]
    sampler = GroupSampler(groups=4, max_staleness=0, stale="wait", ahead=0)
    callbacks = [PublishWeights(), QueueMonitor(), Noting()]
    options = {"max_epochs": 1, "accumulate_grad_batches": 1}
    return Job(note, callbacks, fill=lambda client: None, options=options, producers=producers, sampler=sampler)


JOBS = {
    "groups": groups, "write_back": write_back, "weights": weights, "switching": switching,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("strategy", choices=["ddp", "model_parallel"])
    parser.add_argument("devices", type=int)
    parser.add_argument("log_dir", type=Path)
    options = parser.parse_args()
    strategy: Any = options.strategy
    model: LightningModule = NamesItsRank()
    if strategy == "model_parallel":
        strategy, model = ModelParallelStrategy(options.devices // 2, 2), ShardedNamesItsRank()
    job = JOBS[options.job](options.log_dir)

    def stream(partition: str, task: str) -> Stream:
        sizes: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2}
        if job.sampler is not None:
            sizes = {"sampler": job.sampler, "num_batches": 3, "tail": "drop"}
        return Stream(partition=partition, task=task, fields=producing.FIELDS, **sizes)

    datamodule = TQDataModule(
        train=stream(job.train, "learn"),
        val=stream(job.val, "evaluate") if job.val else None,
        queue={"units": 1},
        producers=job.producers,
    )

    class Filled(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.is_global_zero:
                job.fill(trainer.datamodule.client)

    trainer = Trainer(
        strategy=strategy, devices=options.devices, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Filled(), *job.callbacks, AtEnd(job.note)], num_sanity_val_steps=0, **job.options,
    )  # fmt: skip
    trainer.fit(model, datamodule=datamodule)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
