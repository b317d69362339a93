# SPDX-License-Identifier: Apache-2.0
"""Run: one entry point of a Trainer (fit, validate, test, predict), its stream readers, and what may end it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.acks import Ack, AckTracker
from lightning_tq.batch import Position
from lightning_tq.callbacks.publish_weights import policy_version
from lightning_tq.callbacks.queue_checkpoint import writes_in_background
from lightning_tq.checks import list_names
from lightning_tq.device_copies import device_copies
from lightning_tq.rank_watchdog import RankWatchdog, rank_checks
from lightning_tq.stream import StageStream
from lightning_tq.stream_reader import StreamReader
from lightning_tq.topology import Topology
from lightning_tq.trainer_compat import begin_next_epoch, changes_batches, keeps_checkpoints, step_when_trained
from lightning_tq.wait_hints import WaitHints, why_nothing
from transfer_queue import TransferQueueClient

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_tq.callbacks.partition_switch import PartitionSwitch
    from lightning_tq.producers.group import ProducerGroup
    from lightning_tq.run_members import RunMembers

logger = logging.getLogger(__name__)


class Run:
    """Implements ``stream_reader.RunContext`` for a Trainer."""

    _fitted: ClassVar[set[str]] = set()
    """Addresses of the queues that fits of this process have read."""

    def __init__(
        self,
        trainer: Trainer,
        topology: Topology,
        switch: PartitionSwitch,
        producers: ProducerGroup | None,
        client: TransferQueueClient,
        ack: Ack,
        streams: Sequence[StageStream],
        positions: MutableMapping[str, Position],
        conf: Any,
        partitions_at_start: Collection[str],
        members: RunMembers | None = None,
    ) -> None:
        """Create the stream readers and start the watchdog. This is a collective.

        Args:
            partitions_at_start: Partitions in the queue before this run's producers started.
            members: The ranks of all hosts; None: there is one host.
        """
        self.trainer = trainer
        self.topology = topology
        self.switch = switch
        self.readers: dict[str, StreamReader] = {}
        self.ack_trackers: list[AckTracker] = []
        self.partitions_at_start = partitions_at_start
        self.client = client
        self._address = conf["address"]
        self._warned: set[str] = set()
        self._left_partitions: dict[str, int] = {}
        self._keeps_checkpoints = ack == "checkpoint" or keeps_checkpoints(trainer)
        checks = [self._terminated, *rank_checks(trainer)]
        if producers is not None:
            checks.insert(0, producers.failure)
        if members is not None:
            checks.append(members.check)
        num_running = producers.num_running if producers is not None else lambda: None
        self._hints = WaitHints(trainer, client, num_running, self._warn_once)
        self._watchdog = RankWatchdog(checks, [lambda: self._hints.look(self.readers.values())])
        for each in streams:
            self.readers[each.label] = StreamReader(each, positions, self, self._watchdog.stopped.is_set, conf)
        copies = None if changes_batches(trainer) else device_copies(trainer.strategy.root_device)
        for reader in self.readers.values():
            reader.device_copies = copies if reader.stream.pin_memory else None
        for reader in self.of_stage("train"):
            tracker = AckTracker(reader, client, topology, ack, self._keeps_checkpoints, writes_in_background(trainer))
            self.ack_trackers.append(tracker)
        self._watchdog.start()
        self._follows_a_fit = self._address in self._fitted
        if trainer.state.fn == TrainerFn.FITTING:
            self._fitted.add(self._address)
            if self._follows_a_fit and partitions_at_start and num_running() is not None:
                rank_zero_info(
                    f"The queue of an earlier fit holds {list_names(partitions_at_start)}, and producers can't put "
                    f"into what is sealed. For a new queue, call close() of that fit's data module first."
                )

    def has_no_producers(self, entry: str, are_configured: bool) -> None:
        """Note that no producer of the data module runs in this entry point, so that a stream may wait forever.

        Outside a fit, where hooks rarely put samples, each partition that was not there at the start is reported when
        a stream starts to read it.
        """
        if are_configured:
            stages = sorted({"fit", entry})
            why = f"The producers of this data module don't run in {entry}: set Producer(stages={stages})."
        else:
            why = (
                f"This data module has no producers, so only this process (dm.client) or others that join "
                f"{self._address} can fill it."
            )
        cleared = " An earlier fit of this process may have cleared it." if self._follows_a_fit else ""
        self._hints.note = f"{why}{cleared}"
        known = self.partitions_at_start
        if entry == "fit" or not (known or are_configured):
            return
        holds = f"The queue holds {list_names(known)}." if known else "The queue is empty."

        def warn(reader: StreamReader, name: str) -> None:
            if name not in known:
                self._warn_once(
                    f"missing {name}",
                    f"stream {reader.label!r} ({reader.stream.partition!r}) reads partition {name!r}, which is not in "
                    f"the queue, and waits until a producer fills it. {holds}{f' {why}' if are_configured else ''}",
                )

        for reader in self.readers.values():
            reader.on_partition = partial(warn, reader)

    def of_stage(self, stage: str) -> list[StreamReader]:
        return [reader for reader in self.readers.values() if reader.stage == stage]

    def train_reader(self) -> StreamReader:
        return self.of_stage("train")[0]

    def end(self) -> None:
        """End every iterator and thread. Idempotent."""
        self._watchdog.stop()
        for reader in self.readers.values():
            reader.close()

    # ---- what stream readers ask ----

    @property
    def epoch(self) -> int:
        # current_epoch lags behind after a resume at the end of an epoch, until training starts.
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        if self.trainer.state.fn != TrainerFn.FITTING:  # the last trained epoch, because the next has no data
            return max(int(progress.processed) - 1, 0)
        return int(progress.processed)

    def training_ends(self, epochs_ahead: int) -> bool:
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        last = epochs not in (None, -1) and self.epoch + epochs_ahead >= int(epochs or 0)
        return last or (steps != -1 and self.trainer.global_step >= steps)

    def begin_next_epoch(self) -> None:
        begin_next_epoch(self.trainer, self.train_reader().stream)

    def ends_before_next(self, reader: StreamReader) -> bool:
        ends = 0 <= self.trainer.max_steps <= step_when_trained(self.trainer, reader)
        return ends and self.trainer.lightning_module.automatic_optimization

    def partition_of(self, reader: StreamReader, epochs_ahead: int = 0, steps_ahead: int = 0) -> str:
        if self.overfits and reader.partition is not None:
            return reader.partition
        epoch, step = self.epoch + epochs_ahead, self.trainer.global_step + steps_ahead
        version = policy_version(self.trainer) + steps_ahead
        return self.switch.partition(
            reader.stream, epoch=epoch, global_step=step, policy_version=version, stage=reader.stage
        )

    @property
    def overfits(self) -> bool:
        share: float = getattr(self.trainer, "overfit_batches", 0)
        return share > 0

    def check(self) -> None:
        self._watchdog.check()

    def stream_ended(self, reader: StreamReader) -> None:
        leftovers = reader.leftover_text() if self.trainer.is_global_zero else None
        if leftovers is not None:
            self._warn_once(f"dropped {reader.partition} {reader.stream.task}", leftovers)
        if reader.stage != "train":
            return
        limit = self.trainer.num_training_batches
        if reader.stream.num_batches is None and reader.taken < limit < float("inf") and not reader.resumed:
            if isinstance(self.trainer.limit_train_batches, int):
                expects = "limit_train_batches expects"
                advice = "Lower limit_train_batches, or remove it: the epoch ends with the partition."
            else:  # a CombinedLoader of the user
                expects, advice = "the loaders beside it have", "Set Stream(num_batches=...), the batches per epoch."
            logger.warning(
                f"partition {reader.partition!r} ended after {reader.taken} batches, but {expects} {limit}. Lightning "
                f"then skips the validation of this epoch. {advice}"
            )
        if not reader.taken and not reader.resumed:
            self._warn_once(
                f"nothing {reader.partition}",
                f"epoch {reader.epoch} trains nothing: {why_nothing(self.client, reader)}",
            )
        if self._is_last_partition(reader):  # otherwise the Trainer would loop through empty epochs
            self.trainer.should_stop = True
            if not self.training_ends(reader.epoch + 1 - self.epoch):
                rank_zero_info(
                    f"Partition {reader.partition!r} was read to its end, so training stops after this epoch. For more "
                    f"epochs on the same samples, set Stream(replay=True). For one per epoch: 'train@{{epoch}}'."
                )

    def _is_last_partition(self, reader: StreamReader) -> bool:
        """Whether the next epoch would read the same partition again and find nothing more in it."""
        ahead = reader.epoch + 1 - self.epoch
        if reader.replay and reader.taken:
            return False
        if self.training_ends(ahead):  # a user's partition() may not expect an epoch after the last
            return not set(reader.stream.variables) - {"stage"}
        # An optimizer step for the delivered batches may still follow, and change the template's result.
        return reader.partition == self.partition_of(reader, ahead, 1 if reader.taken else 0)

    # ---- partitions ----

    def finished_partitions(self) -> list[str]:
        """Partitions that readers moved on from and none reads now; each is returned once.

        Where checkpoints are kept, a partition finishes with the next checkpoint. Until then, a run that resumes from
        the previous one reads it again, whatever was acknowledged.
        """
        saves = sum(tracker.checkpoints_written for tracker in self.ack_trackers)
        for reader in self.readers.values():
            self._left_partitions.update(dict.fromkeys(reader.left_partitions, saves))
            reader.left_partitions.clear()
        current = {reader.partition for reader in self.readers.values()}
        waits = self._keeps_checkpoints or saves > 0  # or one was saved by hand
        left = self._left_partitions
        finished = [name for name, at in left.items() if name not in current and (saves > at or not waits)]
        for name in finished:
            del left[name]
        return finished

    def left_partitions(self) -> list[str]:
        """Partitions that readers moved on from and that ``finished_partitions`` did not return yet."""
        recent = (name for reader in self.readers.values() for name in reader.left_partitions)
        return list(dict.fromkeys([*self._left_partitions, *recent]))

    def overfitted(self) -> dict[str, str]:
        """By stream, the partition that ``overfit_batches`` reads in every epoch: that of its first iterator."""
        readers = self.readers.values() if self.overfits else ()
        return {reader.label: reader.partition for reader in readers if reader.partition is not None}

    def take_over(self, left: Sequence[str], overfitted: Mapping[str, str]) -> None:
        """Take over ``left_partitions`` and ``overfitted`` of the run that saved the checkpoint after them."""
        self._left_partitions.update(dict.fromkeys(left, -1))
        for label in overfitted.keys() & self.readers.keys() if self.overfits else ():
            self.readers[label].partition = overfitted[label]

    # ---- what the watchdog checks ----

    def _terminated(self) -> BaseException | None:
        return SIGTERMException() if self.trainer.received_sigterm else None

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(text)
