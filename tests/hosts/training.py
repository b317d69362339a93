# SPDX-License-Identifier: Apache-2.0
"""A node of a training: ``num_nodes`` hosts with ``devices`` gloo ranks each. Each rank records its batches."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import transfer_queue as tq
from lightning_tq import PartitionSwitch, Producer, Stream, TQDataModule


def produce(partition: str, count: int, seal: bool) -> None:
    """Rows 0, 1, 2, …"""
    client = tq.get_client()
    client.put({"x": torch.arange(count).unsqueeze(1).repeat(1, 4).float()}, partition_id=partition)
    if seal:
        client.seal_partition(partition)


class Records(LightningModule):
    """Appends [optimizer step, rows] of every batch to its rank's file."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, _ = batch
        with (self.options.folder / f"rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.global_step, data["x"][:, 0].int().tolist()]) + "\n")
        if self.options.kill == [self.global_rank, self.global_step]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = self.layer(data["x"] / 100).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.options.fail == [self.global_rank, self.global_step]:
            raise ValueError("failed on request")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)


class SaysThatItWaits(Callback):
    """Prints a line once the rank waits for a batch that is not there."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reader = trainer.datamodule.train_reader()  # type: ignore[attr-defined]
        threading.Thread(target=self._report, args=[reader, trainer.global_rank], daemon=True).start()

    def _report(self, reader: Any, rank: int) -> None:
        never = threading.Event()
        while reader.waiting_s() < 0.3:
            never.wait(0.05)
        print(f"rank {rank} waits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--queue", type=json.loads, default=None)
    parser.add_argument("--rows", type=int, default=0, help="that a producer of the first rank puts")
    parser.add_argument("--no-seal", action="store_true", help="so that the ranks wait for more")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), default=None)
    parser.add_argument("--fail", type=int, nargs=2, metavar=("RANK", "STEP"), default=None)
    parser.add_argument("--save-every", type=int, default=0)
    options = parser.parse_args()
    callbacks: list[Any] = [PartitionSwitch(clear_finished=False), SaysThatItWaits()]
    if options.save_every:
        callbacks.append(
            ModelCheckpoint(options.folder, "{step}", every_n_train_steps=options.save_every, save_top_k=1)
        )
    args = {"partition": "train", "count": options.rows, "seal": not options.no_seal}
    producers = [Producer(target=produce, args=args)] if options.rows else []
    datamodule = TQDataModule(
        train=Stream(partition="train", task="learn", fields=["x"], batch_size=4, num_workers=options.workers),
        queue=options.queue,
        producers=producers,
    )
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", num_nodes=2, devices=options.devices, max_epochs=1, logger=False,
        enable_checkpointing=bool(options.save_every), enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    newest = max(options.folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    trainer.fit(Records(options), datamodule=datamodule, ckpt_path=newest)


if __name__ == "__main__":
    main()
