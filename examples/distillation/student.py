# SPDX-License-Identifier: Apache-2.0
"""The student: a small model that learns the teacher's next-token distributions."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from .models import VOCABULARY, WindowModel


class Student(L.LightningModule):
    """Minimises KL(teacher || student) over every position of the prompts."""

    def __init__(self, width: int = 64, learning_rate: float = 5e-3, temperature: float = 1.0) -> None:
        """Args:
        width: Width of the student's layers. The teacher has 128.
        learning_rate: Learning rate of Adam.
        temperature: Softens both distributions. Above 1, unlikely tokens weigh more.
        """
        super().__init__()
        self.model = WindowModel(width)
        self.learning_rate = learning_rate
        self.temperature = temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data, _ = batch
        loss, agreement = self._compare(data)
        self.log_dict({"train/loss": loss.detach(), "train/agreement": agreement}, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        data, _ = batch
        loss, agreement = self._compare(data)
        self.log_dict({"val/loss": loss, "val/agreement": agreement}, sync_dist=True)

    def _compare(self, data: Any) -> tuple[Tensor, Tensor]:
        """Loss, and the share of positions whose likeliest next token is the teacher's."""
        logits, teacher = self.model(data["prompts"]), data["logits"]
        ours = (logits / self.temperature).log_softmax(-1).reshape(-1, VOCABULARY)
        theirs = (teacher / self.temperature).log_softmax(-1).reshape(-1, VOCABULARY)
        loss = kl_div(ours, theirs, reduction="batchmean", log_target=True) * self.temperature**2
        return loss, (logits.argmax(-1) == teacher.argmax(-1)).float().mean()

    def on_validation_epoch_end(self) -> None:
        values = {name: float(self.trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "agreement")}
        when = "untrained" if self.trainer.sanity_checking else f"epoch {self.current_epoch}"
        self.print(
            f"{when}: loss {values['loss']:.3f}, agreement with the teacher {values['agreement']:.1%}", flush=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
