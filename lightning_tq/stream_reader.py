# SPDX-License-Identifier: Apache-2.0
"""StreamReader: reads one stream in this process. It chooses partitions, keeps the position and measures waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from lightning_tq.batch import Position, TQBatch, UnfetchedBatch
from lightning_tq.device_copies import DeviceCopies
from lightning_tq.stream import StageStream
from lightning_tq.stream_loader import ReaderDataset, StreamIterator
from lightning_tq.topology import Topology
from transfer_queue import BatchMeta, EndOfPartitionError, TransferQueueClient


class Delivered(NamedTuple):
    """A micro-batch that was delivered and is not trained yet."""

    position: Position
    """Where the stream continues after it."""
    completed: list[BatchMeta]
    """Last micro-batches of the batches that end here, including batches that were filtered out before it."""


class RunContext(Protocol):
    """What a stream reader asks the run it belongs to."""

    topology: Topology
    partitions_at_start: Collection[str]
    """Partitions in the queue before the run's producers started. Empty on ranks other than the first."""

    @property
    def client(self) -> TransferQueueClient:
        """This process's client of the queue."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""

    def training_ends(self, epochs_ahead: int) -> bool:
        """Whether nothing is trained in the epoch that is this many ahead."""

    def ends_before_next(self, reader: StreamReader) -> bool:
        """Whether training ends with the batches that were delivered, and the next one is only fetched ahead."""

    def partition_of(self, reader: StreamReader, epochs_ahead: int = 0) -> str:
        """The partition for an iterator that starts now, or this many epochs later."""

    def begin_next_epoch(self) -> None:
        """The current epoch, in which training resumed, has no more batches. ``epoch`` is the next one from now on."""

    @property
    def overfits(self) -> bool:
        """Whether every epoch reads the batches of the first one again."""

    def check(self) -> None:
        """Raise the error that ended the run, if there is one."""

    def stream_ended(self, reader: StreamReader) -> None:
        """The stream has no more batches in its partition."""


class StreamReader:
    """One stream of one stage. ``positions`` outlives readers: per label, the position after the last step."""

    def __init__(
        self,
        each: StageStream,
        positions: MutableMapping[str, Position],
        run: RunContext,
        should_stop: Callable[[], bool],
        config: Any,
    ) -> None:
        self.label, self.stage = each.label, each.stage
        self.stream = stream = each.stream
        self.partition: str | None = None
        """Partition of the newest iterator."""
        self.left_partitions: list[str] = []
        """Partitions that this reader has moved on from, until the run collects them."""
        self.waited_s = 0.0
        self.waiting_since: float | None = None
        self.taken = 0
        """Micro-batches of the current epoch that were delivered, including those before a resume with Fabric."""
        self.trained = 0
        """How many of those were trained (training stage only)."""
        self.batches_done = 0
        """Batches of the partition that were trained completely and are not acknowledged yet."""
        self.unstepped = 0
        """Micro-batches that were trained since the last optimizer step."""
        self.resumed = False
        """Whether the current iterator started at a checkpoint's position, so that its epoch is shorter."""

        # Set by the run or by a callback.
        self.filter_batch: Callable[[TQBatch], TQBatch | None] | None = None
        """Returns the part of a batch to deliver, or None to skip it."""
        self.device_copies: DeviceCopies | None = None
        """Starts the copy of each delivered batch to the device."""
        self.on_partition: Callable[[str], None] | None = None
        """Called with the partition that an iterator starts to read."""

        self._restored = False
        self._taken_before = 0
        self._delivered: deque[Delivered] = deque()
        self._unfetched: UnfetchedBatch | None = None
        self._trained_to: Position | None = None
        self._start = Position(
            partition_id="",
            batch_size=stream.batch_size,
            micro_batch_size=stream.micro_size,
            dp_size=run.topology.dp_size,
        )
        self._positions = positions
        self._run = run
        self._iterator: StreamIterator | None = None
        self.dataset = ReaderDataset(
            config=config, batch_size=stream.batch_size, micro_batch_size=stream.micro_size, data_fields=stream.fields,
            partition_id="", task_name=stream.task, dp_rank=run.topology.dp_rank, dp_size=run.topology.dp_size,
            sampling_config=stream.sampling_config, prefetch=stream.prefetch, layout=stream.layout,
            timeout_s=stream.timeout_s, should_stop=should_stop, where=stream.where,
        )  # fmt: skip
        self.dataset.reader = self

    @property
    def replay(self) -> bool:
        """Whether an iterator that returns to its partition starts at its first batch."""
        configured = self.stream.replay
        return self._run.overfits or (self.stage != "train" if configured is None else configured)

    @property
    def epoch(self) -> int:
        """Epoch of the current iterator. The Trainer's own number may still be the previous one."""
        assert self._start.epoch is not None, "an iterator has started"
        return self._start.epoch

    @property
    def position(self) -> Position | None:
        """After the last micro-batch that is in an optimizer step."""
        return self._positions.get(self.label)

    def waiting_s(self) -> float:
        """Seconds that the reader has waited for its current batch; 0 when it does not wait."""
        since = self.waiting_since
        return 0.0 if since is None else time.perf_counter() - since

    def _statistic(self, partition: str | None, name: str) -> int:
        """A number of the queue's statistics about this stream's task in a partition."""
        tasks = self._run.client.get_stats()["partitions"].get(partition, {}).get("tasks", {})
        return int(tasks.get(self.stream.task, {}).get(name, 0))

    def leftover_text(self) -> str | None:
        """A message about samples that filled no last batch of the partition, or None."""
        dropped = self._statistic(self.partition, "dropped")
        if not dropped:
            return None
        return (
            f"{dropped} samples of partition {self.partition!r} could not fill a last round of task "
            f"{self.stream.task!r}, or a group of its sampler, and were left over (tail policy)."
        )

    # ---- iterators ----

    def iterate(self, start: Callable[[], Iterator[Any]]) -> StreamIterator:
        """A new iterator; it ends the previous one. ``start`` returns the loader's items from the cursor on."""
        self.close_iterator()
        self._iterator = StreamIterator(self, start)
        return self._iterator

    def move_cursor(self) -> None:
        """Move the dataset's cursor to where an iterator that starts now begins."""
        name, position = self._run.partition_of(self), self.position
        continues = position is not None and self._restored and position.epoch == self._run.epoch
        if continues and position is not None:
            name = position.partition_id  # the template may name another partition after more steps
        self._enter_partition(name)
        self.taken = self._taken_before if continues else 0
        self.trained = self.unstepped = self.batches_done = 0
        self._delivered.clear()
        self._unfetched = self._trained_to = None
        self.resumed = self._restored
        self._start = replace(self._start, epoch=self._run.epoch)
        position = self._first_position(name, replay=self.replay and not continues)
        self.dataset.load_state_dict(position.as_dict())

    def _first_position(self, name: str, replay: bool) -> Position:
        """Where an iterator over this partition starts."""
        # An ack covers all earlier batches, so the task can't read the first ones again.
        acked = 0 if replay or self.stage != "train" else self._statistic(name, "settled")
        position = self.position
        if replay or position is None or position.partition_id != name:
            return Position(partition_id=name, batch_index=acked)
        if self._restored:
            position.check_sizes(self._start, self.label)
            position.check_partition_exists(self._run.partitions_at_start)
        position.check_not_acked(acked)
        self.batches_done = position.batch_index - acked
        return position

    def _enter_partition(self, name: str) -> None:
        if self.partition not in (None, name):
            self.left_partitions.append(str(self.partition))
        self.partition = name
        if self.on_partition is not None:
            self.on_partition(name)

    def next_batch(self, iterator: StreamIterator) -> TQBatch | UnfetchedBatch:
        """Wait for a batch. Raises the error that ended the run, or StopIteration at the end of the stream."""
        unfetched, self._unfetched = self._unfetched, None
        if unfetched is not None:  # training goes on
            unfetched.fetch()
        if self.stage == "train" and self.taken > self.trained and self._run.ends_before_next(self):
            self._unfetched = UnfetchedBatch(partial(self._wait_for_batch, iterator))
            return self._unfetched
        return self._wait_for_batch(iterator)

    def _wait_for_batch(self, iterator: StreamIterator) -> TQBatch:
        self._run.check()
        if not self.taken and self._training_ends():
            iterator.close()  # Lightning asks for a batch even if the checkpoint was saved at the end of training
            raise StopIteration
        started = self.waiting_since = time.perf_counter()
        try:
            batch = self._filtered_batch(iterator)
        except StopIteration:
            self._run.check()  # a stopped stream also ends
            iterator.close()
            self._ended()
            raise
        finally:
            self.waiting_since = None
            self.waited_s += time.perf_counter() - started
        self.taken += 1
        return batch

    def _training_ends(self, epochs_ahead: int = 0) -> bool:
        return self.stage == "train" and self._run.training_ends(epochs_ahead)

    def _filtered_batch(self, iterator: StreamIterator) -> TQBatch:
        completed: list[BatchMeta] = []
        while True:
            data, meta = self._next_item(iterator)
            state = self.dataset.state_dict()
            position = replace(
                self._start,
                partition_id=state["partition_id"],
                batch_index=state["batch_index"],
                micro_batch=state["micro_batch"],
            )
            if position.micro_batch == 0:
                completed.append(meta)
            batch = TQBatch(data, meta, position)
            kept = batch if self.filter_batch is None else self.filter_batch(batch)
            if kept is not None:
                if self.device_copies is not None:
                    kept.copy_ahead(self.device_copies)
                if self.stage == "train":  # other stages don't report what they trained
                    self._delivered.append(Delivered(position, completed))
                return kept

    def _next_item(self, iterator: StreamIterator) -> Any:
        try:
            items = iterator.items  # the first access starts it
            if self.taken == self.stream.num_batches:  # not in the loader, which would count filtered batches
                raise StopIteration
            return next(items)
        except StopIteration:
            if self.taken or not self._has_next_epoch():
                raise
        # Resumed at the very end of an epoch. Lightning asks only once, before it counts that epoch as done.
        self._run.check()
        self._run.begin_next_epoch()
        iterator.restart()
        return next(iterator.items)

    def _has_next_epoch(self) -> bool:
        """After a resume at the end of an epoch: whether the next epoch has samples to train."""
        if not self.resumed or self.stage != "train" or self._training_ends(1):
            return False
        return self.replay or self._run.partition_of(self, 1) != self.partition

    def _ended(self) -> None:
        expected = self.stream.num_batches
        if expected is not None and self.taken < expected and not self.resumed:
            raise EndOfPartitionError(
                f"stream {self.label!r} has num_batches={expected}, but partition {self.partition!r} ended after "
                f"{self.taken}. Lightning would silently skip the validation of this epoch. Produce enough for "
                f"{expected} micro-batches of {self.stream.micro_size} rows on every rank, or lower num_batches."
            )
        self._run.stream_ended(self)

    # ---- what was trained ----

    def mark_trained(self, batch: Any) -> list[BatchMeta]:
        """Note that this micro-batch was trained, or the oldest delivered one if a hook replaced the batch.

        Returns:
            Metadata of the batches that are trained completely now.
        """
        self.trained += 1
        self._restored = False
        delivered = self._pop_delivered(batch)
        if delivered is None:
            return []
        self._trained_to = delivered.position
        self.unstepped += 1
        self.batches_done += len(delivered.completed)
        return delivered.completed

    def _pop_delivered(self, batch: Any) -> Delivered | None:
        position = batch.position if isinstance(batch, TQBatch) else None
        while self._delivered:
            delivered = self._delivered.popleft()
            if position is None or delivered.position is position:
                return delivered
        return None

    def mark_stepped(self) -> None:
        """What was trained so far is in an optimizer step, or will never be."""
        if self._trained_to is not None:
            self._positions[self.label], self._trained_to = self._trained_to, None
        self.unstepped = 0

    def restore(self, position: Position, taken: int = 0) -> None:
        """The next iterator starts at this position, if it reads that partition.

        Args:
            taken: Micro-batches of that epoch so far. Only Fabric needs it; a Trainer counts them itself.
        """
        self._trained_to = None
        self._positions[self.label] = position
        self.taken = self._taken_before = taken
        self._restored = True

    # ---- ending ----

    def close_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def close(self) -> None:
        """End the current iterator and leave the queue."""
        self.close_iterator()
        self.dataset.close()
