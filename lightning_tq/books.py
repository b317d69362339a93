# SPDX-License-Identifier: Apache-2.0
"""Books: which batches a fit is through with for good, and when the queue is told, so that it can let go of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightning_tq.feed import Feed
from lightning_tq.ranks import resumed_from
from lightning_tq.topology import Topology
from transfer_queue import BatchMeta, TransferQueueClient

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

logger = logging.getLogger(__name__)

Ack = Literal["auto", "checkpoint", "step", "never"]
_TOLD_AT = 1000

Newest = dict[str, BatchMeta]
"""{partition: metadata of the newest batch}: an ack settles those before it, too."""


class Books:
    """Of one training stream. A batch is trained, then in an optimizer step, then in a checkpoint, then settled.

    Settled means that nobody will ask for it again, which only holds for what a resumed run doesn't train anew. So the
    queue is told one hook later than Lightning saves: the file is written then.
    """

    def __init__(
        self, feed: Feed, client: TransferQueueClient, topology: Topology, keeps: bool, never: bool, auto: bool = False
    ) -> None:
        """Args:
        keeps: Are checkpoints kept? Then a batch waits for one.
        never: Settle nothing.
        auto: From the first checkpoint on they are kept.
        """
        self.saves = 0
        """Checkpoints that are written."""
        self.keeps = keeps
        self._feed = feed
        self._client = client
        self._topology = topology
        self._never = never or feed.replay
        self._auto = auto
        self._trained: Newest = {}
        self._stepped: Newest = {}
        self._due: Newest = {}
        self._dumped = 0
        self._unsaved = 0
        self._cleared: list[str] = []
        feed.on_whole = self._whole

    @property
    def unstepped(self) -> int:
        """Micro-batches that were trained and are in no optimizer step yet."""
        return self._feed.unstepped

    def _whole(self, meta: BatchMeta) -> None:
        self._trained[meta.partition_ids[0]] = meta

    def trained(self, batch: Any, stepped: bool) -> None:
        """The Trainer is done with a batch. ``stepped``: so is the optimizer."""
        self._feed.mark_trained(batch, stepped)
        self._unsaved += 1
        if stepped:
            self._move_on()

    def epoch_over(self) -> None:
        """Gradients that were accumulated and no step took are lost, and the batches behind them are through."""
        self._feed.mark_stepped()
        self._move_on()

    def _move_on(self) -> None:
        self._stepped.update(self._trained)
        self._trained.clear()
        if not self.keeps:
            self._make_due()

    def _make_due(self) -> None:
        self._due.update(self._stepped)
        self._stepped.clear()

    def dumped(self) -> None:
        """Everything in an optimizer step is inside a checkpoint that is being written."""
        self.keeps = self.keeps or self._auto  # also one that the user saves without a callback for it
        self._make_due()
        self._dumped += 1
        self._unsaved = 0

    def settle(self) -> None:
        """Tell the queue what is through. One rank of a data-parallel group does; the first one clears."""
        self.saves = self._dumped
        self._tell()
        due, self._due = self._due, {}
        if self._never or not due:
            return
        if self._topology.is_reader:
            for partition, meta in due.items():
                settled = self._client.ack(meta, self._feed.stream.task, earlier=True)
                if partition == self._feed.partition:
                    self._feed.batches_done = max(0, self._feed.batches_done - settled)
        # Another rank's ack of a partition's last batches may come after this: that partition gets a second look.
        self._clear(dict.fromkeys([*self._cleared, *due]))
        self._cleared = list(due)

    def end(self, owner: Trainer | Fabric) -> None:
        """Training is over: what is through is settled on all ranks. A collective."""
        self.settle()
        if self._feed.stream.clear_consumed and not self._never:
            owner.strategy.barrier("lightning_tq_settled")
            self._clear(dict.fromkeys(self._cleared))

    def _clear(self, partitions: Mapping[str, None]) -> None:
        others = self._feed.stream.clear_consumed
        if others is False or not (self._topology.is_reader and self._topology.dp_rank == 0):
            return
        tasks = [self._feed.stream.task, *(others if isinstance(others, list) else ())]
        for partition in partitions:
            self._client.clear_consumed(partition, tasks)

    def _tell(self) -> None:
        if self.keeps and not self._never and self._unsaved == _TOLD_AT:
            self._unsaved += 1
            logger.warning(
                f"{_TOLD_AT} batches of stream {self._feed.label!r} were trained and no checkpoint was saved since, so "
                f"the queue keeps them all for a resume. Save more often (ModelCheckpoint(every_n_train_steps=...)), "
                f"switch checkpoints off (Trainer(enable_checkpointing=False)), or let them go without one: "
                f"TQDataModule(ack='step')."
            )


def keeps_checkpoints(trainer: Trainer) -> bool:
    """Is there a checkpoint to go back to, or will there be?"""
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    if resumed_from(trainer) is not None:
        return True
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            continue  # saves what is newest when a run fails, nothing before
        if not isinstance(callback, ModelCheckpoint) or callback.save_top_k != 0 or callback.save_last:
            return True
    return False


def put_right(checkpoint: dict[str, Any], unstepped: int, known_length: bool) -> None:
    """Make the counts in a checkpoint say what a run that goes on from it has yet to do.

    Args:
        unstepped: Batches of an accumulation that no step has taken. Their gradients aren't in the checkpoint.
        known_length: Did the Trainer know the number of batches? Else it would count on from an epoch that is over.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    total, current = progress["total"], progress["current"]
    if epochs["current"]["ready"] == epochs["current"]["processed"] == epochs["current"]["completed"] + 1:
        # At the end of an epoch. With max_steps Lightning would end it once more, and so skip the next one.
        for counts in epochs.values():
            counts["completed"] = counts["processed"]
        progress |= {"current": dict.fromkeys(current, 0), "is_last_batch": False}
        return
    # Saved at the end of a batch: it counts as processed, and as completed when the checkpoint is loaded.
    at_batch_end = total["completed"] == total["processed"] - 1
    if progress["is_last_batch"] and at_batch_end and not known_length:
        unstepped = 0  # the last batch of an epoch always steps
        progress["current"] = {"ready": 0, "completed": -1, "started": 0, "processed": 0}
    for counts in (total, current) if unstepped else ():
        for name in counts:
            counts[name] -= unstepped
