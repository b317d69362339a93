# SPDX-License-Identifier: Apache-2.0
"""Run: one entry point of a Trainer (fit, validate, test, predict), its feeds, and what may end it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.books import Ack, Books, keeps_checkpoints
from lightning_tq.callbacks.publish_weights import policy_version
from lightning_tq.feed import Feed, Reading
from lightning_tq.peers import peer_looks
from lightning_tq.place import Place, listed
from lightning_tq.stream import Stream
from lightning_tq.topology import Topology
from lightning_tq.watch import Watch
from transfer_queue import BaseSampler, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

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
        ack: Ack = "auto",
    ) -> None:
        self.trainer = trainer
        self.topology = topology
        self.switch = switch
        self.feeds: dict[str, Feed] = {}
        self.books: list[Books] = []
        self._client = client
        self._ack = ack
        self._producers = producers
        self._told: set[str] = set()
        self._left: dict[str, int] = {}
        self._keeps = False
        self._watch = Watch([self._producer_failed, self._terminated, *peer_looks(trainer)], [self._hint])

    def start(
        self, streams: LabelledStreams, places: MutableMapping[str, Place], conf: Any, held: Collection[str] = ()
    ) -> None:
        """Make the feeds, and begin to watch. ``held``: partitions that were there before this run's producers."""
        for label, (stage, stream) in streams.items():
            self.feeds[label] = Feed(
                label, stage, stream, self.topology, places, self, self._watch.stopped.is_set, conf
            )
        self._keeps = self._ack == "checkpoint" or keeps_checkpoints(self.trainer)
        keeps, never, auto = self._keeps and self._ack != "step", self._ack == "never", self._ack == "auto"
        for feed in self.of_stage("train"):
            feed.settled = lambda partition, feed=feed: settled(self._client, partition, feed.stream.task)
            feed.is_over, feed.held = self._is_over, held
            self.books.append(Books(feed, self._client, self.topology, keeps, never, auto))
        self._watch.start()

    def tell_missing(self, held: Collection[str]) -> None:
        """Tell at once of a partition that a feed waits for in vain, unless another program fills it."""

        def tell(feed: Feed, name: str) -> None:
            if held and name not in held:
                self._warn_once(
                    f"missing {name}",
                    f"stream {feed.label!r} ({feed.stream.partition!r}) reads partition {name!r}, which isn't in the "
                    f"queue: it waits for somebody to fill it. There are {listed(held)}.",
                )

        for feed in self.feeds.values():
            feed.on_begin = partial(tell, feed)

    def of_stage(self, stage: str) -> list[Feed]:
        return [feed for feed in self.feeds.values() if feed.stage == stage]

    def end(self) -> None:
        """End every iterator and thread. Idempotent."""
        self._watch.stop()
        for feed in self.feeds.values():
            feed.close()

    # ---- what feeds ask ----

    @property
    def epoch(self) -> int:
        # Not current_epoch: after a resume at the end of an epoch it lags behind until training starts.
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        if self.trainer.state.fn != TrainerFn.FITTING:  # the last one that was trained: nobody fills one that never is
            return max(int(progress.processed) - 1, 0)
        return int(progress.processed)

    def _is_over(self, epochs_ahead: int) -> bool:
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        last = epochs not in (None, -1) and self.epoch + epochs_ahead >= int(epochs or 0)
        return last or (steps != -1 and self.trainer.global_step >= steps)

    def partition_of(self, stage: str, stream: Stream, epochs_ahead: int = 0, steps_ahead: int = 0) -> str:
        epoch, step = self.epoch + epochs_ahead, self.trainer.global_step + steps_ahead
        version = policy_version(self.trainer) + steps_ahead
        return self.switch.partition(stream, epoch=epoch, global_step=step, policy_version=version, stage=stage)

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
        if not feed.taken and not feed.resumed:
            self._warn_once(
                f"nothing {feed.partition}",
                f"epoch {feed.epoch} trains nothing: partition {feed.partition!r} has no batch that task "
                f"{feed.stream.task!r} has yet to train. Its samples were trained before, or fill no batch. To train "
                f"them again: Stream(replay=True), or another task.",
            )
        if self._is_last(feed):  # the Trainer would spin through empty epochs
            self.trainer.should_stop = True
            rank_zero_info(
                f"Partition {feed.partition!r} was read to its end; training stops after this epoch. For more epochs "
                f"over the same samples: Stream(replay=True). For one partition per epoch: 'train@{{epoch}}'."
            )

    def _is_last(self, feed: Feed) -> bool:
        """Would the next epoch read the same partition again, and find nothing more in it?"""
        ahead = feed.epoch + 1 - self.epoch
        if feed.replay and feed.taken:
            return False
        if self._is_over(ahead):  # a name of one's own may not be asked for an epoch that never comes
            return not set(feed.stream.variables) - {"stage"}
        # What was taken may still be on its way into a step, after which a template may say another name.
        return feed.partition == self.partition_of(feed.stage, feed.stream, ahead, 1 if feed.taken else 0)

    def _report_dropped(self, feed: Feed) -> None:
        told = dropped_text(self._client, feed) if self.trainer.is_global_zero else None
        if told is not None:
            self._warn_once(f"dropped {feed.partition} {feed.stream.task}", told)

    # ---- partitions ----

    def finished_partitions(self) -> list[str]:
        """Partitions that feeds have moved away from and none reads now; each is reported once.

        Where checkpoints are kept, after one that was saved since, whatever is settled when: a run resumed from an
        earlier one reads them again.
        """
        saves = sum(books.saves for books in self.books)
        for feed in self.feeds.values():
            self._left.update(dict.fromkeys(feed.left, saves))
            feed.left.clear()
        current = {feed.partition for feed in self.feeds.values()}
        kept = self._keeps or saves > 0  # or one was saved by hand
        finished = [name for name, at in self._left.items() if name not in current and (saves > at or not kept)]
        for name in finished:
            del self._left[name]
        return finished

    def left_partitions(self) -> list[str]:
        """Partitions that feeds have moved away from, and that weren't reported as finished so far."""
        return list(dict.fromkeys([*self._left, *(name for feed in self.feeds.values() for name in feed.left)]))

    def take_over(self, left: Sequence[str]) -> None:
        """The same of the run that saved the checkpoint from which this one goes on: that is behind them."""
        self._left.update(dict.fromkeys(left, -1))

    # ---- what the watch looks at ----

    def _producer_failed(self) -> BaseException | None:
        return None if self._producers is None else self._producers.failure()

    def _terminated(self) -> BaseException | None:
        return SIGTERMException() if self.trainer.received_sigterm else None

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


def dropped_text(client: TransferQueueClient, feed: Feed) -> str | None:
    """What a partition that a feed has read to its end left over; None: nothing."""
    partition = client.get_stats()["partitions"].get(feed.partition, {})
    dropped = partition.get("tasks", {}).get(feed.stream.task, {}).get("dropped", 0)
    if not dropped:
        return None
    return (
        f"{dropped} samples of partition {feed.partition!r} could not fill a last round of task {feed.stream.task!r} "
        f"and were left over (tail policy)."
    )


def settled(client: TransferQueueClient, partition: str, task: str) -> int:
    """How many of a partition's first batches were acknowledged, so that the task can't ask for them again."""
    tasks = client.get_stats()["partitions"].get(partition, {}).get("tasks", {})
    return int(tasks.get(task, {}).get("settled", 0))


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


def check_ends(streams: LabelledStreams, dp_size: int) -> None:
    """Raises InvalidRequestError where training would end on one rank before the others, who then wait for ever."""
    for label, (stage, stream) in streams.items():
        if stage == "train" and stream.tail == "uneven_ok" and dp_size > 1:
            raise InvalidRequestError(
                f"stream {label!r}: tail='uneven_ok' would end the stream on one of {dp_size} ranks before the others, "
                f"which would wait for it in their next collective. Use 'drop' or 'pad'."
            )


def check_streams(streams: Mapping[str, Sequence[Stream]]) -> None:
    """Raises InvalidRequestError for streams per stage that can't be right together, or in their stage."""
    _check_tasks([stream for each in streams.values() for stream in each])
    _check_replays([stream for stage, each in streams.items() if stage != "train" for stream in each])


def _check_tasks(streams: Sequence[Stream]) -> None:
    """The queue knows one way to draw per task, so streams that share a task must share that, too."""
    first: dict[str, Stream] = {}
    for stream in streams:
        other = first.setdefault(stream.task, stream)
        if other is not stream and (_sampling(other), other.tail) != (_sampling(stream), stream.tail):
            raise InvalidRequestError(
                f"two streams of task {stream.task!r} have different samplers or tails ({other.sampler!r}, "
                f"{other.tail!r} and {stream.sampler!r}, {stream.tail!r}). Give them the same, or tasks of their own."
            )


def _sampling(stream: Stream) -> Any:
    """Type and arguments of a sampler: a configuration file builds one for each stream that names it."""
    return stream.sampler.spec() if isinstance(stream.sampler, BaseSampler) else stream.sampler


def _check_replays(streams: Sequence[Stream]) -> None:
    """Nobody notes where streams stood that aren't for training, so they can't go on there."""
    for stream in streams:
        if stream.replay is False:
            raise InvalidRequestError(
                f"stream of task {stream.task!r}: replay=False is for training. Validation, test and prediction begin "
                f"at the first batch of their partition each time. Leave replay out."
            )
