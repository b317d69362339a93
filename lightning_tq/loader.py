# SPDX-License-Identifier: Apache-2.0
"""StreamReader: reads one stream in this process, measures waits and acknowledges. StreamLoader: its DataLoader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from lightning_tq.batch import TQBatch, UnfetchedBatch, queue_batch
from lightning_tq.checks import counted
from lightning_tq.device_copies import SideStream
from lightning_tq.progress import AckRule, Position, Progress
from lightning_tq.rank_watchdog import RankWatchdog
from lightning_tq.stream import StageStream
from lightning_tq.topology import Topology
from transfer_queue import (
    EndOfPartitionError,
    ProducersGoneError,
    StreamingDataLoader,
    StreamingDataset,
    TransferQueueClient,
)
from transfer_queue.errors import InvalidRequestError


class RunContext(Protocol):
    """What a stream reader asks the run it belongs to."""

    topology: Topology
    ack_rule: AckRule
    """For the stream that is trained."""
    partitions_at_start: Mapping[str, int]
    """``drawn_batches`` before the run's producers started. Empty on ranks other than the first."""
    watchdog: RankWatchdog
    """Says when streams should end, and raises the error that ended the run."""

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

    def may_return(self, reader: StreamReader) -> bool:
        """Whether the stream may come back to a partition that it has moved on from."""

    def left_partitions(self) -> list[str]:
        """Those that streams have moved on from, also before the checkpoint of a resume."""

    def begin_next_epoch(self) -> None:
        """The current epoch, in which training resumed, has no more batches. ``epoch`` is the next one from now on."""

    @property
    def overfits(self) -> bool:
        """Whether every epoch reads the batches of the first one again."""

    def stream_ended(self, reader: StreamReader) -> None:
        """The stream has no more batches in its partition."""


def drawn_batches(client: TransferQueueClient, task: str) -> dict[str, int]:
    """Partitions in the queue, with the number of batches that were drawn for this task."""
    partitions = client.get_stats()["partitions"]
    return {name: each["tasks"].get(task, {}).get("drawn", 0) for name, each in partitions.items()}


class ReaderDataset(StreamingDataset):
    """Holds its stream reader, because a loader that Lightning rebuilds keeps only the dataset."""

    reader: StreamReader | None = None

    def trained(self, partition_id: str, batch_index: int) -> None:
        """A batch that the training loop has asked for may not be trained: the reader reports its steps."""
        if self.reader is None or self.reader.stage != "train":
            super().trained(partition_id, batch_index)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reader": None}  # stays in the process of the loader


class StreamReader:
    """One stream of one stage. ``position``: where an earlier reader of it has trained to."""

    def __init__(self, each: StageStream, run: RunContext, position: Position | None = None) -> None:
        self.label, self.stage = each.label, each.stage
        self.stream = stream = each.stream
        self.reads_queue = stream.record is None
        """Whether batches come from the queue. If from a record, its task may live there, and stays as it is."""
        self.waited_s = 0.0
        self.waited_full_s = 0.0
        """How long of that producers waited for room: until the last look of a ``WaitHints``."""
        self.waiting_since: float | None = None
        self._saved_s = 0.0
        """Of the current wait, what ``before_batch`` took: an early checkpoint is no wait for samples."""

        # Set by the run or by a callback.
        self.device_copies: SideStream | None = None
        """Starts the copy of each delivered batch to the device."""
        self.before_batch: Callable[[], None] | None = None
        """Called before the stream waits for a batch, when the iterator has started."""
        self.after_move: Callable[[], None] | None = None
        """Called when the next iterator's partition is known, and the last iterator is closed."""

        self._run = run
        rule = replace(run.ack_rule, ack="never") if self.replay or not self.reads_queue else run.ack_rule
        self.progress = Progress(each.label, rule if each.stage == "train" else None, position)
        rows = stream.batch_size if stream.micro_batch_size is None else stream.micro_batch_size
        sizes: dict[str, Any] = {
            "batch_size": stream.batch_size, "micro_batch_size": rows, "dp_size": run.topology.dp_size
        }  # fmt: skip
        self._numbering = {**sizes, "groups": stream.groups}  # what decides how batches are numbered
        self._unfetched: UnfetchedBatch | None = None
        self._just_acked: list[str] = []
        self._began = 0
        """The batch where the current iterator began."""
        self._noted: tuple[str, int] | None = None
        self._ended_in: tuple[str | None, int] = None, -1
        """Partition and epoch of the last end of batches that are not replayed. A CombinedLoader may begin anew."""
        self._start: Callable[[], Iterator[Any]] | None = None
        """Of the current iterator. None: there is none."""
        self._items: Any = None
        self.dataset = ReaderDataset(
            config=None, data_fields=stream.fields, partition_id="", task_name=stream.task,
            dp_rank=run.topology.dp_rank, **sizes, sampling_config=stream.sampling_config,
            prefetch=stream.prefetch, layout=stream.layout, timeout_s=stream.timeout_s, where=stream.where,
            should_stop=run.watchdog.stopped.is_set, head_fields=stream.head_fields, fetch_batch_fn=stream.record,
        )  # fmt: skip
        self.dataset.reader = self

    @property
    def replay(self) -> bool:
        """Whether an iterator that returns to its partition starts at its first batch."""
        return self._run.overfits or self.stage != "train" or bool(self.stream.replay)

    def waiting_s(self) -> float:
        """Seconds that the reader has waited for its current batch; 0 when it does not wait."""
        since = self.waiting_since
        return 0.0 if since is None else time.perf_counter() - since

    def untrained_draws(self) -> int:
        """Batches of the partition that were delivered, and are not completely in optimizer steps."""
        at, trained = self.dataset.position, self.progress.position
        is_here = trained is not None and trained.partition_id == at.partition_id
        return at.batch_index - (trained.batch_index if trained is not None and is_here else self._began)

    def _statistic(self, partition: str | None, name: str) -> int:
        """A number of the queue's statistics about this stream's task in a partition. 0 for a record."""
        if not self.reads_queue:
            return 0
        tasks = self._run.client.get_stats()["partitions"].get(partition, {}).get("tasks", {})
        return int(tasks.get(self.stream.task, {}).get(name, 0))

    def acked_in(self, partition: str) -> int:
        """How many first batches of a partition were acknowledged, so that the task can't read them again."""
        return self._statistic(partition, "settled")

    def leftover_text(self) -> str | None:
        """A message about samples that filled no last batch of the partition, or None."""
        partition = self.progress.partition
        dropped = self._statistic(partition, "dropped")
        if not dropped:
            return None
        what, were = counted(dropped, "sample"), "was" if dropped == 1 else "were"
        text = (
            f"{what} of partition {partition!r} could not fill a last round of task {self.stream.task!r}, or a group "
            f"of its sampler, and {were} left over (tail policy)."
        )
        if self.progress.taken or self.stage == "train":
            return text if self.stream.sampler is not None else f"{text} With Stream(tail='pad') they are read, too."
        size, fits = self.stream.batch_size, dropped // self._run.topology.dp_size
        lower = f"lower batch_size from {size} to at most {fits} on each rank, or " if fits else ""
        remedy = "draw fewer groups at once" if size is None else f"{lower}set tail='pad'"
        return (
            f"{text} So stream {self.label!r} has no batch, and what it would log is missing. To read them, {remedy}."
        )

    # ---- iterators ----

    def iterate(self, start: Callable[[], Iterator[Any]]) -> Iterator[TQBatch | UnfetchedBatch]:
        """A new iterator; it ends the previous one. ``start`` returns the loader's items from the cursor on.

        It chooses its start at the first ``next``, when Lightning knows its epoch.
        """
        self.close_iterator()
        self._start = start
        return self._batches(start)

    def _batches(self, start: Callable[[], Iterator[Any]]) -> Iterator[TQBatch | UnfetchedBatch]:
        partition, epoch = self._ended_in
        is_again = epoch == self._run.epoch and partition == self._run.partition_of(self)
        if is_again and self.progress.resumes_in(epoch) is None:  # else it was set back on purpose
            yield UnfetchedBatch(self._refuse_to_cycle)  # not trained if the loaders beside it end now, too
            return
        while self._start is start:
            try:
                batch = self._next_batch()
            except StopIteration:
                return
            yield batch
            del batch  # otherwise it would stay alive while waiting for the next one

    def _refuse_to_cycle(self) -> TQBatch:
        raise InvalidRequestError(
            f"stream {self.label!r} has ended after {self.progress.taken} batches of partition "
            f"{self.progress.partition!r}, and CombinedLoader(mode='max_size_cycle'), Lightning's default for several "
            f"loaders, would train its last ones again. Use mode 'min_size' or 'max_size', or Stream(replay=True)."
        )

    def _current_items(self) -> Any:
        """What the loader yields."""
        if self._items is None:
            assert self._start is not None
            self.move_cursor()
            if self.after_move is not None:
                self.after_move()
            self._items = self._start()
        return self._items

    def _end_items(self) -> None:
        """Stop prefetching."""
        items, self._items = self._items, None
        if items is not None:
            items.close()

    def move_cursor(self) -> None:
        """Move the dataset's cursor to where an iterator that starts now begins."""
        epoch = self._run.epoch
        resumed_in = self.progress.resumes_in(epoch)
        name = self._run.partition_of(self) if resumed_in is None else resumed_in
        replays = self.replay and resumed_in is None
        acked = 0 if replays or self.stage != "train" else self.acked_in(name)
        first = Position(partition_id=name, batch_index=acked, epoch=epoch, **self._numbering)
        self._unfetched = None
        trained = self.progress.position
        before = self.progress.partition or (None if trained is None else trained.partition_id)
        existing = self._run.partitions_at_start if self.reads_queue else {}
        of_an_epoch = bool(set(self.stream.variables) - {"stage"})
        if not (replays or self._run.may_return(self)):
            self.progress.check_next(first, existing, self.stream.pattern(self.stage))
        start = self.progress.begin(first, replays, existing, of_an_epoch)
        self.dataset.load_state_dict(start.as_dict())
        self._began = start.batch_index
        self._ack_resumed()
        if not self.reads_queue:
            self.progress.left_partitions.clear()  # those of this name in the queue are not finished
        elif self.stream.draws_groups and self._run.topology.is_reader:
            # What a limit on batches left there would hold the slots of the groups that are needed here.
            left = [] if before in (None, name) or self._run.may_return(self) else [before]
            self._run.client.move_on(name, self.stream.task, left, self._run.topology.dp_rank)

    def _next_batch(self) -> TQBatch | UnfetchedBatch:
        """Wait for a batch. Raises the error that ended the run, or StopIteration at the end of the stream."""
        self.tell_trained()
        unfetched, self._unfetched = self._unfetched, None
        if unfetched is not None:  # training goes on
            unfetched.fetch()
        is_ahead = self.stage == "train" and self.progress.taken > self.progress.trained
        if is_ahead and self._run.ends_before_next(self):
            self._unfetched = UnfetchedBatch(self._wait_for_batch)
            return self._unfetched
        return self._wait_for_batch()

    def _wait_for_batch(self) -> TQBatch:
        self._run.watchdog.check()
        if self.stage == "train" and not self.progress.taken and self._run.training_ends(0):
            self.close_iterator()  # Lightning asks for a batch even if the checkpoint was saved at the end of training
            raise StopIteration
        started = self.waiting_since = time.perf_counter()
        self._saved_s = 0.0
        try:
            return self._delivered()
        except ProducersGoneError:
            self._run.watchdog.look()  # what ended a producer of this run says more
            raise
        except StopIteration:
            self._run.watchdog.check()  # a stopped stream also ends
            self.close_iterator()
            if self.progress.taken and not self.replay:
                self._ended_in = self.progress.partition, self.progress.epoch
            self._ended()
            raise
        finally:
            self.waiting_since = None
            self.waited_s += time.perf_counter() - started - self._saved_s

    def _delivered(self) -> TQBatch:
        data, meta, *heads = self._next_item()
        position = Position(**self.dataset.state_dict(), epoch=self.progress.epoch, **self._numbering)
        batch = TQBatch(data, meta, position, *heads)
        if self.device_copies is not None:
            batch.copy_ahead(self.device_copies)
        self.progress.deliver(position, [] if position.micro_batch else [meta])
        return batch

    def _next_item(self) -> Any:
        try:
            items = self._current_items()  # the first access starts it
            if self.progress.taken == self.stream.num_batches:
                raise StopIteration
            if self.before_batch is not None:
                began = time.perf_counter()
                self.before_batch()
                self._saved_s = time.perf_counter() - began
            return next(items)
        except StopIteration:
            if self.progress.taken or not self._has_next_epoch():
                raise
        # Resumed at the very end of an epoch. Lightning asks only once, before it counts that epoch as done.
        self._run.watchdog.check()
        self._run.begin_next_epoch()
        self._end_items()
        return next(self._current_items())

    def _has_next_epoch(self) -> bool:
        """After a resume at the end of an epoch: whether the next epoch has samples to train."""
        if not self.progress.resumed or self.stage != "train" or self._run.training_ends(1):
            return False
        return self.replay or self._run.partition_of(self, 1) != self.progress.partition

    def _ended(self) -> None:
        expected, taken = self.stream.num_batches, self.progress.taken
        if expected is not None and taken < expected and not self.progress.resumed:
            raise EndOfPartitionError(
                f"stream {self.label!r} has num_batches={expected}, but partition {self.progress.partition!r} ended "
                f"after {taken}. Lightning would silently skip the validation of this epoch. Produce enough for "
                f"{expected} micro-batches on every rank, or lower num_batches."
            )
        self._run.stream_ended(self)

    # ---- acknowledgements ----

    def note_trained(self, batch: Any, stepped: bool) -> None:
        """This micro-batch was trained. ``stepped``: an optimizer step followed it."""
        own = queue_batch(batch)
        self.progress.train(None if own is None else own.position)
        if stepped:
            self.progress.step()

    def tell_trained(self) -> None:
        """Free the slots of the groups that optimizer steps have trained, so that work on others may begin.

        Not at the step itself, after which the next policy version is announced: groups of these slots are to have it.
        """
        position = self.progress.position
        has_slots = self.stream.draws_groups and self.reads_queue
        if not has_slots or position is None or not self._run.topology.is_reader:
            return
        before, self._noted = self._noted, (position.partition_id, position.batch_index)
        if self._noted != before:
            rank = self._run.topology.dp_rank
            self._run.client.note_trained(position.partition_id, self.stream.task, position.batch_index, rank)

    def ack_due(self) -> None:
        """Acknowledge what is due. One rank of each data-parallel group does so; the first group's rank clears."""
        due = self.progress.take_due()
        if self._run.topology.is_reader:
            for partition, meta in due.items():
                acked = self._run.client.ack(meta, self.stream.task, earlier=True)
                self.progress.note_acked(partition, acked)
        self._clear_acked(due)

    def _ack_resumed(self) -> None:
        """A run that resumes needs no batch that its checkpoint holds. In a full queue, producers wait for the room."""
        left = [] if self._run.may_return(self) else self._run.left_partitions()
        held = self.progress.held_by_checkpoint(left) if self.reads_queue and self._run.topology.is_reader else {}
        for partition, before in held.items():
            acked = self._run.client.ack_before(partition, self.stream.task, before, self._run.topology.dp_rank)
            self.progress.note_acked(partition, acked)
        self._clear_acked(held)

    def finish(self, owner: Trainer | Fabric) -> None:
        """Training is over: acknowledge what is due on all ranks. This is a collective."""
        self.tell_trained()
        self.ack_due()
        if self.stream.clear_consumed:
            owner.strategy.barrier("lightning_tq_acked")
            self._clear(self._just_acked)

    def _clear_acked(self, partitions: Iterable[str]) -> None:
        """Now, and again before the next batch, because other ranks may ack after this."""
        again, self._just_acked = self._just_acked, [*partitions] if self._run.topology.dp_size > 1 else []
        self._clear([*again, *partitions])

    def _clear(self, partitions: Iterable[str]) -> None:
        tasks, topology = self.stream.clearing_tasks, self._run.topology
        if not tasks or not (topology.is_reader and topology.dp_rank == 0):
            return
        for partition in dict.fromkeys(partitions):
            self._run.client.clear_consumed(partition, tasks)

    # ---- ending ----

    def close_iterator(self) -> None:
        """Idempotent."""
        self._start = None
        self._end_items()

    def close(self) -> None:
        """End the current iterator and leave the queue."""
        self.close_iterator()
        self.dataset.close()


def stream_loader(reader: StreamReader) -> StreamLoader:
    """A loader over a stream reader. Nothing is fetched and no worker starts before it is iterated."""
    stream = reader.stream
    return StreamLoader(
        reader.dataset,
        num_workers=stream.num_workers,
        pin_memory=stream.pin_memory and torch.accelerator.is_available(),  # torch warns without an accelerator
        multiprocessing_context=stream.multiprocessing_context,
        persistent_workers=stream.persistent_workers,
        num_batches=stream.num_batches,
    )


class StreamLoader(StreamingDataLoader):
    """Each iterator asks the stream reader where to start, and reports its waits to it.

    Lightning rebuilds loaders from their arguments, for prediction and for ``overfit_batches``. The new loader shares
    the dataset and therefore the stream reader.
    """

    @property
    def reader(self) -> StreamReader:
        dataset = self.dataset
        assert isinstance(dataset, ReaderDataset)
        assert dataset.reader is not None, "a stream reader stays in the process that made it"
        return dataset.reader

    def __iter__(self) -> Iterator[TQBatch | UnfetchedBatch]:  # type: ignore[override]
        return self.reader.iterate(super().__iter__)

    def state_dict(self) -> dict[str, Any]:
        """The position after the trained batches, not after those that Lightning fetched ahead."""
        position = self.reader.progress.position
        return {} if position is None else position.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator starts at this position."""
        if state:
            self.reader.progress.restore(Position.from_dict(state, self.reader.label))
