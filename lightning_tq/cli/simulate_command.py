# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``simulate``: a fit whose steps are sleeps, to tune producers and pacing without a GPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_tq.callbacks.partition_switch import PartitionSwitch
from lightning_tq.callbacks.publish_weights import PublishWeights
from lightning_tq.callbacks.queue_monitor import QueueMonitor
from lightning_tq.cli.trainer_cli import TQCLI, run


def run_sleeping(step_s: float, args: Sequence[str]) -> int:
    """``args``: those of a fit. Returns the exit code."""
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
    return run(None, partial(_SimulateCLI, step_s, ["fit", *args]))


class _SimulateCLI(TQCLI):
    def __init__(self, step_s: float, args: Sequence[str]) -> None:
        self._step_s = step_s
        super().__init__(args=args, save_config_callback=None)

    def instantiate_trainer(self, **options: Any) -> Trainer:
        self.model = _Sleeper(self.model, self._step_s)
        own = self._get(self.config_init, "trainer", default={})
        callbacks = own["callbacks"] if isinstance(own["callbacks"], list) else [own["callbacks"]]
        pacing = [each for each in callbacks if isinstance(each, PartitionSwitch | PublishWeights | QueueMonitor)]
        given = own["devices"]
        numbers = given if isinstance(given, list) else [each for each in str(given).split(",") if each]
        devices = int(given) if str(given).isdigit() else len(numbers)  # "auto" is one
        return super().instantiate_trainer(
            callbacks=pacing, accelerator="cpu", devices=devices, num_nodes=1, strategy="auto", precision=None,
            plugins=None, logger=False, enable_checkpointing=False, enable_model_summary=False, **options,
        )  # fmt: skip


class _Sleeper(LightningModule):
    """A step is a sleep. The weights are those of the model, which no hook of it changes."""

    def __init__(self, model: LightningModule, step_s: float) -> None:
        super().__init__()
        self.automatic_optimization = model.automatic_optimization
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self._models, self._step_s = [model], step_s  # in a list, so that its parameters are not trained

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._models[0].state_dict(*args, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.unused.sum()
        position = getattr(batch, "position", None)
        if position is None or not position.micro_batch:  # the last one of its batch
            threading.Event().wait(self._step_s)
            self.optimizers().step()  # type: ignore[union-attr]
        return None

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        threading.Event().wait(self._step_s)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Validation reads its batches."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.unused], lr=0.0)
