# SPDX-License-Identifier: Apache-2.0
"""A model with five weights, for configs/debug.yaml and configs/ddp.yaml."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import mse_loss


class Tiny(LightningModule):
    """Learns to add. Prints the steps and samples of each rank at the end."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        """Args:
        learning_rate: Learning rate of SGD.
        """
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.learning_rate = learning_rate
        self.samples = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data, meta = batch
        self.samples += meta.size
        loss = mse_loss(self.layer(data["x"]), data["y"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        data, _ = batch
        self.log("val_loss", mse_loss(self.layer(data["x"]), data["y"]), prog_bar=True, sync_dist=True)

    test_step = validation_step

    def on_train_end(self) -> None:
        counts, losses = f"{self.global_step} optimizer steps, {self.samples} samples", self.trainer.callback_metrics
        val_loss = f", val_loss {losses['val_loss']:.4f}" if "val_loss" in losses else ""  # without validation
        print(f"rank {self.global_rank}: {counts}{val_loss}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=self.learning_rate)
