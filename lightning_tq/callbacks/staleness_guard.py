# SPDX-License-Identifier: Apache-2.0
"""StalenessGuard: bounds how old the policy that made a sample may be when the sample is trained."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import TQBatch, meta_of
from lightning_tq.callbacks.publish_weights import PublishWeights
from lightning_tq.checks import check_int
from lightning_tq.loader import StreamReader
from lightning_tq.producers.pacing import PERMITS_PARTITION, Permits
from lightning_tq.run import run_of
from lightning_tq.trainer_compat import (
    callbacks_of,
    fetches_ahead,
    restores_after_setup,
    step_when_trained,
)
from transfer_queue import BatchMeta
from transfer_queue.errors import InvalidRequestError, TransferQueueError


class StaleSamplesError(TransferQueueError, RuntimeError):
    """Training got samples that are older than the guard allows, and ``drop`` is off."""


class StalenessGuard(Callback):
    """Bounds the age of samples: optimizer steps between the policy that made a sample and the step that trains it.

    Producers tag samples with their version, ``{"policy_version": 7}``, and ask a ``Pacer`` before they generate. It
    keeps them at most ``max_staleness`` steps ahead of the trainer. A sample can still be too old if its producer
    did not ask, or did not wait for its turn. It then ends the training, or is dropped.

    Logs ``staleness/mean`` and ``staleness/max`` of the first rank's batches, and ``staleness/dropped``, the samples
    dropped so far on all ranks.

    Examples:
        >>> trainer = L.Trainer(max_epochs=1, callbacks=[StalenessGuard(max_staleness=3, drop=True)])
        >>> trainer.fit(Model(), dm)
        >>> trainer.global_step  # steps 0 to 3 train samples of version 0
        4
    """

    def __init__(
        self,
        max_staleness: int = 1,
        drop: bool = False,
        pace: bool = True,
        tag: str = "policy_version",
        samples_per_step: int | None = None,
        partition: str = PERMITS_PARTITION,
    ) -> None:
        """Args:
            max_staleness: Most versions (optimizer steps) between a sample's policy and the one that learns from it.
            drop: Remove samples that are too old from the batch, and count them. If a rank would have none left, all
                ranks skip the batch. False: such samples are an error.
            pace: Issue permits to producers. False: only check the samples.
            tag: Tag that holds the version a sample was made with.
            samples_per_step: Samples per optimizer step, over all ranks. Default: calculated from the stream and the
                Trainer. Needed where batches have no fixed size.
            partition: Partition for the permits, one sample each.
        Raises:
            InvalidRequestError: a number out of range; it is a ValueError.
        """
        check_int("max_staleness", max_staleness, 0)
        check_int("samples_per_step", samples_per_step, 1, optional=True)
        self.max_staleness = max_staleness
        self.drop = drop
        self.pace = pace
        self.tag = tag
        self.samples_per_step = samples_per_step
        self.partition = partition
        self.dropped = 0
        """Samples dropped in this fit, on all ranks."""
        # Sample counts over all ranks.
        self._gone = 0  # trained, dropped or left over, up to the last optimizer step
        self._since_step = 0  # trained since that step
        self._origin = 0  # gone before the current partition; its rounds are counted from here
        self._done_of: dict[str, int] = {}  # trained or dropped in this epoch, by partition
        self._filtered: deque[int] = deque()  # samples of each batch that was filtered and is not trained yet
        self._version: int | None = None
        self._permits: Permits | None = None

    # ---- begin and end ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run = run_of(trainer, "StalenessGuard")
        if stage != "fit":
            return
        reader = run.train_reader()
        self._check(trainer, reader)
        self.dropped = self._gone = self._since_step = self._origin = 0
        self._done_of.clear()
        self._filtered.clear()
        self._version = None
        if self.drop:
            reader.filter_batch = lambda batch: self._filter(trainer, reader, batch)
        if self.pace and trainer.is_global_zero:
            self._permits = Permits(run.client, self.partition)
            self._permits.begin()
            # An earlier trainer's permits may still be in use, at most as many as it issued ahead.
            self._gone = max(0, self._permits.issued - self._window(trainer))
            self._origin = self._permits.issued

    def _check(self, trainer: Trainer, reader: StreamReader) -> None:
        if self.pace and reader.replay:
            raise InvalidRequestError(
                "StalenessGuard can't pace a stream that reads its samples again (replay, overfit_batches), because "
                "they are older each time. Set pace=False or replay=False."
            )
        if self.pace and self.samples_per_step is None:
            self._check_window(trainer, reader)
        for publisher in (each for each in callbacks_of(trainer) if isinstance(each, PublishWeights)):
            if publisher.every_n_steps > self.max_staleness + 1:
                raise InvalidRequestError(
                    f"weights are published every {publisher.every_n_steps} steps, so the newest are up to "
                    f"{publisher.every_n_steps - 1} versions old, and samples exceed "
                    f"max_staleness={self.max_staleness}. Raise it, or publish more often."
                )

    def _check_window(self, trainer: Trainer, reader: StreamReader) -> None:
        """Check that permits always cover the whole batches that a step and Lightning's look-ahead need."""
        per_step, per_round = self._per_step(trainer), self._per_round(trainer)
        per_item = reader.stream.micro_size * run_of(trainer).topology.dp_size
        looks_ahead = fetches_ahead(trainer, reader.stream)
        needed = per_step + looks_ahead * per_item
        starts = range(0, math.lcm(per_step, per_round), per_item if self.drop else per_step)
        most = max(math.ceil((start + needed) / per_round) * per_round - start for start in starts)
        least = math.ceil(most / per_step) - 1
        if self.max_staleness < least:
            ahead = ", and at unknown length Lightning fetches one ahead" if looks_ahead else ""
            raise InvalidRequestError(
                f"max_staleness={self.max_staleness} permits {self._window(trainer)} samples at a time, but training "
                f"waits for up to {most}: a step uses {per_step}, the stream draws {per_round} at once{ahead}. Set "
                f"max_staleness={least}, or Stream(num_batches=...), or batches as large as a step."
            )

    # Like the weights, permits may be needed for the first batch, which may be fetched before on_train_start.

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        saved = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if saved is not None and (self._permits is None or self._permits.issued):  # the same producers continue
            self._gone, self._since_step, self._origin = saved["gone"], saved["since_step"], saved["origin"]
            self._done_of = dict(saved["done_of"])
        self._issue(trainer, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._version is None and not restores_after_setup(trainer):
            self._issue(trainer, trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._issue(trainer, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()  # Lightning skips on_train_end when there is nothing to train

    def _end(self) -> None:
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._permits = None  # not ended, since a resumed trainer issues permits to the same producers

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._permits = None

    def state_dict(self) -> dict[str, Any]:
        """Sample counts, as plain numbers."""
        return {
            "gone": self._gone, "since_step": self._since_step, "origin": self._origin, "done_of": dict(self._done_of)
        }  # fmt: skip

    # ---- pacing ----

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        meta = meta_of(batch)
        if self.drop:
            trained = self._filtered.popleft()
        else:
            trained = meta.padding_mask.count(False) * run_of(trainer).topology.dp_size
        self._since_step += trained
        self._count(meta, trained)
        # Only a step makes a new version. Permits issued within an accumulation would yield samples that are too old.
        if trainer.global_step != self._version:
            self._gone, self._since_step = self._gone + self._since_step, 0
            self._issue(trainer, trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Samples that an epoch leaves over will not be trained, so issue permits to replace them."""
        self._filtered.clear()
        run = run_of(trainer)
        reader = run.train_reader()
        if reader.progress.partition in (None, run.partition_of(reader)):
            return  # the next epoch continues in it
        done = self._done_of.pop(reader.progress.partition, 0)
        partition = run.client.get_stats()["partitions"].get(reader.progress.partition)
        if partition is not None:
            self._gone += int(partition["published"]) - done
            self._origin = self._gone + self._since_step
            self._issue(trainer, trainer.global_step)

    def _count(self, meta: BatchMeta, samples: int) -> None:
        name = meta.partition_ids[0]
        self._done_of[name] = self._done_of.get(name, 0) + samples

    def _issue(self, trainer: Trainer, version: int) -> None:
        self._version = version
        if self._permits is not None:
            # Issue whole rounds, because the sampler decides the order of samples within a round.
            per_round = self._per_round(trainer)
            rounds = (self._gone + self._window(trainer) - self._origin) // per_round
            self._permits.issue(self._origin + rounds * per_round, version)

    def _window(self, trainer: Trainer) -> int:
        """Samples that may be in progress: those of the next step and of ``max_staleness`` more steps."""
        return (self.max_staleness + 1) * self._per_step(trainer)

    def _per_step(self, trainer: Trainer) -> int:
        if self.samples_per_step is not None:
            return self.samples_per_step
        run = run_of(trainer)
        return run.train_reader().stream.micro_size * run.topology.dp_size * trainer.accumulate_grad_batches

    def _per_round(self, trainer: Trainer) -> int:
        if self.samples_per_step is not None:
            return 1  # batches have no fixed size
        run = run_of(trainer)
        return run.train_reader().stream.batch_size * run.topology.dp_size

    # ---- ages ----

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        known = [age for age in self._ages(meta_of(batch), trainer.global_step) if age is not None]
        if not known:
            return
        if max(known) > self.max_staleness:
            raise StaleSamplesError(
                f"{sum(age > self.max_staleness for age in known)} of {len(known)} samples are more than "
                f"{self.max_staleness} versions old, the oldest {max(known)}. Producers must call Pacer.admit() before "
                f"they generate, read the weights after it, and put within Pacer.turn(). Otherwise raise max_staleness "
                f"or set drop=True."
            )
        values = {"mean": sum(known) / len(known), "max": float(max(known)), "dropped": float(self.dropped)}
        for name, value in values.items():
            pl_module.log(f"staleness/{name}", value, on_step=True, on_epoch=False, rank_zero_only=True)

    def _ages(self, meta: BatchMeta, version: int) -> list[int | None]:
        """Age of each sample in versions; None for padding rows."""
        ages: list[int | None] = []
        for tags, is_padding in zip(meta.custom_meta, meta.padding_mask, strict=True):
            made = tags.get(self.tag)
            if isinstance(made, bool) or not isinstance(made, int):
                raise InvalidRequestError(
                    f"a sample of partition {meta.partition_ids[0]!r} has tag {self.tag!r} = {made!r}, but it must "
                    f"be the policy version that made the sample. Use put with tags=[{{{self.tag!r}: version}}, ...]."
                )
            ages.append(None if is_padding else version - made)
        return ages

    # ---- dropping ----

    def _filter(self, trainer: Trainer, reader: StreamReader, batch: TQBatch) -> TQBatch | None:
        """The samples that are young enough to train. None, on all ranks, if one rank would have no samples left."""
        ages = self._ages(batch.meta, step_when_trained(trainer, reader.progress))
        keep = [position for position, age in enumerate(ages) if age is None or age <= self.max_staleness]
        stale = len(ages) - len(keep)
        real = sum(age is not None for age in ages)
        dropped, of_all = _agreed(trainer, 0 < stale == real, stale, real)
        self.dropped += dropped
        if dropped < of_all or not dropped:
            self._filtered.append(of_all)
            return batch.select(keep) if stale else batch
        # No step uses this batch, so its replacement needs permits now.
        self._gone += dropped
        self._count(batch.meta, dropped)
        if self._version is not None:
            self._issue(trainer, self._version)
        return None


def _agreed(trainer: Trainer, empty: bool, stale: int, real: int) -> tuple[int, int]:
    """(dropped samples, all samples) of a batch over all ranks. All are dropped if one rank keeps none."""
    run = run_of(trainer)
    counts = torch.tensor([empty, stale, real], dtype=torch.int64, device=trainer.strategy.root_device)
    if not run.topology.is_reader:
        counts[1:] = 0  # its group's reader counts the same samples
    reduced = trainer.strategy.reduce(counts, reduce_op="sum")
    any_empty, all_stale, all_real = torch.as_tensor(reduced).tolist()
    return (all_real if any_empty else all_stale), all_real
