# SPDX-License-Identifier: Apache-2.0
"""A program that fits on several gloo ranks with one of the callbacks, and notes what the tests ask about."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import producing
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks_script import Sharded
from recorders import Recorder

from lightning_tq import PublishWeights, StalenessGuard, Stream, TQDataModule, WeightsReader, WriteBack


class NamesItsRank(Recorder):
    """Gives every sample the rank that trained it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rank": torch.full((batch[1].size,), self.global_rank)}


class ShardedNamesItsRank(NamesItsRank, Sharded):
    """The same on a mesh."""


class AtEnd(Callback):
    """Calls a function on every rank when training has ended, while the queue is there."""

    def __init__(self, note: Callable[[Trainer, Any], None]) -> None:
        self.note = note

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note(trainer, pl_module)


def indexes_by_rank(trainer: Trainer, model: Any) -> list[list[int]]:
    gathered: list[list[int]] = [[] for _ in range(trainer.world_size)]
    torch.distributed.all_gather_object(gathered, model.indexes())
    return gathered


def write_back(logs: Path) -> tuple[list[Callback], Callable[[Trainer, Any], None]]:
    def note(trainer: Trainer, model: Any) -> None:
        wrote = indexes_by_rank(trainer, model)
        if trainer.is_global_zero:
            client = trainer.datamodule.client
            meta = client.get_meta(["rank"], partition_id="train", mode="force_fetch")
            (logs / "indexes").write_text(str(meta.global_indexes))
            (logs / "ranks").write_text(str([int(rank) for rank in client.get_data(meta)["rank"]]))
            (logs / "wrote").write_text(str(wrote))

    return [WriteBack(["rank"], "train")], note


def staleness(logs: Path) -> tuple[list[Callback], Callable[[Trainer, Any], None]]:
    guard = StalenessGuard(max_staleness=1, drop=True, pace=False)

    def note(trainer: Trainer, model: Any) -> None:
        trained = indexes_by_rank(trainer, model)
        (logs / f"dropped{trainer.global_rank}").write_text(str(guard.dropped))
        (logs / "trained").write_text(str(trained))
        (logs / "steps").write_text(str(trainer.global_step))

    return [guard], note


def weights(logs: Path) -> tuple[list[Callback], Callable[[Trainer, Any], None]]:
    publish = PublishWeights()

    def note(trainer: Trainer, model: Any) -> None:
        whole = {}
        for name, value in model.state_dict().items():
            whole[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        if trainer.is_global_zero:
            newest = WeightsReader(trainer.datamodule.client).latest()
            equal = all(torch.equal(newest.state_dict[name], whole[name]) for name in whole)
            (logs / "weights").write_text(str((newest.version, sorted(newest.state_dict), equal)))

    return [publish], note


JOBS = {"write_back": write_back, "staleness": staleness, "weights": weights}


def put_samples(datamodule: TQDataModule) -> None:
    """24 rows; the tags say that rows 8 to 12 and 18 are of a version long ago."""
    client = datamodule.client
    tags = [{"policy_version": -9 if row in (*range(8, 13), 18) else 5} for row in range(24)]
    client.put(producing.rows(24), partition_id="train", tags=tags)
    client.seal_partition("train")


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
    datamodule = TQDataModule(
        train=Stream(partition="train", task="learn", fields=producing.FIELDS, batch_size=4, micro_batch_size=2),
        queue={"units": 1},
    )
    callbacks, note = JOBS[options.job](options.log_dir)

    class Filled(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.is_global_zero:
                put_samples(trainer.datamodule)

    trainer = Trainer(
        strategy=strategy, devices=options.devices, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Filled(), *callbacks, AtEnd(note)], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=datamodule)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
