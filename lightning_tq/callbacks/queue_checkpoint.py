# SPDX-License-Identifier: Apache-2.0
"""TQCheckpoint: saves the queue next to each checkpoint of the Trainer, and restores it from there."""

from __future__ import annotations

import copy
import fnmatch
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_tq.callbacks.background_worker import BackgroundWorker
from lightning_tq.checks import counted, list_names
from lightning_tq.run import run_of
from lightning_tq.topology import run_on_rank_zero
from lightning_tq.trainer_compat import callbacks_of
from transfer_queue import (
    CheckpointError,
    CheckpointNotFoundError,
    TransferQueueClient,
    describe_checkpoint,
    remove_checkpoint,
    spooled_checkpoint,
    upload_checkpoint,
)
from transfer_queue.errors import ConfigError, NotInitializedError, TransferQueueError

logger = logging.getLogger(__name__)

AnyPath = str | Path
_PARTS = ("metadata.json", "controller_state.msgpack", "simple_storage", "save-")
"""How names in a saved queue begin."""
_END_S = 1.0
"""Seconds that the background thread gets to notice that it should end; all its work is done by then."""


class TQCheckpoint(Callback):
    """Saves the whole queue with each checkpoint that the Trainer saves: ``last.ckpt.tq`` next to ``last.ckpt``.

    Removing a checkpoint through the Trainer, as ModelCheckpoint does, also removes its queue. One of this
    process whose queue has all values is not removed while later ones lack some, because a storage unit has ended.
    ``last.ckpt`` is replaced all the same.
    ``trainer.fit(ckpt_path=...)`` restores the queue if the TQDataModule has started a new, empty one. A queue that is
    still alive is used unchanged.

    Where checkpoints go to a URL (``s3://...``), so do their queues, through fsspec. A file that can't be copied is
    tried again, four times in all.

    During training, a queue that can't be saved is an error. After training has ended or failed, the checkpoint is
    then written without its queue, and the log says so.

    Raises:
        ConfigError: ``asynchronous`` with a strategy that writes a checkpoint on several ranks.
        CheckpointError: during a fit, the queue can't be saved.
    Examples:
        >>> trainer = L.Trainer(max_epochs=1, callbacks=[TQCheckpoint()], default_root_dir="runs")
        >>> trainer.fit(Model(), dm)
        >>> trainer.save_checkpoint("runs/last.ckpt")
        >>> tq.describe_checkpoint("runs/last.ckpt.tq")["metadata"]
        {'global_step': 4, 'epoch': 1}
    """

    def __init__(self, asynchronous: bool = False) -> None:
        """Args:
        asynchronous: While a fit runs, copy the queue to its URL and write the Trainer's checkpoint in the background,
            in this order. Training waits only while the queue is written to a local directory, and for the checkpoint
            before. Batches are acknowledged one checkpoint later, when theirs is surely written. Not with strategies
            that write a checkpoint on several ranks, such as FSDP.
        """
        self.asynchronous = asynchronous
        self._strategy: Strategy | None = None
        """That whose methods are wrapped."""
        self._whole: set[str] = set()
        """Checkpoints of this process whose queues have all values."""
        self._lacks_values = False
        """Whether the last saved queue does."""
        self._writer: BackgroundWorker[Callable[[], None]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run = run_of(trainer, "TQCheckpoint")
        if stage != "fit":
            return
        self._trainer, self._connection, self._address = trainer, run.connection, run.connection.address
        self._wrap(trainer.strategy)

    def _wrap(self, strategy: Strategy) -> None:
        """Wrap its methods that save and remove checkpoints. Callbacks never learn a checkpoint's path.

        They stay so after the fit, because users may save another checkpoint then, also after an exception.
        """
        if self._strategy is not None:
            for name in ("save_checkpoint", "remove_checkpoint"):
                self._strategy.__dict__.pop(name, None)
        if self.asynchronous:
            if type(strategy).save_checkpoint is not Strategy.save_checkpoint:
                raise ConfigError(
                    f"TQCheckpoint(asynchronous=True) needs a strategy that writes a checkpoint on one rank, and "
                    f"{type(strategy).__name__} does so on several. Use asynchronous=False."
                )
            if any(getattr(each, "save_last", None) == "link" for each in callbacks_of(self._trainer)):
                raise ConfigError(
                    "ModelCheckpoint(save_last='link') links to a checkpoint before TQCheckpoint(asynchronous=True) "
                    "has written it. Use save_last=True, or asynchronous=False."
                )
            self._writer = BackgroundWorker("lightning_tq_checkpoint", lambda write: write())
        self._strategy, self._save, self._remove = strategy, strategy.save_checkpoint, strategy.remove_checkpoint
        strategy.save_checkpoint = self._save_checkpoint  # type: ignore[method-assign]
        strategy.remove_checkpoint = self._remove_checkpoint  # type: ignore[method-assign]

    # ---- the background ----

    def finish_writing(self) -> None:
        """Wait until the checkpoints that were saved are written. Raises what kept one from being written."""
        if self._writer is not None:
            self._writer.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish_and_log()

    def _finish(self) -> None:
        """As ``finish_writing``; what is saved after the fit is saved at once."""
        if self._writer is not None:
            try:
                self._writer.flush()
            finally:
                self._writer.stop(_END_S)
                self._writer = None

    def _finish_and_log(self) -> None:
        try:
            self._finish()
        except Exception as error:  # the Trainer reports another error
            logger.error(f"a checkpoint was not written: {error}")

    def _write(
        self, held: dict[str, Any], filepath: AnyPath, storage_options: Any, directory: Path, spool: ExitStack
    ) -> None:
        with spool:
            if _is_url(target := queue_path(filepath)):
                upload_checkpoint(directory, target)
        self._save(held, filepath, storage_options=storage_options)

    # ---- the strategy's methods ----

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save the queue first. Until the checkpoint exists too, the previous one can resume with either queue.

        Not with ack="step": the newer queue may have acknowledged what the previous checkpoint trains next.
        """
        failure: TransferQueueError | None = None
        if "optimizer_states" in checkpoint:  # otherwise it holds only weights, and no run resumes from it
            try:
                self._save_queue(checkpoint, filepath, storage_options)
            except TransferQueueError as error:
                if self._trainer.state.status == TrainerStatus.RUNNING:
                    raise
                failure = error
            else:
                if self._writer is not None:  # which writes the checkpoint, too
                    return
        self._save(checkpoint, filepath, storage_options=storage_options)
        if failure is not None and self._trainer.is_global_zero:
            _remove_queue(filepath)
            logger.error(
                f"{filepath} is saved without its queue: {failure} A run that resumes from it needs that queue alive. "
                f"Otherwise it trains newly put samples."
            )

    def _save_queue(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any) -> None:
        trainer, target = self._trainer, queue_path(filepath)
        metadata = {"global_step": checkpoint["global_step"], "epoch": checkpoint["epoch"]}

        def save() -> None:
            if self._writer is None:
                self._client().save_checkpoint(target, metadata=metadata)
                self._look_for_losses(os.fspath(filepath))
                return
            self._writer.flush()  # so that an ack knows: once a checkpoint is saved, the one before is written
            with ExitStack() as spool:
                directory = spool.enter_context(spooled_checkpoint(target)) if _is_url(target) else Path(target)
                self._client().save_checkpoint(directory, metadata=metadata)
                self._look_for_losses(os.fspath(filepath))
                held = copy.deepcopy(checkpoint)  # training goes on to change what it refers to
                write = partial(self._write, held, filepath, storage_options, directory, spool.pop_all())
            self._writer.submit(write, replace=False)

        if trainer.state.status == TrainerStatus.INTERRUPTED:  # maybe on this rank only, so no collectives
            self._finish_and_log()
            if trainer.is_global_zero:
                save()
            return
        trainer.strategy.barrier("lightning_tq_checkpoint")  # every rank has finished its requests to the queue
        run_on_rank_zero(trainer, save)

    def _look_for_losses(self, filepath: str) -> None:
        """Warn if the queue that was just saved lacks values, which were lost with a storage unit. Raises nothing."""
        try:
            partitions = self._client().get_stats()["partitions"]
        except TransferQueueError as error:
            logger.warning(f"{queue_path(filepath)} is saved; whether it has all values is unknown: {error}")
            return
        lost = [
            f"{counted(count, 'sample')} of {name!r} lost {field!r}"
            for name, each in partitions.items() for field, count in each["lost"].items()
        ]  # fmt: skip
        self._lacks_values = bool(lost)
        if not lost:
            self._whole.add(filepath)
            return
        self._whole.discard(filepath)
        more = f", and {len(lost) - 1:,} more such losses" * (len(lost) > 1)
        logger.warning(
            f"{queue_path(filepath)} is saved without the values that ended with a storage unit: {lost[0]}{more}. Put "
            f"them again (client.get_lost_samples names them), or clear those samples."
        )

    def _client(self) -> TransferQueueClient:
        """Client of the queue that the fit reads. Raises NotInitializedError if this process has left that queue."""
        try:
            address = self._connection.address
        except NotInitializedError:
            address = None
        if address != self._address:
            raise NotInitializedError(
                f"this process has left the queue at {self._address} that the fit read. A queue that the TQDataModule "
                f"started ends with close() and with an exception."
            )
        return self._connection.client

    def _remove_checkpoint(self, filepath: AnyPath) -> None:
        if self._lacks_values and os.fspath(filepath) in self._whole:
            logger.warning(f"{filepath} stays: its queue has all values, unlike the last one. Remove it yourself.")
            return
        self._whole.discard(os.fspath(filepath))

        def remove() -> None:
            self._remove(filepath)
            if self._trainer.is_global_zero:
                _remove_queue(filepath)

        if self._writer is None:
            remove()
        elif self._trainer.is_global_zero:
            self._writer.submit(remove, replace=False)  # after the checkpoint that takes its place is written


def writes_in_background(trainer: Trainer) -> bool:
    """True where a checkpoint may be incomplete until one of a later step is saved."""
    return any(isinstance(each, TQCheckpoint) and each.asynchronous for each in callbacks_of(trainer))


def finish_writing(trainer: Trainer) -> None:
    """Wait until the checkpoints that were saved are written. Raises what kept one from being written."""
    for each in callbacks_of(trainer):
        if isinstance(each, TQCheckpoint):
            each.finish_writing()


def _is_url(path: AnyPath) -> bool:
    return "://" in os.fspath(path)


def queue_path(checkpoint: AnyPath) -> str:
    """Where a checkpoint's queue is saved: a directory or a URL."""
    return f"{os.fspath(checkpoint)}.tq"


def _remove_queue(checkpoint: AnyPath) -> None:
    """Remove the queue of a checkpoint that is removed, or that an earlier checkpoint of this name had."""
    try:
        remove_checkpoint(queue_path(checkpoint))
    except CheckpointError as error:
        logger.warning(f"{error} Nothing needs it any more.")


def _names(directory: str) -> set[str]:
    """What is in a directory or at a URL; nothing where there is none."""
    import fsspec

    files, path = fsspec.core.url_to_fs(directory)
    listed = files.ls(path, detail=False) if files.exists(path) else []
    return {os.path.basename(name.rstrip("/")) for name in listed}


def restore_queue(client: TransferQueueClient, checkpoint: AnyPath, pattern: str, task: str) -> None:
    """Fill an empty queue with the one saved next to a checkpoint. A queue with partitions stays unchanged.

    Args:
        pattern: Of the partitions that training reads.
        task: Its task.
    Raises:
        CheckpointError: what was saved is damaged, or the queue holds only other partitions than training needs.
    """
    path = os.fspath(checkpoint)
    linked = path if _is_url(path) else os.path.realpath(path)  # last.ckpt may be a link to another one
    places = [queue_path(each) for each in dict.fromkeys((path, linked))]
    if held := client.get_partition_list():
        if not fnmatch.filter(held, pattern):
            for saved in places:
                _check_held(held, saved, pattern, task)
        return
    for saved in places:
        try:
            client.load_checkpoint(saved)
        except CheckpointNotFoundError as error:
            if any(name.startswith(_PARTS) for name in _names(saved)):
                raise CheckpointError(
                    f"{error} So its queue can't be restored. Copy all of {saved} again, or remove it to train newly "
                    f"put samples."
                ) from error
            continue
        logger.info(f"the queue was restored from {saved}.")
        return
    logger.warning(
        f"training resumes from {path}, but the queue is empty and none was saved next to it. Its samples are lost, "
        f"and training reads newly put ones. The callback TQCheckpoint saves the queue with each checkpoint."
    )


def _check_held(held: list[str], saved: str, pattern: str, task: str) -> None:
    """Raise CheckpointError where training would wait for samples of a saved queue that was not restored."""
    try:
        partitions = describe_checkpoint(saved)["partitions"]
    except CheckpointError:  # a queue that lives needs no saved one
        return
    for name in fnmatch.filter(partitions, pattern):
        left = partitions[name]["samples"] - partitions[name]["tasks"].get(task, {}).get("consumed", 0)
        if left:
            raise CheckpointError(
                f"{saved} has {left} samples of partition {name!r} to train, but was not restored: this queue is not "
                f"empty. It holds {list_names(held)}, and nothing that training reads. On a resume, put nothing "
                f"before the fit: the saved queue has what was put then. To train newly put samples instead, move "
                f"{saved} away."
            )
