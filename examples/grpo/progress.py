# SPDX-License-Identifier: Apache-2.0
"""A progress bar for log files: one line per epoch."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar


class ProgressLines(ProgressBar):
    """Prints reward, accuracy, staleness and wait per epoch. All but the accuracy are means over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._started = time.perf_counter()
        self._sums: dict[str, float] = {}
        self._steps = 0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, **kwargs, flush=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.print(f"warmed up: accuracy {float(pl_module.warmup_accuracy):6.1%} {self._clock()}")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._steps += 1
        for name in ("train/reward", "train/staleness", "queue/wait_s"):
            self._sums[name] = self._sums.get(name, 0.0) + float(trainer.callback_metrics.get(name, 0.0))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mean = {name: total / max(1, self._steps) for name, total in self._sums.items()}
        accuracy = float(trainer.callback_metrics.get("val/accuracy", float("nan")))
        self.print(
            f"epoch {trainer.current_epoch + 1:2}/{trainer.max_epochs}: accuracy {accuracy:6.1%}, "
            f"reward {mean['train/reward']:.3f}, staleness {mean['train/staleness']:.2f} versions, "
            f"waited {1000 * mean['queue/wait_s']:.0f} ms per step, step {trainer.global_step:3} {self._clock()}"
        )
        self._sums.clear()
        self._steps = 0

    def _clock(self) -> str:
        return f"[{time.perf_counter() - self._started:.0f} s]"
