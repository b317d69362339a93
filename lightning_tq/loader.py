# SPDX-License-Identifier: Apache-2.0
"""StreamLoader: the DataLoader that a TQDataModule hands to the Trainer; yields TQBatch pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_tq.batch import TQBatch
from lightning_tq.feed import Feed, FeedDataset
from transfer_queue import StreamingDataLoader


def stream_loader(feed: Feed) -> StreamLoader:
    """A loader over a feed. Cheap: nothing is fetched and no worker started before it is iterated."""
    stream = feed.stream
    return StreamLoader(
        feed.dataset,
        num_workers=stream.num_workers,
        pin_memory=stream.pin_memory and torch.accelerator.is_available(),  # torch would warn where there is none
        multiprocessing_context=stream.multiprocessing_context,
        persistent_workers=stream.persistent_workers,
    )


class StreamLoader(StreamingDataLoader):
    """Each iterator asks its feed where to start and is measured by it.

    Lightning makes loaders again from their arguments, for prediction and for ``overfit_batches``; the new one shares
    the dataset, and with it the feed.
    """

    @property
    def feed(self) -> Feed:
        """The feed behind the dataset."""
        dataset = self.dataset
        assert isinstance(dataset, FeedDataset)
        assert dataset.feed is not None, "a feed stays in the process that made it"
        return dataset.feed

    def __len__(self) -> int:
        if self.feed.stream.num_batches is None:
            raise TypeError("this stream has no known length; give Stream(num_batches=...) if you know it.")
        return self.feed.stream.num_batches

    def __iter__(self) -> Iterator[TQBatch]:  # type: ignore[override]
        return self.feed.read(super().__iter__)

    def state_dict(self) -> dict[str, Any]:
        """What was trained, not what Lightning fetched ahead."""
        return dict(self.feed.place or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator goes on behind what was trained."""
        if state:
            self.feed.restore(dict(state))
