# SPDX-License-Identifier: Apache-2.0
"""StreamLoader: the DataLoader that a TQDataModule gives to the Trainer; it yields TQBatch pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_tq.batch import TQBatch
from lightning_tq.positions import Position
from lightning_tq.stream_reader import ReaderDataset, StreamReader
from transfer_queue import StreamingDataLoader


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

    def __iter__(self) -> Iterator[TQBatch]:  # type: ignore[override]
        return self.reader.iterate(super().__iter__)

    def state_dict(self) -> dict[str, Any]:
        """The position after the trained batches, not after those that Lightning fetched ahead."""
        return {} if self.reader.position is None else self.reader.position.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator starts at this position."""
        if state:
            self.reader.restore(Position.from_dict(state, self.reader.label))
