# SPDX-License-Identifier: Apache-2.0
"""QueueMonitor: shows whether training or generation is the bottleneck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import queue_batch
from lightning_tq.callbacks.fit_report import FitReport, TrainingTime
from lightning_tq.checks import check_int
from lightning_tq.loader import StreamReader
from lightning_tq.queue_picture import History, Point, check_matplotlib, draw
from lightning_tq.run import run_of
from transfer_queue import BatchMeta, Finding

_ON_THE_BAR = {"queue/ready": "ready", "queue/wait_s": "wait_s", "queue/staleness": "stale"}


class QueueMonitor(Callback):
    """Logs from the first rank.

    - ``queue/wait_s``: mean seconds that a step waited for its batch, since the last values.
    - ``queue/starved``: share of the time since then, without validation, that training spent waiting.
    - ``queue/ready``: samples that are ready for the training task now.
    - ``queue/in_flight``: batches that all ranks have drawn and not trained yet.
    - ``queue/staleness``: mean age of the batch's samples in versions: from the first lease of a sample's group, or
      from its tag, to the step that trains it.
    - ``staleness/mean`` and ``staleness/max``, the same of a batch of groups, and ``staleness/dropped``, how many
      groups of the partition were dropped because they got too old.

    The progress bar shows three of them: ``ready``, ``wait_s`` and ``stale``. Long waits with nothing ready mean that
    generation is slow. Ready samples and no waits mean that training is slow.

    Examples:
        >>> trainer = L.Trainer(max_epochs=1, callbacks=[QueueMonitor(every_n_steps=2)])
        >>> trainer.fit(Model(), dm)
        >>> sorted(name for name in trainer.logged_metrics if name.startswith("queue/"))
        ['queue/in_flight', 'queue/ready', 'queue/staleness', 'queue/starved', 'queue/wait_s']
    """

    def __init__(self, every_n_steps: int = 1, plot: str | Path | None = None, tag: str = "policy_version") -> None:
        """Args:
            every_n_steps: Training batches between two sets of values. Each set takes one request to the controller.
            plot: At the end of a fit, draw ready samples, waiting and staleness over time into this file, such as
                "queue.png". Needs matplotlib, which the extra "plot" installs.
            tag: Tag that holds the version (optimizer steps) that a sample was made with.
        Raises:
            InvalidRequestError: ``every_n_steps`` is no number of steps.
            ConfigError: ``plot`` without matplotlib.
        """
        check_int("every_n_steps", every_n_steps, 1)
        if plot is not None:
            check_matplotlib(f"QueueMonitor(plot={str(plot)!r})")
        self.every_n_steps = every_n_steps
        self.plot = plot
        self.tag = tag

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run_of(trainer, "QueueMonitor")
        self._batches = self._step = 0
        self._last = TrainingTime(0.0, 0.0)
        self._history = History()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches < self.every_n_steps or not trainer.is_global_zero:
            return
        run, report = run_of(trainer), FitReport.of(trainer)
        reader = run.train_reader()
        now = report.read(reader.waited_s)
        passed, self._last = now.since(self._last), now
        values = {"queue/wait_s": passed.waited_s / self._batches, "queue/starved": passed.waited_s / passed.seconds}
        self._batches = 0
        partition = run.client.get_stats()["partitions"].get(reader.progress.partition, {})
        values |= _counts(partition, reader, run.topology.dp_size)
        own = queue_batch(batch)
        if own is not None:  # a hook may have taken its metadata
            values |= _staleness(own.meta, _ages(own.meta, self.tag, self._step), partition)
        own_step: dict[str, Any] = {"on_step": True, "on_epoch": False, "rank_zero_only": True}
        for name, value in values.items():
            pl_module.log(name, value, **own_step)
            if name in _ON_THE_BAR:  # by a name that leaves room for others
                pl_module.log(_ON_THE_BAR[name], value, prog_bar=True, logger=False, **own_step)
        at_s, staleness = now.since(report.first).seconds, values.get("queue/staleness")
        self._history.add(Point(at_s, values["queue/ready"], values["queue/starved"], staleness))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plot is not None and self._history.points:  # only the first rank has points
            report, waited_s = FitReport.of(trainer), run_of(trainer).train_reader().waited_s
            title = Finding.of_training(*report.read(waited_s).since(report.began)).statement
            draw(self._history.points, title[0].upper() + title[1:], Path(self.plot))


def _ages(meta: BatchMeta, tag: str, version: int) -> list[int]:
    """``version`` minus that of each sample's group, or minus the sample's own, padding rows excluded."""
    if meta.heads is not None and meta.group_versions:
        made = [meta.group_versions.get(head) for head in meta.heads]
    else:
        made = [tags.get(tag) for tags, pad in zip(meta.custom_meta, meta.padding_mask, strict=True) if not pad]
    return [version - each for each in made if isinstance(each, int)]


def _staleness(meta: BatchMeta, ages: list[int], partition: dict[str, Any]) -> dict[str, float]:
    if not ages:
        return {}
    mean = sum(ages) / len(ages)
    if not meta.group_versions:
        return {"queue/staleness": mean}
    dropped = partition.get("groups", {}).get("states", {}).get("stale", 0)  # read no more, because they got too old
    of_groups = {"staleness/mean": mean, "staleness/max": float(max(ages)), "staleness/dropped": float(dropped)}
    return {"queue/staleness": mean, **of_groups}


def _counts(partition: dict[str, Any], reader: StreamReader, dp_size: int) -> dict[str, float]:
    task = partition.get("tasks", {}).get(reader.stream.task, {})
    where = "" if reader.stream.where is None else f" where {reader.stream.where}"
    ready = task.get("ready", {}).get(",".join(reader.stream.fields) + where, 0)
    in_flight = task.get("in_flight", 0) - reader.progress.batches_done * dp_size
    return {"queue/ready": float(ready), "queue/in_flight": float(max(0, in_flight))}
