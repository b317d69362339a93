# SPDX-License-Identifier: Apache-2.0
"""Run: one entry point of a Trainer (fit, validate, test, predict), its feeds, and what may end it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.feed import Feed, Place, Reading
from lightning_tq.stream import Stream
from lightning_tq.topology import Topology
from lightning_tq.watch import Watch
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError, TransferQueueError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_tq.callbacks.partition_switch import PartitionSwitch
    from lightning_tq.producers import ProducerGroup

logger = logging.getLogger(__name__)

_HINT_AFTER_S = 10.0

LabelledStreams = dict[str, tuple[str, Stream]]
"""{label: (stage, stream)}: "train", "val", or "val0", "val1" where there are several."""


class Run:
    """What the feeds of one entry point ask (``feed.Host``)."""

    def __init__(
        self,
        trainer: Trainer,
        topology: Topology,
        switch: PartitionSwitch,
        producers: ProducerGroup | None,
        client: TransferQueueClient,
    ) -> None:
        self.trainer = trainer
        self.topology = topology
        self.switch = switch
        self.feeds: dict[str, Feed] = {}
        self._client = client
        self._producers = producers
        self._parent = os.getppid()
        self._watches_parent = multiprocessing.parent_process() is not None or trainer.local_rank > 0
        self._told: set[str] = set()
        self._left: list[str] = []
        self._watch = Watch([self._producer_failed, self._terminated, self._orphaned], [self._hint])

    def start(self, streams: LabelledStreams, places: MutableMapping[str, Place], conf: Any) -> None:
        """Make the feeds, and begin to watch."""
        for label, (stage, stream) in streams.items():
            self.feeds[label] = Feed(
                label, stage, stream, self.topology, places, self, self._watch.stopped.is_set, conf
            )
        self._watch.start()

    def of_stage(self, stage: str) -> list[Feed]:
        return [feed for feed in self.feeds.values() if feed.stage == stage]

    def end(self) -> None:
        """End every iterator and thread. Idempotent."""
        self._watch.stop()
        for feed in self.feeds.values():
            feed.close()

    # ---- what feeds ask ----

    def partition_of(self, stage: str, stream: Stream, epochs_ahead: int = 0) -> str:
        # Not current_epoch: after a resume at the end of an epoch it lags behind until training starts.
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        epoch = progress.processed + epochs_ahead
        return self.switch.partition(stream, epoch=epoch, global_step=self.trainer.global_step, stage=stage)

    def replays(self, stage: str) -> bool:
        overfit: float = getattr(self.trainer, "overfit_batches", 0)
        return stage == "train" and overfit > 0

    def check(self) -> None:
        self._watch.check()

    def stream_ended(self, feed: Feed, reading: Reading) -> None:
        self._report_dropped(feed)
        if feed.stage != "train":
            return
        limit = self.trainer.num_training_batches
        if feed.stream.num_batches is None and feed.taken < limit < float("inf") and not feed.resumed:
            logger.warning(
                f"partition {feed.partition!r} ended after {feed.taken} batches, {limit} were expected "
                f"(limit_train_batches): Lightning then skips the validation of this epoch. Lower "
                f"limit_train_batches, or leave it out: the epoch ends with the partition."
            )
        if not feed.replay and not feed.stream.variables:
            self.trainer.should_stop = True  # or the Trainer would spin through empty epochs
            rank_zero_info(
                f"Partition {feed.partition!r} was read to its end; training stops after this epoch. For more epochs "
                f"over the same samples: Stream(replay=True). For one partition per epoch: 'train@{{epoch}}'."
            )

    def _report_dropped(self, feed: Feed) -> None:
        if not self.trainer.is_global_zero:
            return
        partition = self._client.get_stats()["partitions"].get(feed.partition, {})
        dropped = partition.get("tasks", {}).get(feed.stream.task, {}).get("dropped", 0)
        if dropped:
            self._warn_once(
                f"dropped {feed.partition} {feed.stream.task}",
                f"{dropped} samples of partition {feed.partition!r} could not fill a last round of task "
                f"{feed.stream.task!r} and were left over (tail policy).",
            )

    # ---- partitions ----

    def finished_partitions(self) -> list[str]:
        """Partitions that feeds have moved away from and none reads now; each is reported once."""
        for feed in self.feeds.values():
            self._left.extend(feed.left)
            feed.left.clear()
        current = {feed.partition for feed in self.feeds.values()}
        finished = [name for name in dict.fromkeys(self._left) if name not in current]
        self._left = [name for name in self._left if name in current]
        return finished

    # ---- what the watch looks at ----

    def _producer_failed(self) -> BaseException | None:
        return None if self._producers is None else self._producers.failure()

    def _terminated(self) -> BaseException | None:
        return SIGTERMException() if self.trainer.received_sigterm else None

    def _orphaned(self) -> BaseException | None:
        if not self._watches_parent or os.getppid() == self._parent:
            return None
        return TransferQueueError(
            f"the process that started this rank (pid {self._parent}) is gone: rank {self.trainer.global_rank} ends."
        )

    def _hint(self) -> None:
        for feed in self._waiting():
            if feed.taken > feed.trained and feed.stage == "train" and feed.stream.num_batches is None:
                self._warn_once(
                    "ahead",
                    f"stream {feed.label!r} waits for batch {feed.taken} while batch {feed.trained} is untrained: at "
                    f"unknown length Lightning fetches one ahead. If your producers wait for that step (for new "
                    f"weights), it waits for ever: give Stream(num_batches=...) or Trainer(limit_train_batches=...).",
                )
            elif self._producers is not None and self._producers.all_done():
                self._warn_once(
                    f"done {feed.partition}",
                    f"stream {feed.label!r} waits for more of partition {feed.partition!r}, but all producers of this "
                    f"run have ended. If nobody else fills it, seal it: client.seal_partition({feed.partition!r}).",
                )

    def _waiting(self) -> Iterator[Feed]:
        for feed in self.feeds.values():
            if feed.waited_for() > _HINT_AFTER_S:
                yield feed

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            logger.warning(text)


def stage_streams(entry: str, streams: Mapping[str, Sequence[Stream]]) -> LabelledStreams:
    """What an entry point ("fit", "validate", ...) reads.

    Raises:
        InvalidRequestError: the stream that it can't do without is missing.
    """
    reads = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}[entry]
    if not streams[reads[0]]:
        raise InvalidRequestError(f"trainer.{entry} needs TQDataModule({reads[0]}=Stream(...)), which is missing.")
    found = {}
    for stage in reads:
        for number, stream in enumerate(streams[stage]):
            found[stage if len(streams[stage]) == 1 else f"{stage}{number}"] = (stage, stream)
    return found


def check_tasks(streams: Sequence[Stream]) -> None:
    """Raises InvalidRequestError where streams share a task but not how it draws: the queue knows one way per task."""
    first: dict[str, Stream] = {}
    for stream in streams:
        other = first.setdefault(stream.task, stream)
        if (other.sampler, other.tail) != (stream.sampler, stream.tail):
            raise InvalidRequestError(
                f"two streams of task {stream.task!r} have different samplers or tails ({other.sampler!r}, "
                f"{other.tail!r} and {stream.sampler!r}, {stream.tail!r}). Give them the same, or tasks of their own."
            )
