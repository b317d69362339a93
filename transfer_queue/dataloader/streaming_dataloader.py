# SPDX-License-Identifier: Apache-2.0
"""StreamingDataLoader: a torch DataLoader over a StreamingDataset that keeps batches in order and knows its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pin

from transfer_queue.dataloader.streaming_dataset import Bundle, StreamingDataset


def identity(batch: Any) -> Any:
    """The collate function: batches come whole. At module level, so that spawned workers can import it."""
    return batch


class _PerItem:
    """The user's collate function, for the items of a bundle."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, bundle: Bundle) -> Bundle:
        return Bundle(bundle.batch_index, [self.function(item) for item in bundle.items])


class StreamingDataLoader(DataLoader[Any]):
    """Yields micro-batches in the order of their batches, with any number of workers.

    All state is the dataset's, so a loader that is made again over the same dataset goes on where this one was.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        *,
        num_batches: int | None = None,
        sampler: None = None,
        batch_sampler: None = None,
    ) -> None:
        """Args:
            num_batches: Items of one pass, where that is known: gives the loader a length and ends it there.
            sampler, batch_sampler: Only for frameworks that make the loader again from its arguments; always None.
        """
        # Every argument is also an attribute: Lightning makes loaders again from what it finds there.
        dataset.bundle_in_workers = True
        self.num_batches = num_batches
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn if isinstance(collate_fn, _PerItem) else _PerItem(collate_fn or identity),
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    @property
    def stream(self) -> StreamingDataset:
        """The dataset, as what it is."""
        dataset = self.dataset
        assert isinstance(dataset, StreamingDataset)
        return dataset

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("this stream has no known length; give num_batches if you know it.")
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream = self.stream
        start = stream.cursor.read()
        iteration = stream.cursor.begin_iteration()
        # With workers they are started here, not at the first next(): prefetching begins with the iterator.
        bundles = super().__iter__() if self.num_workers else self._collated(stream.bundles(start, iteration))
        return self._items(bundles, start, iteration)

    def _items(self, bundles: Iterator[Any], start: Any, iteration: int) -> Iterator[Any]:
        left = -1 if self.num_batches is None else self.num_batches
        try:
            if not left:
                return
            for bundle in bundles:
                for item in self.stream.take(bundle, start):
                    left -= 1
                    yield item
                    if not left:
                        return
        finally:
            self.stream.cursor.give_up(iteration)
            close = getattr(bundles, "close", None)
            if close is not None:
                close()

    def _collated(self, bundles: Iterator[Any]) -> Iterator[Any]:
        for bundle in bundles:
            collated = self.collate_fn(bundle)
            yield pin(collated, self.pin_memory_device or None) if self.pin_memory else collated

    # ---- the dataset of this process ----

    def reset(self) -> None:
        """The next iterator starts again at batch 0."""
        self.stream.reset()

    def step(self, partition_id: str) -> None:
        """The next iterator starts at the first batch of this partition."""
        self.stream.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Batches fetched ahead in this process."""
        return self.stream.buffer

    def state_dict(self) -> dict[str, Any]:
        """What was taken from this loader, not what workers fetched ahead."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator goes on behind what had been taken."""
        self.stream.load_state_dict(state)
