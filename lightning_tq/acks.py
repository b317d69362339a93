# SPDX-License-Identifier: Apache-2.0
"""AckTracker: when a trained batch is acknowledged, so that the queue may delete it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightning_tq.stream_reader import StreamReader
from lightning_tq.topology import Topology
from transfer_queue import BatchMeta, TransferQueueClient

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

logger = logging.getLogger(__name__)

Ack = Literal["auto", "checkpoint", "step", "never"]
_WARN_AFTER_BATCHES = 1000

NewestBatches = dict[str, BatchMeta]
"""{partition: metadata of its newest batch}. An ack of a batch also covers those before it."""


class AckTracker:
    """Follows the batches of one training stream: trained, in an optimizer step, in a checkpoint, acknowledged.

    A batch is acknowledged when no resumed run can need it. Lightning writes a checkpoint after its save hook, so the
    ack waits for the hook after that one.
    """

    def __init__(
        self, reader: StreamReader, client: TransferQueueClient, topology: Topology, ack: Ack, keeps_checkpoints: bool
    ) -> None:
        """Args:
        ack: As for TQDataModule.
        keeps_checkpoints: Whether the run keeps checkpoints. Then "auto" waits for one, as "checkpoint" does.
        """
        self.checkpoints_written = 0
        self._ack = ack
        self._waits_for_checkpoint = ack == "checkpoint" or (ack != "step" and keeps_checkpoints)
        self._never = ack == "never" or reader.replay
        self._reader = reader
        self._client = client
        self._topology = topology
        self._trained: NewestBatches = {}
        self._stepped: NewestBatches = {}
        self._due: NewestBatches = {}
        self._checkpoints_saved = 0
        self._batches_since_checkpoint = 0
        self._just_acked: list[str] = []
        reader.on_batch_trained = self._batch_trained

    @property
    def unstepped(self) -> int:
        """Micro-batches that were trained since the last optimizer step."""
        return self._reader.unstepped

    def _batch_trained(self, meta: BatchMeta) -> None:
        self._trained[meta.partition_ids[0]] = meta

    def micro_batch_trained(self, batch: Any, stepped: bool) -> None:
        """Note a trained micro-batch. ``stepped``: an optimizer step followed it."""
        self._reader.mark_trained(batch, stepped)
        self._batches_since_checkpoint += 1
        if stepped:
            self._optimizer_stepped()

    def epoch_ended(self) -> None:
        """Gradients without an optimizer step are lost now, so their batches need no step any more."""
        self._reader.mark_stepped()
        self._optimizer_stepped()

    def _optimizer_stepped(self) -> None:
        self._stepped.update(self._trained)
        self._trained.clear()
        if not self._waits_for_checkpoint:
            self._make_due()

    def _make_due(self) -> None:
        self._due.update(self._stepped)
        self._stepped.clear()

    def wait_for_checkpoints(self) -> None:
        """From now on a batch waits for a checkpoint, except with ``ack="step"``."""
        self._waits_for_checkpoint = self._ack != "step"

    def checkpoint_saved(self) -> None:
        """A checkpoint with every optimizer step so far is being written."""
        if self._ack == "auto":  # also for a checkpoint that the user saves by hand
            self._waits_for_checkpoint = True
        self._make_due()
        self._checkpoints_saved += 1
        self._batches_since_checkpoint = 0

    def ack_due(self) -> None:
        """Acknowledge what is due. One rank of each data-parallel group does so; the first group's rank clears."""
        self.checkpoints_written = self._checkpoints_saved
        self._warn_without_checkpoint()
        due, self._due = self._due, {}
        if self._never or not due:
            return
        if self._topology.is_reader:
            for partition, meta in due.items():
                acked = self._client.ack(meta, self._reader.stream.task, earlier=True)
                if partition == self._reader.partition:
                    self._reader.batches_done = max(0, self._reader.batches_done - acked)
        # Another rank may ack a partition's last batches after this, so each partition is cleared twice.
        self._clear(dict.fromkeys([*self._just_acked, *due]))
        self._just_acked = list(due)

    def finish(self, owner: Trainer | Fabric) -> None:
        """Training is over: acknowledge what is due on all ranks. This is a collective."""
        self.ack_due()
        if self._reader.stream.clear_consumed and not self._never:
            owner.strategy.barrier("lightning_tq_acked")
            self._clear(dict.fromkeys(self._just_acked))

    def _clear(self, partitions: Mapping[str, None]) -> None:
        tasks = self._reader.stream.clearing_tasks
        if not tasks or not (self._topology.is_reader and self._topology.dp_rank == 0):
            return
        for partition in partitions:
            self._client.clear_consumed(partition, tasks)

    def _warn_without_checkpoint(self) -> None:
        waits = self._waits_for_checkpoint and not self._never
        if waits and self._batches_since_checkpoint == _WARN_AFTER_BATCHES:
            self._batches_since_checkpoint += 1
            logger.warning(
                f"{_WARN_AFTER_BATCHES} batches of stream {self._reader.label!r} were trained without a checkpoint, "
                f"and the queue keeps them all for a resume. Save more often "
                f"(ModelCheckpoint(every_n_train_steps=...)), disable checkpoints "
                f"(Trainer(enable_checkpointing=False)), or acknowledge without one: TQDataModule(ack='step')."
            )
