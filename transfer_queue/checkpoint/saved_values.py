# SPDX-License-Identifier: Apache-2.0
"""The values of a checkpoint: saved from the storage to files, and loaded from files into a storage."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain, zip_longest
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.checkpoint.field_files import INT64, MOST_ROWS, READ_NBYTES, BlockReader, FieldWriter
from transfer_queue.checkpoint.files import (
    VALUES,
    DataFile,
    PartitionFiles,
    SavedFile,
    ValueFiles,
    plain,
    write_array,
    write_bytes,
)
from transfer_queue.checkpoint.saved_state import SavedSamples, SavedState
from transfer_queue.control.rows import positions_in
from transfer_queue.control.saved import FORMAT, SavedQueue, decoded
from transfer_queue.errors import CheckpointError, StorageFullError
from transfer_queue.protocol import by_row, runs_of, unpack_indexes
from transfer_queue.storage.base import Places, StorageManager
from transfer_queue.storage.wire import IntArray, PlacedColumns, Positions, WireColumn
from transfer_queue.transport.blocking import off_loop

_FIRST_ROWS = 64
_SHARE_OF_UNIT = 4
"""A loaded chunk takes at most this fraction (a quarter) of a unit's memory."""


# ---- saving ----


async def save_values(storage: StorageManager, state: SavedState, root: Path) -> None:
    """Save the stored values of the saved samples. They must not be cleared or replaced meanwhile."""
    await off_loop(root.mkdir)
    partitions: list[PartitionFiles] = []
    samples = state.samples()
    while (own := await off_loop(next, samples, None)) is not None:
        name = f"{len(partitions):04}-{_plain(own.partition)}"
        partitions.append(await _save_partition(storage, own, root, name))
    manifest = msgspec.json.format(msgspec.json.encode(ValueFiles(FORMAT, partitions)), indent=1)
    await off_loop(write_bytes, root / VALUES, manifest)


def _plain(name: str) -> str:
    """Make a recognisable part of a file name; it is never converted back."""
    return re.sub(r"[^A-Za-z0-9@=+_-]", "_", name)[:80]


async def _save_partition(storage: StorageManager, saved: SavedSamples, root: Path, name: str) -> PartitionFiles:
    directory = root / name
    await off_loop(directory.mkdir)
    writers = {
        field: FieldWriter(directory, field, f"{number:02}-{_plain(field)}", field in saved.ragged)
        for number, field in enumerate(saved.rows)
    }
    try:
        await _copy(storage, saved, writers)
        files = [await off_loop(writer.close, saved.samples) for writer in writers.values()]
        own = await off_loop(write_array, directory / "samples.npy", saved.samples.astype(INT64, copy=False))
    finally:
        for writer in writers.values():
            writer.discard()
    return PartitionFiles(saved.partition, name, own, files)


async def _copy(storage: StorageManager, saved: SavedSamples, writers: dict[str, FieldWriter]) -> None:
    samples, rows = saved.samples, saved.rows
    has = np.zeros((len(rows), len(samples)), np.bool_)
    for number, own in enumerate(rows.values()):
        has[number, own] = True
    names, start, step = list(rows), 0, _FIRST_ROWS
    while start < len(samples) and names:
        stop = min(len(samples), start + step)
        lying = {name: units[start:stop] for name, units in saved.places.items()}
        async with _read(storage, samples[start:stop], names, has[:, start:stop], lying) as placed:
            nbytes = sum(column.nbytes for each in placed.values() for _, column in each)
            for field, each in placed.items():
                await off_loop(writers[field].add, samples[start:stop], each)
        # As many rows as take about READ_NBYTES.
        step = int(min(MOST_ROWS, max(1, (stop - start) * READ_NBYTES / max(nbytes, 1)), 4 * step))
        start = stop


@asynccontextmanager
async def _read(
    storage: StorageManager,
    samples: IntArray,
    names: list[str],
    has: NDArray[np.bool_],
    places: dict[str, NDArray[np.int32]],
) -> AsyncIterator[dict[str, PlacedColumns]]:
    """Read all fields of a sample in one request, so that its row is consistent despite concurrent writes."""
    found: dict[str, list[tuple[Positions, WireColumn]]] = {}
    async with AsyncExitStack() as stack:
        for pattern, where in _patterns(has):
            fields = [names[number] for number in pattern]
            units = {name: runs_of(places[name][where]) for name in fields if name in places}
            stored = await stack.enter_async_context(storage.stored(samples[where].tolist(), fields, Places(units)))
            for field, placed in stored.items():
                found.setdefault(field, []).extend((where[at], column) for at, column in placed)
        yield dict(found)


def _patterns(has: NDArray[np.bool_]) -> Iterator[tuple[list[int], IntArray]]:
    """Yield (fields, samples with exactly these fields), except for samples without fields."""
    if has.all():
        yield list(range(len(has))), np.arange(has.shape[1])
        return
    patterns, which = np.unique(has, axis=1, return_inverse=True)
    for number in range(patterns.shape[1]):
        fields = patterns[:, number].nonzero()[0].tolist()
        if fields:
            yield fields, (which.reshape(-1) == number).nonzero()[0]


# ---- loading ----


class SavedValues:
    """The values of a checkpoint, checked against the saved samples."""

    def __init__(self, root: Path, expected: DataFile, state: SavedState) -> None:
        """Open and check the files.

        Raises:
            CheckpointError: files are missing, changed, or of a newer version, or hold other samples.
        """
        manifest = decoded(SavedFile(root, expected).whole(), ValueFiles, str(root / VALUES), msgspec.json.decode)
        self.blocks: dict[tuple[str, str], list[BlockReader]] = {}
        """By partition and field."""
        for partition, saved in zip_longest(manifest.partitions, state.samples()):
            if partition is None or saved is None or partition.name != saved.partition:
                raise CheckpointError(f"{root / VALUES} is about other partitions than the saved state of the queue.")
            for field, own in _blocks(root / plain(partition.directory), partition, saved).items():
                self.blocks[partition.name, field] = own

    def verify(self) -> None:
        """Read everything. Raises CheckpointError for the first file that differs from what was written."""
        for block in chain.from_iterable(self.blocks.values()):
            for _ in block.chunks():
                pass

    async def put(self, storage: StorageManager, shift: int) -> NewPlaces:
        """Store everything, with ``shift`` added to every sample's index. Returns where the values lie."""
        stored, capacities = NewPlaces(), await _capacities(storage)

        async def place(field: str, samples: IntArray, column: WireColumn) -> None:
            """In halves where no unit has room for all of it: smaller puts may have filled them."""
            is_cut = len(capacities) > 1 and len(samples) > 1
            try:
                indexes = (samples + shift).tolist()
                units = await storage.store(indexes, {field: column}, wait=not is_cut)
            except StorageFullError:
                if not is_cut:
                    raise
                half = len(samples) // 2
                await place(field, samples[:half], column.slice(0, half))
                await place(field, samples[half:], column.slice(half, len(samples)))
            else:
                if units is not None:
                    stored.add(field, samples, by_row(units))

        most_nbytes = min([READ_NBYTES, *(max(1, most // _SHARE_OF_UNIT) for most in capacities if most is not None)])
        for field, block in [(field, block) for (_, field), own in self.blocks.items() for block in own]:
            chunks = block.chunks(most_nbytes)
            while (chunk := await off_loop(next, chunks, None)) is not None:
                await place(field, *chunk)
        return stored


class NewPlaces:
    """Where the values of a checkpoint lie now, unless in unit 0. The samples have the indexes that were saved."""

    def __init__(self) -> None:
        self._stored: dict[str, list[tuple[IntArray, NDArray[np.int32]]]] = {}

    def add(self, field: str, samples: IntArray, units: NDArray[np.int32]) -> None:
        self._stored.setdefault(field, []).append((samples, units))

    def tell(self, saved: SavedQueue) -> None:
        """Replace what a slice says of it: the values lay elsewhere in the queue that was saved."""
        for partition in saved.partitions:
            own = unpack_indexes(partition.index)
            for field in partition.fields:
                units = np.zeros(len(own), dtype="<i4")
                if field.name in self._stored:
                    samples, where = self._of(field.name)
                    at, found = positions_in(samples, own)
                    units[found] = where[at[found]]
                field.units = units.tobytes() if units.any() else None

    def _of(self, field: str) -> tuple[IntArray, NDArray[np.int32]]:
        """All samples with this field, ascending; sorted once."""
        pieces = self._stored[field]
        if len(pieces) > 1:
            samples, units = (np.concatenate(each) for each in zip(*pieces, strict=True))
            order = np.argsort(samples, kind="stable")
            pieces[:] = [(samples[order], units[order])]
        return pieces[0]


async def _capacities(storage: StorageManager) -> list[int | None]:
    """In bytes, of each unit."""
    return [getattr(unit, "capacity_bytes", None) for unit in await storage.stats()]


def _blocks(directory: Path, partition: PartitionFiles, saved: SavedSamples) -> dict[str, list[BlockReader]]:
    """By field. Raises CheckpointError if they are of other samples or fields."""
    samples, rows = saved.samples, saved.rows
    found = SavedFile(directory, partition.samples).array(INT64, (len(samples),))
    if not np.array_equal(found, samples) or {field.name for field in partition.fields} != set(rows):
        raise CheckpointError(
            f"partition {partition.name!r}: the values are of other samples or fields than its state."
        )
    blocks = {}
    for field in partition.fields:
        own = blocks[field.name] = [BlockReader(directory, block, samples) for block in field.blocks]
        held = np.sort(np.concatenate([block.samples for block in own])) if own else np.empty(0, np.int64)
        if not np.array_equal(held, samples[rows[field.name]]):
            raise CheckpointError(
                f"partition {partition.name!r}: the values of field {field.name!r} are not all there."
            )
    return blocks
