# SPDX-License-Identifier: Apache-2.0
"""TQCheckpoint: the queue saved beside each checkpoint of the Trainer, and found there again."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_tq.callbacks.partition_switch import datamodule_of
from lightning_tq.ranks import on_first_rank, resumed_from
from transfer_queue import CheckpointNotFoundError, TransferQueueClient
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

logger = logging.getLogger(__name__)

AnyPath = str | Path
_ENDS = ("", ".old", ".tmp")
"""Of a saved queue's name; the last two are what a killed save leaves."""


class TQCheckpoint(Callback):
    """Saves the whole queue with each checkpoint that the Trainer saves: ``last.ckpt.tq`` beside ``last.ckpt``.

    It is kept as long as the checkpoint is: whoever removes that through the Trainer (ModelCheckpoint does) removes
    both. ``trainer.fit(ckpt_path=...)`` restores it where the TQDataModule finds an empty queue: one that it started
    anew. A queue that is still alive is used as it is.
    """

    def __init__(self) -> None:
        self._hooks: tuple[Strategy, _Hooks] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule_of(trainer, "TQCheckpoint")
        self._let_go()
        if stage != "fit":
            return
        self._hooks = (trainer.strategy, _Hooks(trainer))
        checkpoint = resumed_from(trainer)
        if trainer.is_global_zero and checkpoint is not None:
            _sweep(Path(checkpoint).absolute().parent)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        # Not when an exception ends the run: others save a checkpoint then, too.
        if self._hooks is not None:
            for name in ("save_checkpoint", "remove_checkpoint"):
                self._hooks[0].__dict__.pop(name, None)
        self._hooks = None


class _Hooks:
    """Stands between the Trainer and its strategy, where every checkpoint passes: no callback is told of its path."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._save = trainer.strategy.save_checkpoint
        self._remove = trainer.strategy.remove_checkpoint
        trainer.strategy.save_checkpoint = self.save_checkpoint  # type: ignore[method-assign]
        trainer.strategy.remove_checkpoint = self.remove_checkpoint  # type: ignore[method-assign]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """The queue first: until the checkpoint is there, too, the one before it can be resumed with either queue."""
        if "optimizer_states" in checkpoint:  # else only weights, from which nothing is resumed
            self._save_queue(checkpoint, filepath)
        self._save(checkpoint, filepath, storage_options=storage_options)

    def _save_queue(self, checkpoint: dict[str, Any], filepath: AnyPath) -> None:
        trainer = self._trainer
        trainer.strategy.barrier("lightning_tq_checkpoint")  # what any rank still had to tell the queue, it has told
        client = datamodule_of(trainer, "TQCheckpoint").client
        metadata = {"global_step": checkpoint["global_step"], "epoch": checkpoint["epoch"]}

        def save() -> str:
            client.save_checkpoint(beside(filepath), metadata=metadata)
            return ""

        on_first_rank(trainer, save)

    def remove_checkpoint(self, filepath: AnyPath) -> None:
        self._remove(filepath)
        if self._trainer.is_global_zero:
            for suffix in _ENDS:
                shutil.rmtree(f"{beside(filepath)}{suffix}", ignore_errors=True)


def beside(checkpoint: AnyPath) -> Path:
    """Where the queue of a Trainer's checkpoint is. Raises ConfigError for one that isn't on a file system here."""
    path = os.fspath(checkpoint)
    if "://" in path:
        raise ConfigError(
            f"TQCheckpoint saves the queue beside the checkpoint, but {path} is no path of this host's file system. "
            f"Save checkpoints to a directory, or leave TQCheckpoint out."
        )
    return Path(f"{path}.tq")


def _sweep(folder: Path) -> None:
    """Remove what a killed run left: queues without a checkpoint, whole or not."""
    for queue in folder.glob("*.ckpt.tq*"):
        checkpoint, _, rest = queue.name.rpartition(".tq")
        if rest in _ENDS and not (folder / checkpoint).exists():
            shutil.rmtree(queue, ignore_errors=True)


def restore_beside(client: TransferQueueClient, checkpoint: AnyPath) -> None:
    """Fill an empty queue with what was saved beside a checkpoint; one that holds partitions stays as it is."""
    path = os.fspath(checkpoint)
    if client.get_partition_list() or "://" in path:
        return
    for place in dict.fromkeys((path, os.path.realpath(path))):  # last.ckpt may be a link to another one
        try:
            client.load_checkpoint(beside(place))
        except CheckpointNotFoundError:
            continue
        logger.info(f"the queue was restored from {beside(place)}.")
        return
    logger.warning(
        f"training goes on from {path}, but the queue is empty and none was saved beside it: what it held is lost, and "
        f"training reads what is put from now on. The callback TQCheckpoint saves the queue with each checkpoint."
    )
