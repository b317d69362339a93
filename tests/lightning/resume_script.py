# SPDX-License-Identifier: Apache-2.0
"""Fits, records the samples of each optimizer step, and kills itself (``kill -9``) at a given point.

Argument: JSON of {folder, devices, stream, trainer, clear_finished, save_every, queue, save_queue, kill: [batches to
train first, where] or null}. It resumes from the newest checkpoint in its folder, if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import producing
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tq import PartitionSwitch, Stream, TQDataModule


class RecordsSteps(LightningModule):
    """Appends [optimizer step, partition, rows] to its rank's file for each micro-batch."""

    def __init__(self, folder: Path, kill: tuple[int, str] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.folder = folder
        self.kill = kill
        self.trained = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, meta = batch
        line = [self.global_step, meta.partition_ids[0], data["x"][:, 0].int().tolist()]
        with (self.folder / f"rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.trained += 1
        self._die("training")
        loss: torch.Tensor = self.layer(data["x"] / 100).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._die("validation")

    def on_train_batch_end(self, *_: Any) -> None:
        self._die("saved")  # after ModelCheckpoint, and before the acks for its batches

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._die("saving")  # neither the queue nor the checkpoint is written

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01, momentum=0.9)

    def _die(self, where: str) -> None:
        if self.kill is not None and self.trained >= self.kill[0] and self.kill[1] == where and not self.global_rank:
            os.kill(os.getpid(), signal.SIGKILL)


def newest(folder: Path) -> Path | None:
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)


def main(text: str) -> None:
    plan = json.loads(text)
    folder, kill = Path(plan["folder"]), plan["kill"]
    callbacks: list[Any] = [PartitionSwitch(clear_finished=plan["clear_finished"])]
    if plan["save_queue"]:
        from lightning_tq import TQCheckpoint

        callbacks.append(TQCheckpoint())
    if plan["save_every"]:
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=plan["save_every"], save_top_k=1)
        callbacks.append(saves)
    datamodule = TQDataModule(
        train=Stream(fields=producing.FIELDS, **plan["stream"]),
        val=Stream(fields=producing.FIELDS, partition="val", task="evaluate", batch_size=2),
        queue=plan["queue"],
    )
    if "units" in plan["queue"] and newest(folder) is None and "LOCAL_RANK" not in os.environ:
        datamodule.open()
        producing.fill_all(datamodule.client)
    model = RecordsSteps(folder, kill)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=bool(plan["save_every"]), enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, strategy="ddp" if plan["devices"] > 1 else "auto",
        devices=plan["devices"], num_sanity_val_steps=0, **plan["trainer"],
    )  # fmt: skip
    trainer.fit(model, datamodule=datamodule, ckpt_path=newest(folder))
    if trainer.is_global_zero:
        (folder / "weights.json").write_text(json.dumps(model.layer.weight.tolist()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1])
