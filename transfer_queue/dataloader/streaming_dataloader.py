# SPDX-License-Identifier: Apache-2.0
"""StreamingDataLoader: a torch DataLoader over a StreamingDataset, with batches in order and a position."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as pin

from transfer_queue.dataloader.bundle import Bundle, Packed
from transfer_queue.dataloader.cursor import Cursor
from transfer_queue.dataloader.segments import unmap_owners
from transfer_queue.dataloader.streaming_dataset import Origin, StreamingDataset
from transfer_queue.storage import pack, unpack

_LOOK_EVERY_S = 0.25


class _PerItem:
    """Applies the user's collate function to the items of a bundle, and packs the bundle in a worker."""

    def __init__(self, function: Callable[[Any], Any] | None) -> None:
        self.function = function

    def __call__(self, bundle: Bundle) -> Bundle | Packed:
        items = bundle.items if self.function is None else [self.function(item) for item in bundle.items]
        collated = replace(bundle, items=items)
        return collated if get_worker_info() is None else collated.packed()


class StreamingDataLoader(DataLoader[Any]):
    """Yields micro-batches in the order of their batches, with any number of workers.

    The dataset holds all state: an iterator continues where the previous one stopped, even with a new loader over the
    same dataset. ``reset`` and ``step`` start elsewhere.

    Examples:
        >>> meta = client.put({"x": torch.arange(8)}, partition_id="train")
        >>> client.seal_partition("train")
        >>> dataset = tq.StreamingDataset(None, 4, 4, ["x"], "train", "update_actor", dp_rank=0)
        >>> for data, meta in tq.StreamingDataLoader(dataset, num_workers=2):
        ...     print(data["x"])
        tensor([0, 1, 2, 3])
        tensor([4, 5, 6, 7])
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
        num_batches: Items of one pass, if known: gives the loader a length and ends the pass there.
        sampler, batch_sampler: Only for frameworks that rebuild the loader from its arguments; always None.
        """
        # Every argument is also an attribute, because Lightning rebuilds loaders from attributes.
        self.num_batches = num_batches
        self.stream = dataset
        """The dataset, with its type."""
        self._cursor: Cursor | None = None
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn if isinstance(collate_fn, _PerItem) else _PerItem(collate_fn),
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("this stream has no known length. Set its num_batches if you know it.")
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        origin = self.stream.origin()
        if self.num_workers:
            return self._from_workers(origin)
        return self._items(self._collated(self.stream.bundles(origin.start)), origin)

    def _from_workers(self, origin: Origin) -> Iterator[Any]:
        # Persistent workers only know the cursor they were started with.
        # Other workers get a new cursor each time, so that two iterators of one loader are independent.
        kept = self._cursor if self.persistent_workers else None
        cursor = self._cursor = kept or Cursor()
        iteration = cursor.open(origin.start)
        _import_what_workers_will()
        self.stream.worker_cursor = cursor
        try:
            # Workers are started here, not at the first next(), so prefetching begins with the iterator.
            bundles: Any = super().__iter__()
        finally:
            self.stream.worker_cursor = None
        if kept is None:
            weakref.finalize(bundles, unmap_owners, [worker.pid for worker in bundles._workers])  # they end with it
        turn = WorkerTurn(bundles, cursor, iteration, self.persistent_workers, self.stream.should_stop)
        items = self._items(iter(turn), origin, turn)
        weakref.finalize(items, turn.end)  # a generator dropped before its first next() skips "finally"
        return items

    def _items(
        self, bundles: Iterator[Any], origin: Origin, turn: WorkerTurn | None = None
    ) -> Generator[Any, None, None]:
        failed = True
        try:
            with suppress(GeneratorExit):  # its reader has gone
                yield from itertools.islice(self._taken(bundles, origin), self.num_batches)
            failed = False
        finally:
            bundles.close()
            if turn is not None:
                turn.end(failed)
                if failed:  # persistent workers were ended, so the next iterator needs new ones
                    self._iterator = self._cursor = None

    def _taken(self, bundles: Iterator[Any], origin: Origin) -> Iterator[Any]:
        for batch_index, bundle in enumerate(bundles, origin.start.batch_index):
            # One worker saw the end of stream, but another one found data that came later; the next iterator yields
            # that.
            if bundle.batch_index != batch_index:
                return
            yield from self.stream.take(bundle, origin)

    def _collated(self, bundles: Iterator[Any]) -> Iterator[Any]:
        pinned = self.pin_memory and torch.accelerator.is_available()  # as torch does for workers
        for bundle in bundles:
            collated = self.collate_fn(bundle)
            yield pin(collated, self.pin_memory_device or None) if pinned else collated

    # ---- the dataset of this process ----

    def reset(self) -> None:
        """Start the next iterator at batch 0."""
        self.stream.reset()

    def step(self, partition_id: str) -> None:
        """Start the next iterator at the first batch of this partition."""
        self.stream.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Always empty; see ``StreamingDataset.buffer``."""
        return self.stream.buffer

    def state_dict(self) -> dict[str, Any]:
        """The position after the items taken from this loader, without prefetched ones."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after this position with the next iterator."""
        self.stream.load_state_dict(state)


@dataclass(eq=False, repr=False)
class WorkerTurn:
    """Iterates over the bundles that torch's iterator receives from the workers, until the turn ends."""

    bundles: Any
    cursor: Cursor
    iteration: int
    keep: bool
    """The workers also serve the next iteration."""
    should_stop: Callable[[], bool] | None
    """It can only be called in this process."""

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if self.should_stop is not None:
            self._watcher = threading.Thread(target=self._watch, name="transfer-queue-should-stop", daemon=True)
            self._watcher.start()

    def __iter__(self) -> Iterator[Any]:
        # Kept workers serve one iterator at a time: an older one must not take the newer one's items.
        while not self.cursor.is_over(self.iteration):
            try:
                yield next(self.bundles)
            except StopIteration:
                return

    def _watch(self) -> None:
        assert self.should_stop is not None
        while not self._ended.wait(_LOOK_EVERY_S):
            if self.should_stop():
                self.cursor.cancel(self.iteration)
                return

    def end(self, failed: bool = False) -> None:
        """End the workers' waits, and the workers too unless they are kept and nothing failed. Idempotent."""
        self._ended.set()
        self.cursor.cancel(self.iteration)
        if self._watcher is not None:
            self._watcher.join()
        if failed or not self.keep:
            # The garbage collector is not enough: after an error, the traceback keeps torch's iterator alive.
            self.bundles._shutdown_workers()


@functools.cache
def _import_what_workers_will() -> None:
    """Read one jagged row, because torch and this package import some modules only then.

    A fork while another thread imports a module leaves that module locked in the child, which then waits forever.
    """
    pieces = pack.pack(TensorDict({"x": torch.zeros(1, 1)}, batch_size=[1]), allow_pickle=False)
    unpack.unpack({"x": [(slice(0, 1), pieces["x"])]}, 1, "jagged", allow_pickle=False)
