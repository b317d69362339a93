# SPDX-License-Identifier: Apache-2.0
"""AckBatches: the callback that TQDataModule adds to report trained, stepped and saved batches to the ack trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.acks import AckTracker
from lightning_tq.batch import TQBatch
from lightning_tq.trainer_compat import correct_progress

if TYPE_CHECKING:
    from lightning_tq.run import Run


class AckBatches(Callback):
    """The first callback of the Trainer, so that a checkpoint saved at the end of a batch counts that batch."""

    def __init__(self, find_run: Callable[[], Run | None]) -> None:
        self._find_run = find_run
        self._unstepped = 0  # also needed for a checkpoint that is saved after the run
        self._steps = 0  # optimizer steps at the end of the last batch

    # ---- acknowledgements ----

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the previous batch: other callbacks may have needed its samples. By now every rank has
        # asked for this batch, so none of them still looks for where to start.
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
            self._unstepped = tracker.unstepped
        run.check()

    def _has_stepped(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether an optimizer step included this batch."""
        before, self._steps = self._steps, trainer.global_step
        if pl_module.automatic_optimization:
            return not trainer.fit_loop._should_accumulate()
        return self._steps > before  # with manual optimization only the global step shows it

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unstepped = 0
        for tracker in self._trackers():
            tracker.epoch_ended()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        correct_progress(checkpoint, self._unstepped, trainer.num_training_batches != float("inf"))
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
