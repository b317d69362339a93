# SPDX-License-Identifier: Apache-2.0
"""AckBatches: tells a run's training stream what was trained, stepped and saved, so that it acknowledges batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import queue_batch
from lightning_tq.callbacks.early_checkpoint import EarlyCheckpoint
from lightning_tq.loader import StreamReader
from lightning_tq.run import Run, run_of
from lightning_tq.trainer_compat import check_step_of_draw, correct_progress


class AckBatches(Callback):
    """Reports trained, stepped and saved batches. TQDataModule adds it.

    It is the Trainer's first callback, so that a checkpoint saved at the end of a batch counts that batch.
    """

    def __init__(self) -> None:
        self._unstepped = 0  # also needed for a checkpoint that is saved after the run
        self._steps = 0  # optimizer steps at the end of the last batch

    # ---- acknowledgements ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for reader in _trained(trainer):
            if reader.stream.acks_free_room or run_of(trainer).switch.clear_finished:  # else a checkpoint frees no room
                reader.before_batch = EarlyCheckpoint(run_of(trainer), reader).before_batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the previous batch: other callbacks may have needed its samples. By now every rank has
        # asked for this batch, so none of them still asks where to start.
        _ack_due(trainer)
        _set_batch_size(trainer, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = Run.find(trainer)
        if run is None:
            return
        steps = self._steps_with(trainer, pl_module)
        for reader in run.of_stage("train"):
            reader.note_trained(batch, steps > 0)
            self._unstepped = reader.progress.unstepped
            if steps and not _ends_with_draw(trainer, run, reader):
                check_step_of_draw(reader.stream, steps, reader.progress)
        run.watchdog.check()

    def _steps_with(self, trainer: Trainer, pl_module: LightningModule) -> int:
        """How many optimizer steps included this batch."""
        before, self._steps = self._steps, trainer.global_step
        if pl_module.automatic_optimization:
            return int(not trainer.fit_loop._should_accumulate())
        return self._steps - before  # with manual optimization only the global step shows it

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # training stops within the epoch
        self._unstepped = 0
        for reader in _trained(trainer):
            if pl_module.automatic_optimization or not _goes_on(run_of(trainer), reader, 0):
                reader.progress.step()
            else:
                reader.progress.carry()  # until the model steps
            reader.tell_trained()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        correct_progress(checkpoint, self._unstepped)
        for reader in _trained(trainer):
            reader.progress.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for reader in _trained(trainer):
            reader.finish(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            _ack_due(trainer)

    # ---- rows of a batch ----

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _set_batch_size(trainer, batch)

    on_test_batch_start = on_validation_batch_start


def _trained(trainer: Trainer) -> list[StreamReader]:
    """The stream that the Trainer's run trains, if there is one."""
    run = Run.find(trainer)
    return [] if run is None else run.of_stage("train")


def _ends_with_draw(trainer: Trainer, run: Run, reader: StreamReader) -> bool:
    """Whether this is the epoch's last batch, and the next epoch does not go on with what is left of its draw."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not _goes_on(run, reader, 1)


def _goes_on(run: Run, reader: StreamReader, epochs_ahead: int) -> bool:
    """Whether the next epoch goes on in this partition. ``epochs_ahead``: 0 once the run counts this one as done."""
    ends = run.training_ends(epochs_ahead)
    return not ends and run.partition_of(reader, epochs_ahead) == reader.progress.partition


def _ack_due(trainer: Trainer) -> None:
    for reader in _trained(trainer):
        reader.ack_due()


def _set_batch_size(trainer: Trainer, batch: Any) -> None:
    # self.log(on_epoch=True) weights by it. Lightning would search the batch for a tensor, finds none in a TQBatch,
    # and would guess badly from a TensorDict with jagged or text fields.
    results, own = trainer._results, queue_batch(batch)
    if results is not None and own is not None:
        results.batch_size = own.size
