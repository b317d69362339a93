# SPDX-License-Identifier: Apache-2.0
"""PartitionSwitch: names the partition for each new iterator, and clears finished ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tq.queue_connection import wait_for_followers
from lightning_tq.run import run_of
from lightning_tq.stream import Stream


class PartitionSwitch(Callback):
    """Moves streams from partition to partition by their templates: per epoch, per policy version, and so on.

    The name is fixed when an iterator starts. A partition is finished once its stream has moved on to another one.
    Without this callback, TQDataModule uses one that clears nothing.

    Examples:
        >>> for name in ("train@0", "train@1"):
        ...     meta = client.put({"x": torch.randn(8, 1)}, partition_id=name)
        ...     client.seal_partition(name)
        >>> dm = TQDataModule(train=Stream(partition="train@{epoch}", task="sft", fields=["x"], batch_size=4))
        >>> L.Trainer(max_epochs=2, callbacks=[PartitionSwitch()], enable_checkpointing=False).fit(Model(), dm)
        >>> client.get_partition_list()
        ['train', 'train@1']
    """

    def __init__(self, clear_finished: bool = True) -> None:
        """Args:
        clear_finished: Clear finished partitions for every task, which frees their memory. This queue can then no
            longer resume from a checkpoint of an earlier epoch. The last partitions stay.
        """
        self.clear_finished = clear_finished

    def partition(self, stream: Stream, *, epoch: int, global_step: int, policy_version: int, stage: str) -> str:
        """The partition for an iterator that starts now. Override it for other names; all ranks must agree."""
        return stream.partition_at(epoch=epoch, global_step=global_step, stage=stage, policy_version=policy_version)

    def pattern(self, stream: Stream, stage: str) -> str:
        """A pattern for all names that ``partition`` may return in this stage."""
        is_own = type(self).partition is not PartitionSwitch.partition
        return "*" if is_own else stream.pattern(stage)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for reader in run_of(trainer, "PartitionSwitch").readers.values():
            reader.after_move = partial(self._after_move, trainer)

    # At these moments, every rank has closed its old iterator. A barrier makes sure of it.

    def _after_move(self, trainer: Trainer) -> None:
        """Before the first batch, because it may need the room, or slots, of what is finished."""
        run = run_of(trainer)
        if not self.clear_finished or trainer.state.fn != TrainerFn.FITTING or not run.left_partitions():
            return
        trainer.strategy.barrier("lightning_tq_moved")  # each rank knows where it begins, so acks don't move that
        for reader in run.of_stage("train"):
            reader.ack_due()
        self._clear(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clear(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # trainer.validate finishes no partition
            self._clear(trainer)

    def _clear(self, trainer: Trainer) -> None:
        run = run_of(trainer)
        finished = run.finished_partitions()  # the same on all ranks
        if not finished or not self.clear_finished:
            return
        trainer.strategy.barrier("lightning_tq_clear_finished")
        if trainer.is_global_zero:
            wait_for_followers(run.client, finished)
            for name in finished:
                run.client.clear_partition(name)
