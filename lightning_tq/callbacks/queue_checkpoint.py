# SPDX-License-Identifier: Apache-2.0
"""TQCheckpoint: saves the queue next to each checkpoint of the Trainer, and restores it from there."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_tq.topology import run_on_rank_zero
from lightning_tq.trainer_compat import find_datamodule, resume_path
from transfer_queue import CheckpointNotFoundError, TransferQueueClient
from transfer_queue.errors import ConfigError, NotInitializedError, TransferQueueError

if TYPE_CHECKING:
    from lightning_tq.datamodule import TQDataModule

logger = logging.getLogger(__name__)

AnyPath = str | Path
_SUFFIXES = ("", ".old", ".tmp")
"""Suffixes of a saved queue's name. A killed save leaves the last two."""


class TQCheckpoint(Callback):
    """Saves the whole queue with each checkpoint that the Trainer saves: ``last.ckpt.tq`` next to ``last.ckpt``.

    Removing a checkpoint through the Trainer, as ModelCheckpoint does, also removes its queue.
    ``trainer.fit(ckpt_path=...)`` restores the queue if the TQDataModule has started a new, empty one. A queue that is
    still alive is used unchanged.

    During training, a queue that can't be saved is an error. After training has ended or failed, the checkpoint is
    then written without its queue, and the log says so.
    """

    def __init__(self) -> None:
        self._hooks: _StrategyHooks | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = find_datamodule(trainer, "TQCheckpoint")
        if stage != "fit":
            return
        if self._hooks is not None:
            self._hooks.uninstall()
        # They stay after the fit, because users may save another checkpoint then, also after an exception.
        self._hooks = _StrategyHooks(trainer, datamodule)
        checkpoint = resume_path(trainer)
        if trainer.is_global_zero and checkpoint is not None:
            _remove_orphans(Path(checkpoint).absolute().parent)


class _StrategyHooks:
    """Wraps the strategy's methods that save and remove checkpoints. Callbacks never learn a checkpoint's path."""

    def __init__(self, trainer: Trainer, datamodule: TQDataModule) -> None:
        self._trainer = trainer
        self._datamodule = datamodule
        self._address = datamodule.address
        self._strategy = trainer.strategy
        self._save = self._strategy.save_checkpoint
        self._remove = self._strategy.remove_checkpoint
        self._strategy.save_checkpoint = self.save_checkpoint  # type: ignore[method-assign]
        self._strategy.remove_checkpoint = self.remove_checkpoint  # type: ignore[method-assign]

    def uninstall(self) -> None:
        for name in ("save_checkpoint", "remove_checkpoint"):
            self._strategy.__dict__.pop(name, None)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save the queue first. Until the checkpoint exists too, the previous one can resume with either queue."""
        failure: TransferQueueError | None = None
        if "optimizer_states" in checkpoint:  # otherwise it holds only weights, and no run resumes from it
            try:
                self._save_queue(checkpoint, filepath)
            except TransferQueueError as error:
                if self._trainer.state.status == TrainerStatus.RUNNING:
                    raise
                failure = error
        self._save(checkpoint, filepath, storage_options=storage_options)
        if failure is not None and self._trainer.is_global_zero:
            _remove_stale_queues(filepath)
            logger.error(
                f"{filepath} is saved without its queue: {failure} A run that resumes from it needs that queue alive. "
                f"Otherwise it trains newly put samples."
            )

    def _save_queue(self, checkpoint: dict[str, Any], filepath: AnyPath) -> None:
        trainer = self._trainer
        metadata = {"global_step": checkpoint["global_step"], "epoch": checkpoint["epoch"]}

        def save() -> str:
            self._client().save_checkpoint(queue_path(filepath), metadata=metadata)
            return ""

        if trainer.state.status == TrainerStatus.INTERRUPTED:  # maybe on this rank only, so no collectives
            if trainer.is_global_zero:
                save()
            return
        trainer.strategy.barrier("lightning_tq_checkpoint")  # every rank has finished its requests to the queue
        run_on_rank_zero(trainer, save)

    def _client(self) -> TransferQueueClient:
        """Client of the queue that the fit reads. Raises NotInitializedError if this process has left that queue."""
        try:
            address = self._datamodule.address
        except NotInitializedError:
            address = None
        if address != self._address:
            raise NotInitializedError(
                f"this process has left the queue at {self._address} that the fit read. A queue that the TQDataModule "
                f"started ends with close() and with an exception."
            )
        return self._datamodule.client

    def remove_checkpoint(self, filepath: AnyPath) -> None:
        self._remove(filepath)
        if self._trainer.is_global_zero:
            for queue in _queue_paths(filepath):
                shutil.rmtree(queue, ignore_errors=True)


def _queue_paths(checkpoint: AnyPath) -> list[Path]:
    return [Path(f"{os.fspath(checkpoint)}.tq{suffix}") for suffix in _SUFFIXES]


def _remove_stale_queues(checkpoint: AnyPath) -> None:
    """Remove the queues of an earlier checkpoint with the same name, which would not fit this one."""
    for queue in _queue_paths(checkpoint):
        if (queue / "metadata.json").is_file():  # otherwise it is not a saved queue
            shutil.rmtree(queue, ignore_errors=True)


def queue_path(checkpoint: AnyPath) -> Path:
    """Where a checkpoint's queue is saved. Raises ConfigError if that is not on this host's file system."""
    path = os.fspath(checkpoint)
    if "://" in path:
        raise ConfigError(
            f"TQCheckpoint saves the queue next to the checkpoint, but {path} is not on this host's file system. "
            f"Save checkpoints to a directory, or remove TQCheckpoint."
        )
    return Path(f"{path}.tq")


def _remove_orphans(folder: Path) -> None:
    """Remove queues without a checkpoint, complete or not, which a killed run left."""
    for queue in folder.glob("*.ckpt.tq*"):
        checkpoint, _, suffix = queue.name.rpartition(".tq")
        if suffix in _SUFFIXES and not (folder / checkpoint).exists():
            shutil.rmtree(queue, ignore_errors=True)


def restore_queue(client: TransferQueueClient, checkpoint: AnyPath) -> None:
    """Fill an empty queue with the one saved next to a checkpoint. A queue with partitions stays unchanged."""
    path = os.fspath(checkpoint)
    if client.get_partition_list() or "://" in path:
        return
    for candidate in dict.fromkeys((path, os.path.realpath(path))):  # last.ckpt may be a link to another one
        try:
            client.load_checkpoint(queue_path(candidate))
        except CheckpointNotFoundError:
            continue
        logger.info(f"the queue was restored from {queue_path(candidate)}.")
        return
    logger.warning(
        f"training resumes from {path}, but the queue is empty and none was saved next to it. Its samples are lost, "
        f"and training reads newly put ones. The callback TQCheckpoint saves the queue with each checkpoint."
    )
