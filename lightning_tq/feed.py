# SPDX-License-Identifier: Apache-2.0
"""Feed: a stream at work in this process; where it stands, which partition comes next, how long it made us wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

from lightning_tq.batch import TQBatch
from lightning_tq.stream import Stream
from lightning_tq.topology import Topology
from transfer_queue import EndOfPartitionError, StreamingDataset
from transfer_queue.errors import InvalidRequestError

Place = dict[str, Any]
"""A position in a stream, as ``StreamingDataset.state_dict`` says it."""


class Host(Protocol):
    """What a feed needs to know of the run it is part of."""

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
    """One stream of one stage. ``places`` outlives feeds: it holds, per label, what was trained."""

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
        """Batches handed out by the live iterator."""
        self.trained = 0
        """How many of those were trained (train only)."""
        self.batches_done = 0
        """Whole batches of the partition that were trained, all micro-batches of them."""
        self.resumed = False
        """Did the live iterator start from a checkpoint's position? Then less than an epoch is left for it."""
        self._restored = False
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

    def waited_for(self) -> float:
        """Seconds that the reader has been waiting for the batch it asked for; 0 when it isn't."""
        since = self.waiting_since
        return 0.0 if since is None else time.perf_counter() - since

    @property
    def place(self) -> Place | None:
        """Behind what was trained."""
        return self._places.get(self.label)

    # ---- iterators ----

    def read(self, iterate: Callable[[], Iterator[Any]]) -> Reading:
        """The live iterator; ends the one before it. ``iterate`` gives the loader's items from the cursor on."""
        self.close_reading()
        self._reading = Reading(self, iterate)
        return self._reading

    def begin(self, epochs_ahead: int = 0) -> None:
        """Move the cursor to where an iterator that starts now begins."""
        name = self._host.partition_of(self.stage, self.stream, epochs_ahead)
        if self.partition not in (None, name):
            self.left.append(str(self.partition))
        self.partition = name
        self.taken = self.trained = 0
        self.resumed = self._restored
        place = self.place
        if self.replay or place is None or place["partition_id"] != name:
            self.batches_done = 0
            self.dataset.step(name)
        else:
            self.batches_done = place["batch_index"] if self.resumed else self.batches_done
            self.dataset.load_state_dict(place)

    def next_item(self, reading: Reading) -> TQBatch:
        """Wait for a batch. Raises what ended the run meanwhile; StopIteration at the end of the stream."""
        self._host.check()
        started = self.waiting_since = time.perf_counter()
        try:
            data, meta = self._next(reading)
        except StopIteration:
            self._host.check()  # a stopped stream ends, too
            reading.close()
            self._ended(reading)
            raise
        finally:
            self.waiting_since = None
            self.waited_s += time.perf_counter() - started
        self.taken += 1
        return TQBatch(data, meta, self.dataset.state_dict())

    def _next(self, reading: Reading) -> Any:
        try:
            return next(reading.items)
        except StopIteration:
            if self.taken or not (self.resumed and self.stage == "train" and "epoch" in self.stream.variables):
                raise
        # Resumed at the very end of an epoch: Lightning asks before it counts that epoch as done, and asks only once.
        self._host.check()
        reading.restart(epochs_ahead=1)
        return next(reading.items)

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

    def mark_trained(self, batch: Any) -> None:
        """The Trainer is done with this batch. Something else than a TQBatch (a hook replaced it) can't be placed."""
        self.trained += 1
        self._restored = False
        if isinstance(batch, TQBatch) and batch.place is not None:
            self._places[self.label] = batch.place
            self.batches_done += batch.place["micro_batch"] == 0

    def restore(self, place: Place) -> None:
        """The next iterator goes on there, if it reads that partition."""
        if set(place) != {"partition_id", "batch_index", "micro_batch"}:
            raise InvalidRequestError(f"can't resume stream {self.label!r} from {place!r}: not a position in a stream.")
        self._places[self.label] = dict(place)
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
