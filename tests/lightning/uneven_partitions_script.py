# SPDX-License-Identifier: Apache-2.0
"""Fits on gloo ranks with partitions of given sizes. Every step and validation step is a collective.

Arguments: number of ranks, directory for the ranks' records, JSON of {train, val: samples per epoch, stream: options,
trainer: options}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import producing
import torch
from lightning.pytorch import Trainer
from recorders import Recorder

from lightning_tq import PartitionSwitch, Producer, Stream, TQDataModule


class Collective(Recorder):
    """Fails or hangs where ranks are at different steps."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._meet(1000 + len(self.seen["train"]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._meet(10_000 * (1 + dataloader_idx) + batch_idx)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def _meet(self, at: int) -> None:
        steps = self.all_gather(torch.tensor(at)).flatten().tolist()
        assert set(steps) == {at}, f"ranks are at {steps}"


def main(ranks: str, log_dir: str, plan: str) -> None:
    options: dict[str, Any] = json.loads(plan)
    epochs = len(options["train"])

    def stream(partition: str, task: str, **more: Any) -> Stream:
        return Stream(partition=partition, task=task, fields=producing.FIELDS, **{**options["stream"], **more})

    datamodule = TQDataModule(
        train=stream("train@{epoch}", "learn"),
        val=[stream("val@{epoch}", "evaluate"), stream("val@0", "evaluate again", num_workers=0)],
        queue={"units": 1},
        producers=[Producer(target="producing:produce_sizes", args={"train": options["train"], "val": options["val"]})],
    )
    trainer = Trainer(
        strategy="ddp", devices=int(ranks), accelerator="cpu", max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PartitionSwitch(clear_finished=False)], num_sanity_val_steps=0, **options["trainer"],
    )  # fmt: skip
    trainer.fit(Collective(log_dir=log_dir), datamodule=datamodule)
    (Path(log_dir) / f"steps{trainer.global_rank}").write_text(str(trainer.global_step))
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        partitions = datamodule.client.get_stats()["partitions"]
        still_open = [partitions[f"train@{epoch}"]["tasks"]["learn"]["in_flight"] for epoch in range(epochs)]
        (Path(log_dir) / "open").write_text(json.dumps(still_open))
    trainer.strategy.barrier()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
