# SPDX-License-Identifier: Apache-2.0
"""When a trained batch is acknowledged, so that the queue may delete it: AckTracker decides, AckBatches reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import TQBatch
from lightning_tq.stream_reader import StreamReader
from lightning_tq.topology import Topology
from lightning_tq.trainer_compat import correct_progress
from transfer_queue import BatchMeta, TransferQueueClient

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lightning_tq.run import Run

logger = logging.getLogger(__name__)

Ack = Literal["auto", "checkpoint", "step", "never"]
_WARN_AFTER_BATCHES = 1000

NewestBatches = dict[str, BatchMeta]
"""{partition: metadata of its newest batch}. An ack of a batch also covers those before it."""


class AckTracker:
    """Follows the batches of one training stream: trained, in an optimizer step, in a checkpoint, acknowledged.

    A batch is acknowledged when no resumed run can need it. Lightning writes a checkpoint after its save hook, so the
    ack waits for the hook after that one.
    """

    def __init__(
        self,
        reader: StreamReader,
        client: TransferQueueClient,
        topology: Topology,
        ack: Ack,
        keeps_checkpoints: bool,
        in_background: bool = False,
    ) -> None:
        """Args:
        ack: As for TQDataModule.
        keeps_checkpoints: Whether the run keeps checkpoints. Then "auto" waits for one, as "checkpoint" does.
        in_background: Whether a checkpoint may be incomplete until the next one is saved. Acks then wait for that.
        """
        self.checkpoints_written = 0
        self._ack = ack
        self._waits_for_checkpoint = ack == "checkpoint" or (ack != "step" and keeps_checkpoints)
        self._never = ack == "never" or reader.replay
        self.reader = reader
        self._client = client
        self._topology = topology
        self._trained: NewestBatches = {}
        self._stepped: NewestBatches = {}
        self._in_background = in_background
        self._saving: NewestBatches = {}
        self._due: NewestBatches = {}
        self._checkpoints_saved = 0
        self._batches_since_checkpoint = 0
        self._just_acked: list[str] = []

    def micro_batch_trained(self, batch: Any, stepped: bool) -> None:
        """Note a trained micro-batch. ``stepped``: an optimizer step followed it."""
        for meta in self.reader.mark_trained(batch):
            self._trained[meta.partition_ids[0]] = meta
        self._batches_since_checkpoint += 1
        if stepped:
            self.optimizer_stepped()

    def optimizer_stepped(self) -> None:
        """An optimizer step included what was trained so far, or never will, because its epoch has ended."""
        self.reader.mark_stepped()
        self._stepped.update(self._trained)
        self._trained.clear()
        if not self._waits_for_checkpoint:
            self._make_due()

    def _make_due(self) -> None:
        self._due.update(self._stepped)
        self._stepped.clear()

    def wait_for_checkpoints(self) -> None:
        """From now on a batch waits for a checkpoint, except with ``ack="step"``."""
        self._waits_for_checkpoint = self._ack != "step"

    def checkpoint_saved(self) -> None:
        """A checkpoint with every optimizer step so far is being written."""
        self.wait_for_checkpoints()  # also after a checkpoint that the user saves by hand
        if self._in_background:
            self._due.update(self._saving)
            self._saving, self._stepped = self._stepped, {}
        else:
            self._make_due()
        self._checkpoints_saved += 1
        self._batches_since_checkpoint = 0

    def ack_due(self) -> None:
        """Acknowledge what is due. One rank of each data-parallel group does so; the first group's rank clears."""
        self.checkpoints_written = max(0, self._checkpoints_saved - int(self._in_background))
        self._warn_without_checkpoint()
        due, self._due = self._due, {}
        if self._never or not due:
            return
        if self._topology.is_reader:
            for partition, meta in due.items():
                acked = self._client.ack(meta, self.reader.stream.task, earlier=True)
                if partition == self.reader.partition:
                    self.reader.batches_done = max(0, self.reader.batches_done - acked)
        # Another rank may ack a partition's last batches after this, so each partition is cleared twice.
        self._clear(dict.fromkeys([*self._just_acked, *due]))
        self._just_acked = list(due)

    def finish(self, owner: Trainer | Fabric) -> None:
        """Training is over: acknowledge what is due on all ranks. This is a collective."""
        self.ack_due()
        if self.reader.stream.clear_consumed and not self._never:
            owner.strategy.barrier("lightning_tq_acked")
            self._clear(dict.fromkeys(self._just_acked))

    def _clear(self, partitions: Mapping[str, None]) -> None:
        tasks = self.reader.stream.clearing_tasks
        if not tasks or not (self._topology.is_reader and self._topology.dp_rank == 0):
            return
        for partition in partitions:
            self._client.clear_consumed(partition, tasks)

    def _warn_without_checkpoint(self) -> None:
        waits = self._waits_for_checkpoint and not self._never
        if waits and self._batches_since_checkpoint == _WARN_AFTER_BATCHES:
            self._batches_since_checkpoint += 1
            logger.warning(
                f"{_WARN_AFTER_BATCHES} batches of stream {self.reader.label!r} were trained without a checkpoint, "
                f"and the queue keeps them all for a resume. Save more often "
                f"(ModelCheckpoint(every_n_train_steps=...)), disable checkpoints "
                f"(Trainer(enable_checkpointing=False)), or acknowledge without one: TQDataModule(ack='step')."
            )


class AckBatches(Callback):
    """Reports trained, stepped and saved batches. TQDataModule adds it.

    It is the Trainer's first callback, so that a checkpoint saved at the end of a batch counts that batch.
    """

    def __init__(self, find_run: Callable[[], Run | None]) -> None:
        self._find_run = find_run
        self._unstepped = 0  # also needed for a checkpoint that is saved after the run
        self._steps = 0  # optimizer steps at the end of the last batch

    # ---- acknowledgements ----

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the previous batch: other callbacks may have needed its samples. By now every rank has
        # asked for this batch, so none of them still asks where to start.
        self._ack_due()
        _set_batch_size(trainer, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = self._find_run()
        if run is None:
            return
        stepped = self._has_stepped(trainer, pl_module)
        for tracker in run.ack_trackers:
            tracker.micro_batch_trained(batch, stepped)
            self._unstepped = tracker.reader.unstepped
        run.check()

    def _has_stepped(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether an optimizer step included this batch."""
        before, self._steps = self._steps, trainer.global_step
        if pl_module.automatic_optimization:
            return not trainer.fit_loop._should_accumulate()
        return self._steps > before  # with manual optimization only the global step shows it

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # training stops within the epoch
        self._unstepped = 0
        for tracker in self._trackers():
            tracker.optimizer_stepped()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        correct_progress(checkpoint, self._unstepped)
        for tracker in self._trackers():
            tracker.checkpoint_saved()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for tracker in self._trackers():
            tracker.finish(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._ack_due()

    def _ack_due(self) -> None:
        for tracker in self._trackers():
            tracker.ack_due()

    def _trackers(self) -> Sequence[AckTracker]:
        run = self._find_run()
        return () if run is None else run.ack_trackers

    # ---- rows of a batch ----

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _set_batch_size(trainer, batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _set_batch_size(trainer, batch)


def _set_batch_size(trainer: Trainer, batch: Any) -> None:
    # self.log(on_epoch=True) weights by it. Lightning would search the batch for a tensor, finds none in a TQBatch,
    # and would guess badly from a TensorDict with jagged or text fields.
    results = trainer._results
    if results is not None and isinstance(batch, TQBatch):
        results.batch_size = batch.size
