# SPDX-License-Identifier: Apache-2.0
"""Bookkeeper: the callback that TQDataModule adds for itself; notes what was trained and how many rows a batch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.batch import TQBatch
from lightning_tq.books import put_right

if TYPE_CHECKING:
    from lightning_tq.run import Run


class Bookkeeper(Callback):
    """First in the Trainer's list, so that a checkpoint saved at the end of a batch knows that it was trained."""

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self._run = run
        self._unstepped = 0  # outlives the run: a checkpoint may be saved after it
        self._steps = 0  # optimizer steps, as of the last batch

    # ---- what was trained ----

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Here and not at the end of the batch before: other callbacks may still have needed its samples, and every
        # rank has asked for this batch by now, so none still looks for where to begin.
        self._settle()
        _tell_batch_size(trainer, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = self._run()
        if run is None:
            return
        stepped = self._stepped(trainer, pl_module)
        for books in run.books:
            books.trained(batch, stepped)
            self._unstepped = books.unstepped
        run.check()

    def _stepped(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Has the optimizer taken the gradient of this batch?"""
        before, self._steps = self._steps, trainer.global_step
        if pl_module.automatic_optimization:
            return not trainer.fit_loop._should_accumulate()
        return self._steps > before  # only the module itself knows when it steps

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = self._run()
        self._unstepped = 0
        for books in run.books if run is not None else ():
            books.epoch_over()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        put_right(checkpoint, self._unstepped, trainer.num_training_batches != float("inf"))
        run = self._run()
        for books in run.books if run is not None else ():
            books.dumped()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = self._run()
        for books in run.books if run is not None else ():
            books.end(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._settle()

    def _settle(self) -> None:
        run = self._run()
        for books in run.books if run is not None else ():
            books.settle()

    # ---- rows of a batch ----

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _tell_batch_size(trainer, batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _tell_batch_size(trainer, batch)


def _tell_batch_size(trainer: Trainer, batch: Any) -> None:
    # What self.log(on_epoch=True) weights by. Lightning would search the batch for a tensor; a closed pair has none to
    # find, and the first column of a TensorDict is a poor guess (jagged fields, strings).
    results = trainer._results
    if results is not None and isinstance(batch, TQBatch):
        results.batch_size = batch.size
