# SPDX-License-Identifier: Apache-2.0
"""Fits on several gloo ranks with a strategy. Each rank records its batches in its own file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import producing
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from recorders import Recorder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_tq import PartitionSwitch, Producer, Stream, TQDataModule, trainer_topology


class Sharded(Recorder):
    """Its layer is sharded over tensor-parallel peers and, by FSDP, over the groups. A step is a collective of both."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layer = torch.nn.Linear(4, 2)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if not any(isinstance(each, torch.distributed.tensor.DTensor) for each in self.parameters()):
            parallelize_module(self.layer, self.device_mesh["tensor_parallel"], ColwiseParallel())
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


class RecordsTopology(Callback):
    """Each rank records its topology."""

    def __init__(self, log_dir: Path, overrides: dict[str, Any]) -> None:
        self.log_dir = log_dir
        self.overrides = overrides

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer_topology(trainer, **self.overrides)
        path = self.log_dir / f"topology{trainer.global_rank}.json"
        path.write_text(json.dumps([found.dp_rank, found.dp_size, found.is_reader]))


def across(trainer: Trainer) -> int:
    """Data-parallel rank on a user's mesh, where the peers are ranks 0 and 2, and ranks 1 and 3."""
    mesh = init_device_mesh("cpu", (2, trainer.world_size // 2), mesh_dim_names=("model", "data"))
    return int(mesh["data"].get_local_rank())


OVERRIDES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_spawn": {},
    "ddp_fork": {},
    "across": {"dp_size": 2, "dp_rank": across},
    "model_parallel": {},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=OVERRIDES)
    parser.add_argument("devices", type=int)
    parser.add_argument("log_dir", type=Path)
    options = parser.parse_args()
    strategy, overrides, model_class = options.strategy, OVERRIDES[options.strategy], Recorder
    if strategy == "model_parallel":
        strategy, model_class = ModelParallelStrategy(2, options.devices // 2), Sharded
    elif strategy == "across":
        strategy = "ddp"
    model: LightningModule = model_class(log_dir=str(options.log_dir))

    def stream(partition: str, task: str) -> Stream:
        return Stream(partition=partition, task=task, fields=producing.FIELDS, batch_size=2, micro_batch_size=1)

    datamodule = TQDataModule(
        train=stream("train@{epoch}", "learn"),
        val=stream("val@{epoch}", "evaluate"),
        queue={"units": 1},
        producers=[Producer(target="producing:produce_epochs", args={"epochs": 2, "train": 24, "val": 8})],
        **overrides,
    )
    trainer = Trainer(
        strategy=strategy, devices=options.devices, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PartitionSwitch(), RecordsTopology(options.log_dir, overrides)], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=datamodule)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
