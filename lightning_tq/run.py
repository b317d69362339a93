# SPDX-License-Identifier: Apache-2.0
"""Run: one entry point of a Trainer (fit, validate, test, predict), its stream readers, and what may end it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.checks import list_names
from lightning_tq.device_copies import device_copies
from lightning_tq.loader import StreamReader
from lightning_tq.producers.group import ProducerGroup
from lightning_tq.progress import AckRule, LeftPartitions, Position, Progress
from lightning_tq.queue_connection import QueueConnection
from lightning_tq.rank_watchdog import RankWatchdog, parent_check
from lightning_tq.run_members import RunMembers
from lightning_tq.stream import StageStream, Stream
from lightning_tq.topology import Topology
from lightning_tq.trainer_compat import begin_next_epoch, changes_batches, step_when_trained
from lightning_tq.wait_hints import WaitHints, why_nothing
from transfer_queue import is_internal
from transfer_queue.errors import ConfigError

logger = logging.getLogger(__name__)


class NamesPartitions(Protocol):
    """What a run asks its PartitionSwitch."""

    clear_finished: bool

    def partition(self, stream: Stream, *, epoch: int, global_step: int, policy_version: int, stage: str) -> str:
        """The partition for an iterator that starts now."""

    def pattern(self, stream: Stream, stage: str) -> str:
        """A pattern for all names that ``partition`` may return in this stage."""


@dataclass(kw_only=True, eq=False, repr=False)
class Run:
    """Implements ``loader.RunContext`` for a Trainer."""

    _fitted: ClassVar[set[str]] = set()
    """Addresses of the queues that fits of this process have read."""
    _active: ClassVar[WeakKeyDictionary[Trainer, Run]] = WeakKeyDictionary()
    """Each Trainer's run, from its start to its end."""

    trainer: Trainer
    topology: Topology
    streams: Sequence[StageStream]
    connection: QueueConnection
    switch: NamesPartitions
    ack_rule: AckRule
    position: Position | None
    """Where an earlier fit of this process has trained to in this queue."""
    partitions_at_start: Mapping[str, int]
    """Those in the queue before this run's producers started, with the batches that training had been given."""
    producers: ProducerGroup
    """Empty on ranks other than the first."""
    members: RunMembers
    """All ranks."""

    def __post_init__(self) -> None:
        self.client = self.connection.client
        self.policy_version: int | None = None
        """Version of the weights that PublishWeights published last, on every rank. None: none."""
        self._address = self.connection.address
        self._warned: set[str] = set()
        self._shown_at_start = [name for name in self.partitions_at_start if not is_internal(name)]
        self._left = LeftPartitions()
        self._follows_a_fit = self._address in self._fitted
        rank = self.trainer.global_rank
        checks = [self.producers.failure, self._terminated, parent_check(rank), self.members.check]
        running, clears = self.producers.running, self.switch.clear_finished
        self._hints = WaitHints(self.trainer, self.client, running, clears, self._warn)
        self.watchdog = RankWatchdog(checks, lambda: self._hints.look(self.readers.values()))
        self.readers: dict[str, StreamReader] = {
            each.label: StreamReader(each, self, self.position if each.stage == "train" else None)
            for each in self.streams
        }
        copies = None if changes_batches(self.trainer) else device_copies(self.trainer.strategy.root_device)
        for reader in self.readers.values():
            reader.device_copies = copies if reader.stream.pin_memory else None
            reader.dataset.report_every_s = math.inf  # the hints report its waits

    def start(self) -> None:
        """From now on ``run_of`` finds it, and the watchdog looks after it."""
        self._active[self.trainer] = self
        self.watchdog.start()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._fitted.add(self._address)
            if self._follows_a_fit and self._shown_at_start and self.producers.running() is not None:
                rank_zero_info(
                    f"The queue of an earlier fit holds {list_names(self._shown_at_start)}, and producers can't "
                    f"put into what is sealed. For a new queue, call close() of that fit's data module first."
                )

    @classmethod
    def find(cls, trainer: Trainer) -> Run | None:
        """The Trainer's run in this process, if it has one now."""
        return cls._active.get(trainer)

    def has_no_producers(self, entry: str, are_configured: bool) -> None:
        """Note that no producer of the data module runs in this entry point, so that a stream may wait forever."""
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

    def of_stage(self, stage: str) -> list[StreamReader]:
        return [reader for reader in self.readers.values() if reader.stage == stage]

    def train_reader(self) -> StreamReader:
        return self.of_stage("train")[0]

    def end(self) -> None:
        """End every iterator and thread. Idempotent."""
        self.watchdog.stop()
        for reader in self.readers.values():
            reader.close()
        if self.find(self.trainer) is self:
            del self._active[self.trainer]

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
        ends = 0 <= self.trainer.max_steps <= step_when_trained(self.trainer, reader.progress)
        return ends and self.trainer.lightning_module.automatic_optimization

    def may_return(self, reader: StreamReader) -> bool:
        """A switch of your own may name partitions in any order, but what it clears is gone."""
        return not self.switch.clear_finished and self.switch.pattern(reader.stream, reader.stage) == "*"

    def partition_of(self, reader: StreamReader, epochs_ahead: int = 0, steps_ahead: int = 0) -> str:
        if self.overfits and reader.progress.partition is not None:
            return reader.progress.partition
        epoch, step = self.epoch + epochs_ahead, self.trainer.global_step + steps_ahead
        version = step if self.policy_version is None else self.policy_version + steps_ahead
        return self.switch.partition(
            reader.stream, epoch=epoch, global_step=step, policy_version=version, stage=reader.stage
        )

    def announce(self, version: int) -> None:
        """Say on every rank which policy version trains now: groups that are leased from now on have it."""
        before, self.policy_version = self.policy_version, version
        reader = self.train_reader()
        if not reader.reads_queue:
            return
        stream = reader.stream
        if self.trainer.is_global_zero:
            is_first = before is None or version < before  # of this run, which may follow one that had come further
            self.client.advance(self.switch.pattern(stream, "train"), version, resumed=is_first)
            if is_first and stream.draws_groups:  # if it resumes, leases have waited for this
                stream.register(self.client, self.topology.dp_size)
        if stream.bounds_staleness:  # before another rank frees its slots of this step for groups of the last version
            self.trainer.strategy.barrier("lightning_tq_version")

    @property
    def overfits(self) -> bool:
        return float(getattr(self.trainer, "overfit_batches", 0)) > 0

    def stream_ended(self, reader: StreamReader) -> None:
        progress = reader.progress
        leftovers = reader.leftover_text() if self.trainer.is_global_zero else None
        if leftovers is not None:
            self._warn(f"dropped {progress.partition} {reader.stream.task}", leftovers)
        if reader.stage != "train":
            return
        limit = self.trainer.num_training_batches
        if reader.stream.num_batches is None and progress.taken < limit < math.inf and not progress.resumed:
            if isinstance(self.trainer.limit_train_batches, int):
                expects = "limit_train_batches expects"
                advice = "Lower limit_train_batches, or remove it: the epoch ends with the partition."
            else:  # a CombinedLoader of the user
                expects, advice = "the loaders beside it have", "Set Stream(num_batches=...), the batches per epoch."
            logger.warning(
                f"partition {progress.partition!r} ended after {progress.taken} batches, but {expects} {limit}. "
                f"Lightning then skips the validation of this epoch. {advice}"
            )
        if not progress.taken and not progress.resumed:
            self._warn(
                f"nothing {progress.partition}",
                f"epoch {progress.epoch} trains nothing: {why_nothing(self.client, reader)}",
            )
        if self._is_last_partition(reader):  # otherwise the Trainer would loop through empty epochs
            self.trainer.should_stop = True
            if not self.training_ends(progress.epoch + 1 - self.epoch):
                advice = "For more epochs on the same samples, set Stream(replay=True). "
                if reader.reads_queue:
                    advice += "For one per epoch: 'train@{epoch}'."
                else:
                    advice += "The record holds no further one for this stream."
                rank_zero_info(
                    f"Partition {progress.partition!r} was read to its end, so training stops after this epoch. "
                    f"{advice}"
                )

    def _is_last_partition(self, reader: StreamReader) -> bool:
        """Whether the next epoch would read the same partition again and find nothing more in it."""
        progress = reader.progress
        ahead = progress.epoch + 1 - self.epoch
        if reader.replay and progress.taken:
            return False
        if self.training_ends(ahead):  # a user's partition() may not expect an epoch after the last
            return not set(reader.stream.variables) - {"stage"}
        # An optimizer step for the delivered batches may still follow, and change the template's result.
        following, record = self.partition_of(reader, ahead, 1 if progress.taken else 0), reader.stream.record
        return progress.partition == following or (record is not None and following not in record.partitions)

    # ---- partitions ----

    def finished_partitions(self) -> list[str]:
        """Partitions that readers moved on from and none reads now; each is returned once.

        Where checkpoints are kept, a partition finishes with the next checkpoint. Until then, a run that resumes from
        the previous one reads it again, whatever was acknowledged.
        """
        return self._left.take_finished(self._streams(), self.ack_rule.keeps_checkpoints)

    def left_partitions(self) -> list[str]:
        """Those that readers moved on from, finished or not."""
        return self._left.names(self._streams())

    def _streams(self) -> list[Progress]:
        return [reader.progress for reader in self.readers.values()]

    def state_dict(self) -> dict[str, Any]:
        """What ``TQDataModule.state_dict`` says of partitions."""
        streams = self._streams()
        read = {each.label: each.partition for each in streams if self.overfits and each.partition is not None}
        return {"left": self.left_partitions(), "overfitted": read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the run that saved the checkpoint."""
        if self.train_reader().reads_queue:
            self._left.take_over(state.get("left", []))
        overfitted = state.get("overfitted", {})
        for label in overfitted.keys() & self.readers.keys() if self.overfits else ():
            self.readers[label].progress.partition = overfitted[label]

    # ---- what the watchdog checks ----

    def _terminated(self) -> BaseException | None:
        return SIGTERMException() if self.trainer.received_sigterm else None

    def _warn(self, key: str | None, text: str) -> None:
        """Once per key, or each time without one."""
        if key in self._warned:
            return
        if key is not None:
            self._warned.add(key)
        logger.warning(text)


def run_of(trainer: Trainer, callback: str = "this callback") -> Run:
    """The Trainer's run, for the callback of that name. Raises ConfigError where no TQDataModule feeds the Trainer."""
    run = Run.find(trainer)
    if run is None:
        datamodule = getattr(trainer, "datamodule", None)
        raise ConfigError(
            f"{callback} needs a TQDataModule: trainer.fit(model, datamodule=TQDataModule(...)), got {datamodule!r}."
        )
    return run
