# SPDX-License-Identifier: Apache-2.0
"""StreamLoader: the DataLoader that a TQDataModule gives to the Trainer, its dataset, and its iterator of TQBatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_tq.batch import Position, TQBatch, UnfetchedBatch
from transfer_queue import StreamingDataLoader, StreamingDataset

if TYPE_CHECKING:
    from lightning_tq.stream_reader import StreamReader


class ReaderDataset(StreamingDataset):
    """Holds its stream reader, because a loader that Lightning rebuilds keeps only the dataset."""

    reader: StreamReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reader": None}  # stays in the process of the loader


def stream_loader(reader: StreamReader) -> StreamLoader:
    """A loader over a stream reader. Nothing is fetched and no worker starts before it is iterated."""
    stream = reader.stream
    return StreamLoader(
        reader.dataset,
        num_workers=stream.num_workers,
        pin_memory=stream.pin_memory and torch.accelerator.is_available(),  # torch warns without an accelerator
        multiprocessing_context=stream.multiprocessing_context,
        persistent_workers=stream.persistent_workers,
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

    def __len__(self) -> int:
        if self.reader.stream.num_batches is None:
            raise TypeError("this stream has no known length. Set Stream(num_batches=...) if you know it.")
        return self.reader.stream.num_batches

    def __iter__(self) -> Iterator[TQBatch | UnfetchedBatch]:  # type: ignore[override]
        return self.reader.iterate(super().__iter__)

    def state_dict(self) -> dict[str, Any]:
        """The position after the trained batches, not after those that Lightning fetched ahead."""
        return {} if self.reader.position is None else self.reader.position.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator starts at this position."""
        if state:
            self.reader.restore(Position.from_dict(state, self.reader.label))


class StreamIterator(Iterator[TQBatch | UnfetchedBatch]):
    """The current iterator of a loader. It chooses its start at the first ``next``, when Lightning knows its epoch."""

    def __init__(self, reader: StreamReader, start: Callable[[], Iterator[Any]]) -> None:
        self._reader = reader
        self._start: Callable[[], Iterator[Any]] | None = start
        self._items: Iterator[Any] | None = None

    def __next__(self) -> TQBatch | UnfetchedBatch:
        if self._start is None:
            raise StopIteration
        return self._reader.next_batch(self)

    @property
    def items(self) -> Iterator[Any]:
        """What the loader yields."""
        if self._items is None:
            self.restart()
        assert self._items is not None
        return self._items

    def restart(self) -> None:
        """Start, or start again in the next epoch."""
        assert self._start is not None
        _close(self._items)
        self._reader.move_cursor()
        self._items = self._start()

    def close(self) -> None:
        """Stop prefetching. Idempotent."""
        self._start = None
        items, self._items = self._items, None
        _close(items)


def _close(items: Iterator[Any] | None) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
