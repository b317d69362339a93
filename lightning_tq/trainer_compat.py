# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the internals of Lightning's Trainer, in one place."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint

from transfer_queue.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from lightning_tq.datamodule import TQDataModule

_HARMLESS_WARNINGS = (
    # Batches are requested ahead, whatever num_workers is.
    r"The '.*_dataloader' does not have many workers",
    # Workers share one stream, so the length is right for any number of them.
    r"Your `IterableDataset` has `__len__` defined",
    # A data module reports "no loader of this kind" as an empty list.
    r"Total length of `list` across ranks is zero",
    # overfit_batches replays the same batches in the same order.
    r"You requested to overfit but enabled \w+ dataloader shuffling",
)
_ALTERNATIVES = {
    BatchSizeFinder: "Set Stream(micro_batch_size=...), the rows that a step gets, whatever the queue draws at once.",
    LearningRateFinder: "Try learning rates on your own samples, with a DataLoader instead of a TQDataModule.",
}


def find_datamodule(trainer: Trainer, callback: str) -> TQDataModule:
    """The run's TQDataModule, for the callback of that name. Raises ConfigError when there is none."""
    from lightning_tq.datamodule import TQDataModule

    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, TQDataModule):
        raise ConfigError(
            f"{callback} needs a TQDataModule: trainer.fit(model, datamodule=TQDataModule(...)), got {datamodule!r}."
        )
    return datamodule


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list, so that changes to it take effect."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def resume_path(trainer: Trainer) -> str | Path | None:
    """The checkpoint that the run being set up resumes from."""
    # Trainer.ckpt_path is set when the checkpoint is loaded, which is after setup.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            path: str | Path | None = frame.f_locals.get("ckpt_path")
            return path
        frame = frame.f_back
    return trainer.ckpt_path


def restores_after_setup(trainer: Trainer) -> bool:
    """True where a checkpoint is loaded only after ``on_fit_start``, as with FSDP."""
    return trainer.ckpt_path is not None and trainer.strategy.restore_checkpoint_after_setup


def keeps_checkpoints(trainer: Trainer) -> bool:
    """True where the run resumed from a checkpoint, or a callback saves some that it could resume from."""
    if resume_path(trainer) is not None:
        return True
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            continue  # saves only when a run fails
        if not isinstance(callback, ModelCheckpoint) or callback.save_top_k != 0 or callback.save_last:
            return True
    return False


def ignore_harmless_warnings() -> None:
    """Silence warnings of Lightning that don't apply to streams of a queue."""
    for message in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def refuse_finders(trainer: Trainer) -> None:
    """Raise InvalidRequestError for callbacks (a Tuner's too) that would use up samples, which exist only once."""
    for callback in callbacks_of(trainer):
        for kind, alternative in _ALTERNATIVES.items():
            if isinstance(callback, kind):
                raise InvalidRequestError(
                    f"{kind.__name__} runs training steps to try settings, which would use up samples of the queue. "
                    f"{alternative}"
                )


def correct_progress(checkpoint: dict[str, Any], unstepped: int, known_length: bool) -> None:
    """Correct the Trainer's counts in a checkpoint to what a run that resumes from it still has to do.

    Args:
        unstepped: Batches of an accumulation without an optimizer step. The checkpoint lacks their gradients.
        known_length: Whether the Trainer knew the number of batches. Otherwise it would resume in an ended epoch.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    total, current = progress["total"], progress["current"]
    if epochs["current"]["ready"] == epochs["current"]["processed"] == epochs["current"]["completed"] + 1:
        # Saved at the end of an epoch. With max_steps, Lightning would end that epoch twice and skip the next one.
        for counts in epochs.values():
            counts["completed"] = counts["processed"]
        progress |= {"current": dict.fromkeys(current, 0), "is_last_batch": False}
        return
    # Saved at the end of a batch: the batch counts as processed, and as completed once the checkpoint is loaded.
    at_batch_end = total["completed"] == total["processed"] - 1
    if progress["is_last_batch"] and at_batch_end and not known_length:
        unstepped = 0  # the last batch of an epoch always steps
        progress["current"] = {"ready": 0, "completed": -1, "started": 0, "processed": 0}
    for counts in (total, current) if unstepped else ():
        for name in counts:
            counts[name] -= unstepped
