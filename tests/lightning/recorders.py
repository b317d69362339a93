# SPDX-License-Identifier: Apache-2.0
"""The model of these tests. A fit takes milliseconds, and the model records its batches."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule


class Recorder(LightningModule):
    """Records (partition, indexes) of every batch. It can fail, interrupt or kill itself at a given batch."""

    def __init__(self, log_dir: str | None = None, fail_at: int | None = None, how: str = "raise") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.log_dir = log_dir
        self.fail_at = fail_at
        self.how = how
        self.seen: dict[str, list[tuple[str, list[int]]]] = {"train": [], "val": [], "test": [], "predict": []}
        self.types: list[Any] = []

    def _note(self, stage: str, batch: Any) -> Any:
        data, meta = batch
        assert [f"row {int(value)}" for value in data["x"][:, 0].float()] == list(data["text"]), "fields stay together"
        self.types.append((tuple(data.batch_size), data["x"].dtype, type(meta).__name__))
        self.seen[stage].append((meta.partition_ids[0], list(meta.global_indexes)))
        if self.log_dir is not None:
            with (Path(self.log_dir) / f"rank{self.global_rank}.jsonl").open("a") as file:
                file.write(json.dumps([stage, meta.partition_ids[0], list(meta.global_indexes)]) + "\n")
        return data, meta

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, _ = self._note("train", batch)
        if self.fail_at is not None and len(self.seen["train"]) > self.fail_at:
            fail(self.how)
        loss: torch.Tensor = self.layer(data["x"] / 100).square().mean()
        self.log("rows_mean", data["x"].float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        data, _ = self._note("val", batch)
        self.log("val_mean", data["x"].float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        data, _ = self._note("test", batch)
        self.log("test_mean", data["x"].float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        _, meta = self._note("predict", batch)
        return list(meta.global_indexes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)

    def indexes(self, stage: str = "train") -> list[int]:
        return [index for _, batch in self.seen[stage] for index in batch]

    def partitions(self, stage: str = "train") -> list[str]:
        return list(dict.fromkeys(partition for partition, _ in self.seen[stage]))


class Both(Recorder):
    """Trains the first of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0], batch_idx)


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("failed on request")
    if how == "interrupt":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.Signals[how])
