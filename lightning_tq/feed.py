# SPDX-License-Identifier: Apache-2.0
"""Feed: a stream at work in this process; where it stands, which partition comes next, how long it made us wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any, NamedTuple, Protocol

from lightning_tq.batch import TQBatch
from lightning_tq.place import Place, check_is_held, check_is_place, check_is_there, check_sizes
from lightning_tq.stream import Stream
from lightning_tq.topology import Topology
from transfer_queue import BatchMeta, EndOfPartitionError, StreamingDataset


class Handed(NamedTuple):
    """What was handed out and isn't trained yet."""

    place: Place
    """Where the stream goes on behind it."""
    whole: list[BatchMeta]
    """The last micro-batch of each batch that ends with it, or before it with one that was screened out."""


class Host(Protocol):
    """What a feed needs to know of the run it is part of."""

    @property
    def epoch(self) -> int:
        """Number of the epoch that goes on."""

    def partition_of(self, stage: str, stream: Stream, epochs_ahead: int = 0) -> str:
        """Name of the partition that an iterator starting now (or so many epochs later) reads."""

    def replays(self, stage: str) -> bool:
        """Whether this run reads the same batches again and again."""

    def check(self) -> None:
        """Raises what has ended the run meanwhile."""

    def stream_ended(self, feed: Feed, reading: Reading) -> None:
        """The stream has no more batches (an honest end, as promised or not promised)."""


class FeedDataset(StreamingDataset):
    """The dataset of a feed. Lightning makes loaders again from their arguments, so what lasts hangs on the dataset."""

    feed: Feed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "feed": None}  # stays in the process of the loader


class Feed:
    """One stream of one stage. ``places`` outlives feeds: per label, the place behind the last optimizer step."""

    def __init__(
        self,
        label: str,
        stage: str,
        stream: Stream,
        topology: Topology,
        places: MutableMapping[str, Place],
        host: Host,
        should_stop: Callable[[], bool],
        config: Any,
    ) -> None:
        self.label = label
        self.stage = stage
        self.stream = stream
        self.partition: str | None = None
        """Partition of the newest iterator."""
        self.left: list[str] = []
        """Partitions that this feed has moved away from, not reported yet."""
        self.waited_s = 0.0
        self.waiting_since: float | None = None
        self.taken = 0
        """Batches handed out by the live iterator, and before it in a pass over a FabricLoader that was resumed."""
        self.trained = 0
        """How many of those were trained (train only)."""
        self.batches_done = 0
        """Whole batches of the partition that were trained, all micro-batches of them, and aren't settled yet."""
        self.unstepped = 0
        """Micro-batches that were trained since the last optimizer step."""
        self.screen: Callable[[TQBatch], TQBatch | None] | None = None
        """Looks at each batch before it is handed out: what remains of it, or None to go on to the next one."""
        self.resumed = False
        """Did the live iterator start from a checkpoint's position? Then less than an epoch is left for it."""
        self.settled: Callable[[str], int] | None = None
        """How many first batches of a partition nobody will ask for again."""
        self.held: Collection[str] = ()
        """Partitions that the queue held when the run began, before any producer of it; nothing on other ranks."""
        self.is_over: Callable[[int], bool] | None = None
        """Will this reader train nothing in this epoch, or so many later?"""
        self.on_begin: Callable[[str], None] | None = None
        """Told of the partition that an iterator begins to read."""
        self.on_whole: Callable[[BatchMeta], None] | None = None
        """Told of each batch all of whose micro-batches were trained."""
        self._restored = False
        self._taken_before = 0
        self._handed: deque[Handed] = deque()
        self._trained_to: Place | None = None
        self._begun: Place = {}
        self._sizes = {
            "batch_size": stream.batch_size,
            "micro_batch_size": stream.micro_size,
            "dp_size": topology.dp_size,
        }
        self._places = places
        self._host = host
        self._reading: Reading | None = None
        self.dataset = FeedDataset(
            config=config,
            batch_size=stream.batch_size,
            micro_batch_size=stream.micro_size,
            data_fields=stream.fields,
            partition_id="",
            task_name=stream.task,
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
            sampling_config=stream.sampling_config,
            prefetch_batches=stream.prefetch_batches,
            layout=stream.layout,
            timeout_s=stream.timeout_s,
            should_stop=should_stop,
        )
        self.dataset.feed = self

    @property
    def replay(self) -> bool:
        """Does an iterator that comes back to its partition start at batch 0?"""
        asked = self.stream.replay
        return self._host.replays(self.stage) or (self.stage != "train" if asked is None else asked)

    @property
    def epoch(self) -> int:
        """Epoch of the live iterator. The Trainer's own number may still be that of the one before."""
        return int(self._begun["epoch"])

    def waited_for(self) -> float:
        """Seconds that the reader has been waiting for the batch it asked for; 0 when it isn't."""
        since = self.waiting_since
        return 0.0 if since is None else time.perf_counter() - since

    @property
    def place(self) -> Place | None:
        """Behind what is in an optimizer step."""
        return self._places.get(self.label)

    # ---- iterators ----

    def read(self, iterate: Callable[[], Iterator[Any]]) -> Reading:
        """The live iterator; ends the one before it. ``iterate`` gives the loader's items from the cursor on."""
        self.close_reading()
        self._reading = Reading(self, iterate)
        return self._reading

    def begin(self, epochs_ahead: int = 0) -> None:
        """Move the cursor to where an iterator that starts now begins."""
        name, place = self._host.partition_of(self.stage, self.stream, epochs_ahead), self.place
        goes_on = not epochs_ahead and self._is_unfinished(place)
        if goes_on:
            assert place is not None
            name = place["partition_id"]  # the template may say another name by now: of a later step, or version
        replay = self.replay and not goes_on
        if self.partition not in (None, name):
            self.left.append(str(self.partition))
        self.partition = name
        if self.on_begin is not None:
            self.on_begin(name)
        self.taken = self._taken_before if goes_on else 0
        self.trained = self.unstepped = self.batches_done = 0
        self._handed.clear()
        self._trained_to = None
        self.resumed = self._restored
        settled = 0 if replay or self.settled is None else self.settled(name)
        if replay or place is None or place["partition_id"] != name:
            place = {"partition_id": name, "batch_index": settled, "micro_batch": 0}
        else:
            if self._restored:
                check_sizes(place, self._sizes, self.label)
                check_is_held(place, self.held)
            check_is_there(place, settled)
            self.batches_done = place["batch_index"] - settled
        self._begun = {"epoch": self._host.epoch + epochs_ahead, **self._sizes}
        self.dataset.load_state_dict(place)

    def _is_unfinished(self, place: Place | None) -> bool:
        """Does a checkpoint say that the epoch which goes on began in the place's partition?"""
        return self._restored and place is not None and place.get("epoch") == self._host.epoch

    def next_item(self, reading: Reading) -> TQBatch:
        """Wait for a batch. Raises what ended the run meanwhile; StopIteration at the end of the stream."""
        self._host.check()
        if not self.taken and self._is_over():
            reading.close()  # resumed from where training had ended: Lightning asks for a batch all the same
            raise StopIteration
        started = self.waiting_since = time.perf_counter()
        try:
            batch = self._next(reading)
        except StopIteration:
            self._host.check()  # a stopped stream ends, too
            reading.close()
            self._ended(reading)
            raise
        finally:
            self.waiting_since = None
            self.waited_s += time.perf_counter() - started
        self.taken += 1
        return batch

    def _is_over(self, epochs_ahead: int = 0) -> bool:
        return self.is_over is not None and self.is_over(epochs_ahead)

    def _next(self, reading: Reading) -> TQBatch:
        whole: list[BatchMeta] = []
        while True:
            data, meta = self._next_pair(reading)
            place = {**self.dataset.state_dict(), **self._begun}
            if place["micro_batch"] == 0:
                whole.append(meta)
            batch = TQBatch(data, meta, place)
            left = batch if self.screen is None else self.screen(batch)
            if left is not None:
                if self.stage == "train":  # the others aren't told what became of a batch
                    self._handed.append(Handed(place, whole))
                return left

    def _next_pair(self, reading: Reading) -> Any:
        try:
            items = reading.items  # begins, at the first one
            if self.taken == self.stream.num_batches:  # here, not in the loader: what is screened out doesn't count
                raise StopIteration
            return next(items)
        except StopIteration:
            if self.taken or not self._has_another_epoch():
                raise
        # Resumed at the very end of an epoch: Lightning asks before it counts that epoch as done, and asks only once.
        self._host.check()
        reading.restart(epochs_ahead=1)
        return next(reading.items)

    def _has_another_epoch(self) -> bool:
        """Resumed at its end, are there samples to train in the epoch that follows?"""
        if not self.resumed or self.stage != "train" or self._is_over(1):
            return False
        return self.replay or self._host.partition_of(self.stage, self.stream, 1) != self.partition

    def _ended(self, reading: Reading) -> None:
        promised = self.stream.num_batches
        if promised is not None and self.taken < promised and not self.resumed:
            raise EndOfPartitionError(
                f"stream {self.label!r} was promised num_batches={promised}, but partition {self.partition!r} ended "
                f"after {self.taken}. Lightning would skip the validation of this epoch without a word. Produce "
                f"enough for {promised} micro-batches of {self.stream.micro_size} rows on every rank, or lower "
                f"num_batches."
            )
        self._host.stream_ended(self, reading)

    # ---- what was trained ----

    def mark_trained(self, batch: Any, stepped: bool = True) -> None:
        """The Trainer is done with this batch, or with the oldest one it has, where a hook made something else of it.

        Args:
            stepped: Its gradient is in an optimizer step. False: it will be, with that of the batches that follow.
        """
        self.trained += 1
        self._restored = False
        handed = self._take_handed(batch)
        if handed is not None:
            self._trained_to = handed.place
            self.unstepped += 1
            for meta in handed.whole:
                self.batches_done += 1
                if self.on_whole is not None:
                    self.on_whole(meta)
        if stepped:
            self.mark_stepped()

    def _take_handed(self, batch: Any) -> Handed | None:
        place = batch.place if isinstance(batch, TQBatch) else None
        while self._handed:
            handed = self._handed.popleft()
            if place is None or handed.place is place:
                return handed
        return None

    def mark_stepped(self) -> None:
        """What was trained so far is in an optimizer step, or never will be."""
        if self._trained_to is not None:
            self._places[self.label], self._trained_to = self._trained_to, None
        self.unstepped = 0

    def restore(self, place: Place, taken: int = 0) -> None:
        """The next iterator goes on there, if it reads that partition.

        Args:
            taken: Batches of that epoch so far, where nobody else counts them: a Trainer does.
        """
        check_is_place(place, self.label)
        self._trained_to = None
        self._places[self.label] = dict(place)
        self.taken = self._taken_before = taken
        self._restored = True

    # ---- ending ----

    def close_reading(self) -> None:
        """End the live iterator."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    def close(self) -> None:
        """End the live iterator and leave the queue."""
        self.close_reading()
        self.dataset.close()


class Reading(Iterator[TQBatch]):
    """A live iterator of a loader. Where it starts is decided at the first ``next``, when Lightning knows its epoch."""

    def __init__(self, feed: Feed, iterate: Callable[[], Iterator[Any]]) -> None:
        self._feed = feed
        self._iterate: Callable[[], Iterator[Any]] | None = iterate
        self._items: Iterator[Any] | None = None

    def __next__(self) -> TQBatch:
        if self._iterate is None:
            raise StopIteration
        return self._feed.next_item(self)

    @property
    def items(self) -> Iterator[Any]:
        """What the loader yields."""
        if self._items is None:
            self.restart()
        assert self._items is not None
        return self._items

    def restart(self, epochs_ahead: int = 0) -> None:
        """Begin, or begin again in the partition of a later epoch."""
        assert self._iterate is not None
        _close(self._items)
        self._feed.begin(epochs_ahead)
        self._items = self._iterate()

    def close(self) -> None:
        """Stop what fetches ahead. Idempotent."""
        self._iterate = None
        items, self._items = self._items, None
        _close(items)


def _close(items: Iterator[Any] | None) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
