# SPDX-License-Identifier: Apache-2.0
"""A rank under torchrun, which starts all of them again after one is killed. Arguments: a folder, and JSON of kills.

A kill is [attempt, rank, optimizer step]. Each rank appends [optimizer step, numbers] of its batches to its file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import transfer_queue as tq
from lightning_tq import PartitionSwitch, Producer, Stream, TQCheckpoint, TQDataModule

EPOCHS, SAMPLES = 3, 64


def produce() -> None:
    """Fills one partition per epoch, or completes what a restored queue holds of them."""
    client = tq.get_client()
    there = client.get_stats()["partitions"]
    for epoch in range(max((int(name.partition("@")[2]) for name in there), default=0), EPOCHS):
        name = f"train@{epoch}"
        before = there.get(name, {"published": 0, "sealed": False})
        for number in range(before["published"], SAMPLES):
            client.put({"x": torch.full((1, 4), float(number))}, partition_id=name)
        if not before["sealed"]:
            client.seal_partition(name)


class Trained(LightningModule):
    def __init__(self, folder: Path, kills: list[list[int]]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.folder = folder
        self.kills = kills

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if [int(os.environ["TORCHELASTIC_RESTART_COUNT"]), self.global_rank, self.global_step] in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = [SAMPLES * self.current_epoch + number for number in batch[0]["x"][:, 0].int().tolist()]
        with (self.folder / f"rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.global_step, numbers]) + "\n")
        loss: torch.Tensor = self.layer(batch[0]["x"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.0)


def main(folder: Path, kills: list[list[int]]) -> None:
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=3)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=EPOCHS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[PartitionSwitch(), TQCheckpoint(), saves],
    )  # fmt: skip
    train = Stream(partition="train@{epoch}", task="learn", fields=["x"], batch_size=4)
    datamodule = TQDataModule(train=train, queue={"units": 1}, producers=[Producer(target="torchrun_script:produce")])
    trainer.fit(Trained(folder, kills), datamodule=datamodule, ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
