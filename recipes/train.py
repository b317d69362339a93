# SPDX-License-Identifier: Apache-2.0
"""Trains on the queue at TQ_ADDRESS. A launcher starts it on every node of a run: torchrun, srun, Kubernetes."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_tq import Stream, TQDataModule


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.samples = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, meta = batch
        self.samples += meta.size
        loss: torch.Tensor = (self.layer(data["x"]) - data["y"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="per node")
    options = parser.parse_args()
    trainer = Trainer(
        strategy="ddp", num_nodes=options.nodes, devices=options.devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    stream = Stream(partition="train", task="learn", fields=["x", "y"], batch_size=16)
    trainer.fit(model, datamodule=TQDataModule(train=stream))
    print(f"rank {trainer.global_rank} trained {model.samples} samples in {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
