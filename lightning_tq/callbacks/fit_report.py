# SPDX-License-Identifier: Apache-2.0
"""FitReport: at the end of a fit, one paragraph says whether training or generation was the bottleneck."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.checks import counted
from lightning_tq.run import Run
from lightning_tq.stream import Stream
from lightning_tq.trainer_compat import callbacks_of
from transfer_queue import Finding, GroupSampler
from transfer_queue.errors import TransferQueueError

_LOOK_EVERY_S = 1.0
_LONG_S = 1.0
"""A wait from which on it may have been for a producer to start."""
_SEVERAL_STEPS = 3
"""Generation was not too slow where samples for so many are ready at the end of a run."""
_ADVICE = {
    "training": ("make steps faster or use more data-parallel ranks (more or faster producers would not help)",),
    "the full queue": ("free room in it, as the warnings say that came meanwhile",),
    "bursts or reading": (
        "read ahead (Stream(prefetch=True), or num_workers=1)",
        "let producers put fewer samples more often",
    ),
}
"""What to do where generation was not the bottleneck."""
_MANY_LACK = 8
"""Samples that wait for a last field at the end of a run, from which on those that put it are slow."""


class TrainingTime(NamedTuple):
    """How long a run has trained."""

    seconds: float
    """Validation is left out."""
    waited_s: float
    """How many of them training waited for batches."""

    def since(self, before: TrainingTime) -> TrainingTime:
        """What has passed since an earlier one."""
        seconds = max(self.seconds - before.seconds, 1e-9)
        return TrainingTime(seconds, min(self.waited_s - before.waited_s, seconds))


class FitReport(Callback):
    """Logs the paragraph from the first rank, also after Ctrl-C or SIGTERM. TQDataModule adds one for each run.

    What counts begins with the first batch. A resumed run may have it before the run's producers have started: then it
    begins anew after the last long wait before one of them joined the queue.
    """

    def __init__(self) -> None:
        self.first = TrainingTime(0.0, 0.0)
        """When the first batch had come."""
        self.began = self.first
        """From when on it counts which side waits for the other."""
        self._starting: int | None = None
        """How many of the run's producers had still to join the queue at the last look; None: nobody has looked."""
        self._looked_s = 0.0
        self._last = self._waited_until = self._newest = self.first
        """When a batch had come: the one of the last look, the last one that took a while, and the newest one."""
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._batches = 0

    @staticmethod
    def of(trainer: Trainer) -> FitReport:
        """That of the Trainer's run."""
        return next(each for each in callbacks_of(trainer) if isinstance(each, FitReport))

    def read(self, waited_s: float) -> TrainingTime:
        """What has passed since the run was set up. ``waited_s``: what the stream reader has waited so far."""
        return TrainingTime(time.perf_counter() - self._since, waited_s)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        run = Run.find(trainer)
        if run is not None:
            now = self._newest = self.read(run.train_reader().waited_s)
            if not self._batches:
                self.first = self.began = self._last = self._waited_until = now
            self._look_at_producers(run, now)
        self._batches += 1

    def _look_at_producers(self, run: Run, now: TrainingTime, at_end: bool = False) -> None:
        """Once one of them has joined the queue, or ended, the last long wait doesn't count: it was for its start."""
        if self._starting == 0:
            return
        before, last, self._last = self._starting, self._last, now
        if now.since(last).waited_s >= _LONG_S:
            self._waited_until = now
        if before is None or at_end or now.seconds >= self._looked_s + _LOOK_EVERY_S:
            self._starting, self._looked_s = _num_starting(run), now.seconds
            if self._starting < (before or 0):
                self.began = self._waited_until

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, asks=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self.on_validation_end(trainer, pl_module)
            self._report(trainer, asks=False)  # the queue may have ended, or hang

    def _report(self, trainer: Trainer, asks: bool) -> None:
        """``asks``: the queue, what became of groups, and which field is behind."""
        run = Run.find(trainer)
        if run is None or not self._batches:
            return
        reader, batches = run.train_reader(), counted(self._batches, "batch", "batches")
        now = self.read(reader.waited_s)
        passed = now.since(self.first)
        if reader.stream.replay_from is not None:
            rank_zero_info(f"Replayed {batches} of {reader.stream.replay_from} in {passed.seconds:.1f} s.")
            return
        name, partition = str(reader.progress.partition), {}  # the last one
        if asks:
            partition = run.client.get_stats()["partitions"].get(name, {})
            self._look_at_producers(run, now, at_end=True)
        alone_s, ended = now.since(self._newest).waited_s, ""
        if alone_s >= _LONG_S and run.producers.running() == []:
            now = max(self._newest, self.began)
            ended = f" Then it waited {alone_s:.0f} s, when all its producers had ended."
        since_began = now.since(self.began)
        was_full = reader.waited_full_s > since_began.waited_s / 2
        ready = _more_than_enough(reader.stream, partition, run.topology.dp_size)
        limit, groups = Finding.of_training(*since_began, was_full, ready), partition.get("groups", {})
        advice = _advice(reader.stream, limit, partition, run.producers.restarted())
        limit = replace(limit, to_do=tuple(advice))
        rank_zero_info(
            f"Queue: {batches} in {passed.seconds:.1f} s without validation, the first one after "
            f"{self.first.seconds:.1f} s{self._start_text()}; {limit}{_of_groups(name, groups)}{ended}"
        )

    def _start_text(self) -> str:
        """What doesn't count of the time since the first batch."""
        start_s = self.began.since(self.first).seconds
        return f", then {start_s:.1f} s more while producers started" if start_s >= _LONG_S else ""


def _num_starting(run: Run) -> int:
    """How many of the producers that it has started on this rank have still to join the queue."""
    running = run.producers.running() or []
    if running:
        with suppress(TransferQueueError):
            clients = run.client.get_stats()["clients"]
            return sum(each.is_starting(clients) for each in running)
    return len(running)


def _more_than_enough(stream: Stream, partition: dict[str, Any], dp_size: int) -> int:
    """Samples that are ready for the stream, if they are enough for several steps; else 0."""
    ready = partition.get("tasks", {}).get(stream.task, {}).get("ready", {})
    most, rows = max(ready.values(), default=0), (stream.batch_size or math.inf) * dp_size
    return most if most >= _SEVERAL_STEPS * rows else 0


def _of_groups(partition: str, groups: dict[str, Any]) -> str:
    """What became of the groups of a partition; "" without any."""
    if not groups or not (found := Finding.of_groups(partition, groups)).held_up_by:
        return ""
    said = str(found)
    return f" {said[0].upper()}{said[1:]}"


def _rejected(sampler: GroupSampler, groups: dict[str, Any]) -> float:
    """The share of the finished groups that the sampler's gate has rejected."""
    states = groups.get("states", {})
    finished = groups.get("added", 0) - sum(states.get(state, 0) for state in ("waiting", "running", "closed"))
    return float(groups.get("rejected", {}).get(sampler.gate, 0) / max(finished, 1))


def _behind(stream: Stream, partition: dict[str, Any]) -> tuple[str, int]:
    """The field of the stream that most samples lack which have another one of its fields; and how many."""
    produced = {name: partition.get("produced", {}).get(name, 0) for name in stream.fields}
    last = min(produced, key=lambda name: produced[name])
    return last, max(produced.values()) - produced[last]


def _advice(stream: Stream, limit: Finding, partition: dict[str, Any], restarted: int = 0) -> Iterator[str]:
    """What to turn. Generation may be slow, or may be held back; producers were started again so many times."""
    if limit.what != "generation":
        yield from _ADVICE.get(limit.what, ())
        return
    if restarted:
        yield f"mend what ended producers, which were started again {counted(restarted, 'time')} (the warnings say why)"
    sampler, groups, (last, lacking) = stream.sampler, partition.get("groups", {}), _behind(stream, partition)
    if lacking >= max(_MANY_LACK, stream.batch_size or 0):  # more of what comes before would only make them older
        yield f"add producers of field {last!r}, which {lacking:,} samples still lack, or make them faster"
        return
    if isinstance(sampler, GroupSampler) and (share := _rejected(sampler, groups)) > 0.5:
        yield f"loosen the gate {sampler.gate!r}, which rejected {share:.0%} of the groups"
        yield "work on prompts that pass it"
        enough = 1 / max(1 - share, 0.1)
        if enough > sampler.oversample and (sampler.stale != "wait" or "max_staleness" not in sampler.limits):
            yield f"begin more groups than a step needs by GroupSampler(oversample={enough:.2g})"
    else:
        yield "add producers (Producer(count=...)) or make them faster"
    if isinstance(sampler, GroupSampler):
        more = ", ".join(f"{name}={value}" for name, value in sampler.limits.items())
        yield f"let workers go further ahead of training by GroupSampler({more})"
    if not stream.prefetch:
        yield "set Stream(prefetch=True)"
