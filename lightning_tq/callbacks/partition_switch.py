# SPDX-License-Identifier: Apache-2.0
"""PartitionSwitch: names the partition that each new iterator reads, and clears those that are finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tq.stream import Stream
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from lightning_tq.datamodule import TQDataModule


class PartitionSwitch(Callback):
    """Steps streams from partition to partition, as their templates say: per epoch, per version of the policy, ...

    A name is decided when an iterator starts; a running iterator is never switched. A partition is finished once its
    stream has moved on to another. Without this callback TQDataModule adds one that clears nothing.
    """

    def __init__(self, clear_finished: bool = True) -> None:
        """Args:
        clear_finished: Forget finished partitions, for every task: their memory is free again. A checkpoint from
            an earlier epoch can then no longer be resumed with this queue. The last partitions stay.
        """
        self.clear_finished = clear_finished

    def partition(self, stream: Stream, *, epoch: int, global_step: int, policy_version: int, stage: str) -> str:
        """The partition for an iterator that starts now. Override for names of your own; must agree on all ranks."""
        return stream.partition_at(epoch=epoch, global_step=global_step, stage=stage, policy_version=policy_version)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule_of(trainer, "PartitionSwitch")

    # Both hooks come when every rank's new iterator exists (a barrier makes sure) and its old one is closed.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clear(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # trainer.validate moves away from nothing
            self._clear(trainer)

    def _clear(self, trainer: Trainer) -> None:
        datamodule = datamodule_of(trainer, "PartitionSwitch")
        finished = datamodule.finished_partitions()  # the same on all ranks, which step together
        if not finished or not self.clear_finished:
            return
        trainer.strategy.barrier("lightning_tq_clear_finished")
        if trainer.is_global_zero:
            for name in finished:
                datamodule.client.clear_partition(name)


def datamodule_of(trainer: Trainer, who: str) -> TQDataModule:
    """The run's TQDataModule. Raises ConfigError when there is none."""
    from lightning_tq.datamodule import TQDataModule

    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, TQDataModule):
        raise ConfigError(
            f"{who} needs a TQDataModule: trainer.fit(model, datamodule=TQDataModule(...)), got {datamodule!r}."
        )
    return datamodule
