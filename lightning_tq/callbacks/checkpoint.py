# SPDX-License-Identifier: Apache-2.0
"""TQCheckpoint: the queue saved beside each checkpoint of the Trainer, and found there again."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_tq.callbacks.partition_switch import datamodule_of
from lightning_tq.ranks import on_first_rank, resumed_from
from transfer_queue import CheckpointNotFoundError, TransferQueueClient
from transfer_queue.errors import ConfigError, NotInitializedError, TransferQueueError

if TYPE_CHECKING:
    from lightning_tq.datamodule import TQDataModule

logger = logging.getLogger(__name__)

AnyPath = str | Path
_ENDS = ("", ".old", ".tmp")
"""Of a saved queue's name; the last two are what a killed save leaves."""


class TQCheckpoint(Callback):
    """Saves the whole queue with each checkpoint that the Trainer saves: ``last.ckpt.tq`` beside ``last.ckpt``.

    It is kept as long as the checkpoint is: whoever removes that through the Trainer (ModelCheckpoint does) removes
    both. ``trainer.fit(ckpt_path=...)`` restores it where the TQDataModule finds an empty queue: one that it started
    anew. A queue that is still alive is used as it is.

    During training a queue that can't be saved is an error. Once that has ended or failed, whatever is left must be
    saved: the checkpoint is then written without its queue, and the log says so.
    """

    def __init__(self) -> None:
        self._hooks: _Hooks | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = datamodule_of(trainer, "TQCheckpoint")
        if stage != "fit":
            return
        if self._hooks is not None:
            self._hooks.let_go()
        # They stay when the fit is over: users save a last checkpoint then, or one of what an exception left.
        self._hooks = _Hooks(trainer, datamodule)
        checkpoint = resumed_from(trainer)
        if trainer.is_global_zero and checkpoint is not None:
            _sweep(Path(checkpoint).absolute().parent)


class _Hooks:
    """Stands between the Trainer and its strategy, where every checkpoint passes: no callback is told of its path."""

    def __init__(self, trainer: Trainer, datamodule: TQDataModule) -> None:
        self._trainer = trainer
        self._datamodule = datamodule
        self._address = datamodule.address
        self._strategy = trainer.strategy
        self._save = self._strategy.save_checkpoint
        self._remove = self._strategy.remove_checkpoint
        self._strategy.save_checkpoint = self.save_checkpoint  # type: ignore[method-assign]
        self._strategy.remove_checkpoint = self.remove_checkpoint  # type: ignore[method-assign]

    def let_go(self) -> None:
        for name in ("save_checkpoint", "remove_checkpoint"):
            self._strategy.__dict__.pop(name, None)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """The queue first: until the checkpoint is there, too, the one before it can be resumed with either queue."""
        failure: TransferQueueError | None = None
        if "optimizer_states" in checkpoint:  # else only weights, from which nothing is resumed
            try:
                self._save_queue(checkpoint, filepath)
            except TransferQueueError as error:
                if self._trainer.state.status == TrainerStatus.RUNNING:
                    raise
                failure = error
        self._save(checkpoint, filepath, storage_options=storage_options)
        if failure is not None and self._trainer.is_global_zero:
            _remove_stale(filepath)
            logger.error(
                f"{filepath} is saved without its queue: {failure} A run that goes on from it needs that queue alive, "
                f"or trains what is put anew."
            )

    def _save_queue(self, checkpoint: dict[str, Any], filepath: AnyPath) -> None:
        trainer = self._trainer
        metadata = {"global_step": checkpoint["global_step"], "epoch": checkpoint["epoch"]}

        def save() -> str:
            self._client().save_checkpoint(beside(filepath), metadata=metadata)
            return ""

        if trainer.state.status == TrainerStatus.INTERRUPTED:  # perhaps on this rank only: nothing is done together
            if trainer.is_global_zero:
                save()
            return
        trainer.strategy.barrier("lightning_tq_checkpoint")  # what any rank still had to tell the queue, it has told
        on_first_rank(trainer, save)

    def _client(self) -> TransferQueueClient:
        """Of the queue that the fit reads. Raises NotInitializedError when this process isn't in it any more."""
        try:
            address = self._datamodule.address
        except NotInitializedError:
            address = None
        if address != self._address:
            raise NotInitializedError(
                f"this process has left the queue at {self._address} that the fit has read; one that the TQDataModule "
                f"started ends with close() and with an exception."
            )
        return self._datamodule.client

    def remove_checkpoint(self, filepath: AnyPath) -> None:
        self._remove(filepath)
        if self._trainer.is_global_zero:
            for queue in _queues(filepath):
                shutil.rmtree(queue, ignore_errors=True)


def _queues(checkpoint: AnyPath) -> list[Path]:
    return [Path(f"{os.fspath(checkpoint)}.tq{suffix}") for suffix in _ENDS]


def _remove_stale(checkpoint: AnyPath) -> None:
    """Queues of an earlier checkpoint of that name, which would be taken for this one's."""
    for queue in _queues(checkpoint):
        if (queue / "metadata.json").is_file():  # else it is none of ours
            shutil.rmtree(queue, ignore_errors=True)


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
