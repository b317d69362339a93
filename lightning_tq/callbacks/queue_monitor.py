# SPDX-License-Identifier: Apache-2.0
"""QueueMonitor: shows whether training or generation is the bottleneck."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.checks import check_int
from lightning_tq.stream_reader import StreamReader
from lightning_tq.trainer_compat import find_datamodule


class QueueMonitor(Callback):
    """Logs from the first rank, to the logger and the progress bar.

    - ``queue/wait_s``: mean seconds that a step waited for its batch, since the last values.
    - ``queue/starved``: share of the time since then, without validation, that training spent waiting.
    - ``queue/ready``: samples that are ready for the training task now.
    - ``queue/in_flight``: batches that all ranks have drawn and not trained yet.

    Long waits with nothing ready mean that generation is slow. Ready samples and no waits mean that training is slow.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        """Args:
        every_n_steps: Training batches between two sets of values. Each set takes one request to the controller.
        """
        check_int("every_n_steps", every_n_steps, 1)
        self.every_n_steps = every_n_steps
        self._batches = 0
        self._since = 0.0
        self._waited_before = 0.0
        self._paused_at: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        find_datamodule(trainer, "QueueMonitor")
        self._batches, self._since, self._waited_before = 0, time.perf_counter(), 0.0
        self._paused_at = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches < self.every_n_steps or not trainer.is_global_zero:
            return
        datamodule = find_datamodule(trainer, "QueueMonitor")
        reader = datamodule.train_reader()
        values = {**self._timing(reader), **_counts(datamodule.stats(), reader, datamodule.dp_size)}
        for name, value in values.items():
            shown = name in ("queue/wait_s", "queue/ready")
            pl_module.log(name, value, prog_bar=shown, on_step=True, on_epoch=False, rank_zero_only=True)

    def _timing(self, reader: StreamReader) -> dict[str, float]:
        now = time.perf_counter()
        waited, elapsed = reader.waited_s - self._waited_before, now - self._since
        values = {
            "queue/wait_s": waited / self._batches,
            "queue/starved": min(1.0, waited / elapsed) if elapsed > 0 else 0.0,
        }
        self._batches, self._since, self._waited_before = 0, now, reader.waited_s
        return values


def _counts(stats: dict[str, Any], reader: StreamReader, dp_size: int) -> dict[str, float]:
    partition = stats["partitions"].get(reader.partition, {})
    task = partition.get("tasks", {}).get(reader.stream.task, {})
    where = "" if reader.stream.where is None else f" where {reader.stream.where}"
    ready = task.get("ready", {}).get(",".join(reader.stream.fields) + where, 0)
    in_flight = task.get("in_flight", 0) - reader.batches_done * dp_size
    return {"queue/ready": float(ready), "queue/in_flight": float(max(0, in_flight))}
