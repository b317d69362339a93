# SPDX-License-Identifier: Apache-2.0
"""StalenessGuard: no sample is trained that an older policy made than was allowed."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import TQBatch
from lightning_tq.callbacks.partition_switch import datamodule_of
from lightning_tq.callbacks.publish_weights import PublishWeights, restores_later
from lightning_tq.callbacks.write_back import meta_of
from lightning_tq.checks import check_int
from lightning_tq.feed import Feed
from lightning_tq.pacing import PARTITION, Grants
from transfer_queue import BatchMeta
from transfer_queue.errors import InvalidRequestError, TransferQueueError


class StaleSamplesError(TransferQueueError, RuntimeError):
    """Samples came to training that are older than the guard allows, and it was not told to drop them."""


class StalenessGuard(Callback):
    """Bounds the age of what is trained: optimizer steps between the policy that made a sample and its own step.

    Producers tag samples with the version they were made with, ``{"policy_version": 7}``, and ask a ``Pacer`` before
    they generate: it lets them be ``max_staleness`` steps ahead of the trainer and no more. A sample that is too old
    all the same (its producer didn't ask, or didn't wait for its turn) ends the training, or is dropped.

    Logs ``staleness/mean`` and ``staleness/max`` of each batch of the first rank, and ``staleness/dropped``, samples
    dropped so far on all ranks.
    """

    def __init__(
        self,
        max_staleness: int = 1,
        drop: bool = False,
        pace: bool = True,
        tag: str = "policy_version",
        samples_per_step: int | None = None,
        partition: str = PARTITION,
    ) -> None:
        """Args:
            max_staleness: Most versions (optimizer steps) between a sample's policy and the one that learns from it.
            drop: Leave samples that are too old out of the batch, and count them. Where a rank would have none left,
                the batch is left out on all ranks. Without it they are an error.
            pace: Give producers leave to generate. False: they are paced otherwise, or only checked.
            tag: Tag of a sample that says the version it was made with.
            samples_per_step: Samples that one optimizer step uses, over all ranks. Default: what the stream and the
                Trainer say; needed where batches have no fixed size.
            partition: Where leave is kept, one sample per sample.
        Raises:
            InvalidRequestError: a number out of range; is a ValueError.
        """
        for name, value, least in (("max_staleness", max_staleness, 0), ("samples_per_step", samples_per_step, 1)):
            if value is None and name == "samples_per_step":
                continue
            check_int(name, value, least)
        self.max_staleness = max_staleness
        self.drop = drop
        self.pace = pace
        self.tag = tag
        self.samples_per_step = samples_per_step
        self.partition = partition
        self.dropped = 0
        """Samples dropped in this fit, on all ranks."""
        self._gone = 0  # samples that training is done with, as of the last optimizer step: trained, dropped, left over
        self._since_step = 0  # trained since then
        self._origin = 0  # of these the ones before the partition that is read now: its rounds are counted from there
        self._done_of: dict[str, int] = {}  # the same since the epoch began, by partition
        self._screened: deque[int] = deque()  # samples on all ranks of each batch that isn't trained yet
        self._version: int | None = None
        self._grants: Grants | None = None

    # ---- begin and end ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = datamodule_of(trainer, "StalenessGuard")
        if stage != "fit":
            return
        feed = datamodule.train_feed()
        self._check(trainer, feed)
        self.dropped = self._gone = self._since_step = self._origin = 0
        self._done_of.clear()
        self._screened.clear()
        self._version = None
        if self.drop:
            feed.screen = lambda batch: self._screen(trainer, feed, batch)
        if self.pace and trainer.is_global_zero:
            self._grants = Grants(datamodule.client, self.partition)
            self._grants.begin()
            # Of leave that an earlier trainer gave, as much may be under way as it ever gave ahead.
            self._gone = max(0, self._grants.given - self._window(trainer))
            self._origin = self._grants.given

    def _check(self, trainer: Trainer, feed: Feed) -> None:
        if self.pace and feed.replay:
            raise InvalidRequestError(
                "StalenessGuard can't pace a stream that is read again and again (replay, overfit_batches): its "
                "samples grow older each time. Set pace=False, or replay=False."
            )
        if self.pace and self.samples_per_step is None:
            self._check_leave(trainer, feed)
        for publisher in (each for each in trainer.callbacks if isinstance(each, PublishWeights)):  # type: ignore[attr-defined]
            if publisher.every_n_steps > self.max_staleness + 1:
                raise InvalidRequestError(
                    f"weights are published every {publisher.every_n_steps} steps, so the newest are up to "
                    f"{publisher.every_n_steps - 1} versions old: no sample could keep max_staleness="
                    f"{self.max_staleness}. Raise it, or publish more often."
                )

    def _check_leave(self, trainer: Trainer, feed: Feed) -> None:
        """Does leave always reach for the whole batches that a step, and Lightning's look-ahead, ask for?"""
        per_step, per_round = self._per_step(trainer), self._per_round(trainer)
        per_item = feed.stream.micro_size * datamodule_of(trainer, "StalenessGuard").dp_size
        looks_ahead = feed.stream.num_batches is None and not isinstance(trainer.limit_train_batches, int)
        asked = per_step + looks_ahead * per_item
        starts = range(0, math.lcm(per_step, per_round), per_item if self.drop else per_step)
        most = max(math.ceil((start + asked) / per_round) * per_round - start for start in starts)
        least = math.ceil(most / per_step) - 1
        if self.max_staleness < least:
            ahead = ", and at unknown length Lightning fetches one ahead" if looks_ahead else ""
            raise InvalidRequestError(
                f"max_staleness={self.max_staleness} gives leave for {self._window(trainer)} samples at a time, but "
                f"training waits for up to {most}: a step uses {per_step}, the stream draws {per_round} at once"
                f"{ahead}. Allow max_staleness={least}, or give Stream(num_batches=...) or batches as large as a step."
            )

    # As for weights: a producer may wait for leave before the first batch, which comes before on_train_start.

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        saved = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if saved is not None and (self._grants is None or self._grants.given):  # the same producers go on
            self._gone, self._since_step, self._origin = saved["gone"], saved["since_step"], saved["origin"]
            self._done_of = dict(saved["done_of"])
        self._give(trainer, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._version is None and not restores_later(trainer):
            self._give(trainer, trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give(trainer, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()  # where Lightning found nothing to train, it left on_train_end out

    def _end(self) -> None:
        grants, self._grants = self._grants, None
        if grants is not None:
            grants.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._grants = None  # not ended: a trainer that goes on from a checkpoint gives leave to the same producers

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._grants = None

    def state_dict(self) -> dict[str, Any]:
        """Samples that training is done with, as plain numbers."""
        return {
            "gone": self._gone, "since_step": self._since_step, "origin": self._origin, "done_of": dict(self._done_of)
        }  # fmt: skip

    # ---- pacing ----

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        meta = meta_of(batch)
        if self.drop:
            trained = self._screened.popleft()
        else:
            trained = meta.padding_mask.count(False) * datamodule_of(trainer, "StalenessGuard").dp_size
        self._since_step += trained
        self._count(meta, trained)
        # Only a step makes a new version: leave given within an accumulation would be for samples that are too old.
        if trainer.global_step != self._version:
            self._gone, self._since_step = self._gone + self._since_step, 0
            self._give(trainer, trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What an epoch leaves behind in its partition is not trained any more, and must be made up for."""
        self._screened.clear()
        datamodule = datamodule_of(trainer, "StalenessGuard")
        feed = datamodule.train_feed()
        if feed.partition in (None, datamodule.partition("train")):
            return  # the next epoch goes on in it
        done = self._done_of.pop(feed.partition, 0)
        partition = datamodule.client.get_stats()["partitions"].get(feed.partition)
        if partition is not None:
            self._gone += int(partition["published"]) - done
            self._origin = self._gone + self._since_step
            self._give(trainer, trainer.global_step)

    def _count(self, meta: BatchMeta, samples: int) -> None:
        name = meta.partition_ids[0]
        self._done_of[name] = self._done_of.get(name, 0) + samples

    def _give(self, trainer: Trainer, version: int) -> None:
        self._version = version
        if self._grants is not None:
            # Whole rounds: which of its samples are trained first, and which some steps later, is up to the sampler.
            per_round = self._per_round(trainer)
            rounds = (self._gone + self._window(trainer) - self._origin) // per_round
            self._grants.give(self._origin + rounds * per_round, version)

    def _window(self, trainer: Trainer) -> int:
        """Samples that may be under way: for the step that comes, and as many steps more as they may be old."""
        return (self.max_staleness + 1) * self._per_step(trainer)

    def _per_step(self, trainer: Trainer) -> int:
        if self.samples_per_step is not None:
            return self.samples_per_step
        datamodule = datamodule_of(trainer, "StalenessGuard")
        return datamodule.train_feed().stream.micro_size * datamodule.dp_size * trainer.accumulate_grad_batches

    def _per_round(self, trainer: Trainer) -> int:
        if self.samples_per_step is not None:
            return 1  # batches have no fixed size
        datamodule = datamodule_of(trainer, "StalenessGuard")
        return datamodule.train_feed().stream.batch_size * datamodule.dp_size

    # ---- ages ----

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        known = [age for age in self._ages(meta_of(batch), trainer.global_step) if age is not None]
        if not known:
            return
        if max(known) > self.max_staleness:
            raise StaleSamplesError(
                f"{sum(age > self.max_staleness for age in known)} of {len(known)} samples are more than "
                f"{self.max_staleness} versions old, the oldest {max(known)}. Do all producers ask Pacer.admit() "
                f"before they generate, take the weights after, and put within Pacer.turn()? Or raise max_staleness, "
                f"or set drop=True."
            )
        values = {"mean": sum(known) / len(known), "max": float(max(known)), "dropped": float(self.dropped)}
        for name, value in values.items():
            pl_module.log(f"staleness/{name}", value, on_step=True, on_epoch=False, rank_zero_only=True)

    def _ages(self, meta: BatchMeta, version: int) -> list[int | None]:
        """Versions between each sample and this one; None for rows that only pad."""
        ages: list[int | None] = []
        for tags, filler in zip(meta.custom_meta, meta.padding_mask, strict=True):
            made = tags.get(self.tag)
            if isinstance(made, bool) or not isinstance(made, int):
                raise InvalidRequestError(
                    f"a sample of partition {meta.partition_ids[0]!r} has the tag {self.tag!r}: {made!r}; it must be "
                    f"the policy version that made it. Put samples with tags=[{{{self.tag!r}: version}}, ...]."
                )
            ages.append(None if filler else version - made)
        return ages

    # ---- dropping ----

    def _screen(self, trainer: Trainer, feed: Feed, batch: TQBatch) -> TQBatch | None:
        """What is young enough when it will be trained; None, on all ranks, where one of them would have nothing."""
        ages = self._ages(batch.meta, _version_when_trained(trainer, feed))
        keep = [position for position, age in enumerate(ages) if age is None or age <= self.max_staleness]
        stale = len(ages) - len(keep)
        real = sum(age is not None for age in ages)
        dropped, of_all = _agreed(trainer, 0 < stale == real, stale, real)
        self.dropped += dropped
        if dropped < of_all or not dropped:
            self._screened.append(of_all)
            return batch.select(keep) if stale else batch
        # No step will be for it: those that come in its place move up by one, so there is leave for them now.
        self._gone += dropped
        self._count(batch.meta, dropped)
        if self._version is not None:
            self._give(trainer, self._version)
        return None


def _agreed(trainer: Trainer, empty: bool, stale: int, real: int) -> tuple[int, int]:
    """(samples of the batch that are dropped, samples of it) over all ranks; all of them where a rank keeps none."""
    datamodule = datamodule_of(trainer, "StalenessGuard")
    counts = torch.tensor([empty, stale, real], dtype=torch.int64, device=trainer.strategy.root_device)
    if not datamodule.topology.is_reader:
        counts[1:] = 0  # the same samples as its peer's
    reduced = trainer.strategy.reduce(counts, reduce_op="sum")
    any_empty, all_stale, all_real = torch.as_tensor(reduced).tolist()
    return (all_real if any_empty else all_stale), all_real


def _version_when_trained(trainer: Trainer, feed: Feed) -> int:
    """Of a batch that is fetched now: where Lightning fetches one ahead, another is trained before it."""
    if feed.taken == feed.trained:
        return trainer.global_step
    started = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return trainer.global_step + ((started + 1) % trainer.accumulate_grad_batches == 0)
