# SPDX-License-Identifier: Apache-2.0
"""The values of a checkpoint: saved from the storage to files, and loaded from files into a storage."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.checkpoint.field_files import INT64, MOST_ROWS, READ_NBYTES, BlockReader, FieldWriter
from transfer_queue.checkpoint.files import (
    FORMAT,
    STORAGE,
    VALUES,
    DataFile,
    PartitionFiles,
    SavedFile,
    ValueFiles,
    plain,
    write_array,
    write_bytes,
)
from transfer_queue.control.saved import SavedPartition, SavedQueue, StoredRows, places_of, rows_with
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import by_row, runs_of
from transfer_queue.storage.base import StorageManager
from transfer_queue.storage.wire import IntArray, PlacedColumns, Positions, WireColumn
from transfer_queue.transport.blocking import off_loop

_FIRST_ROWS = 64
_SHARE_OF_UNIT = 4
"""A loaded chunk takes at most this fraction (a quarter) of a unit's memory, into which small puts may have gone."""


# ---- saving ----


async def save_values(storage: StorageManager, saved: SavedQueue, root: Path) -> None:
    """Save the stored values of the saved samples. They must not be cleared or replaced meanwhile."""
    await off_loop(root.mkdir)
    partitions = []
    for number, partition in enumerate(saved.partitions):
        partitions.append(await _save_partition(storage, partition, root, f"{number:04}-{_plain(partition.name)}"))
    manifest = msgspec.json.format(msgspec.json.encode(ValueFiles(FORMAT, partitions)), indent=1)
    await off_loop(write_bytes, root / VALUES, manifest)


def _plain(name: str) -> str:
    """Make a recognisable part of a file name; it is never converted back."""
    return re.sub(r"[^A-Za-z0-9@=+_-]", "_", name)[:80]


async def _save_partition(storage: StorageManager, saved: SavedPartition, root: Path, name: str) -> PartitionFiles:
    directory = root / name
    await off_loop(directory.mkdir)
    samples, rows = rows_with(saved)
    ragged = {each.name: each.shape is None for each in saved.fields}
    writers = {
        field: FieldWriter(directory, field, f"{number:02}-{_plain(field)}", ragged[field])
        for number, field in enumerate(rows)
    }
    try:
        await _copy(storage, samples, rows, places_of(saved), writers)
        files = [await off_loop(writer.close, samples) for writer in writers.values()]
        own = await off_loop(write_array, directory / "samples.npy", samples.astype(INT64, copy=False))
    finally:
        for writer in writers.values():
            writer.discard()
    return PartitionFiles(saved.name, name, own, files)


async def _copy(
    storage: StorageManager,
    samples: IntArray,
    rows: dict[str, IntArray],
    places: dict[str, NDArray[np.int32]],
    writers: dict[str, FieldWriter],
) -> None:
    has = np.zeros((len(rows), len(samples)), np.bool_)
    for number, own in enumerate(rows.values()):
        has[number, own] = True
    names, start, step = list(rows), 0, _FIRST_ROWS
    while start < len(samples) and names:
        stop = min(len(samples), start + step)
        lying = {name: units[start:stop] for name, units in places.items()}
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
            stored = await stack.enter_async_context(storage.stored(samples[where].tolist(), fields, units))
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

    def __init__(self, root: Path, expected: DataFile, saved: SavedQueue) -> None:
        """Open and check the files.

        Raises:
            CheckpointError: files are missing, changed, or of a newer version, or hold other samples.
        """
        manifest = _decoded(SavedFile(root, expected).whole())
        if [each.name for each in manifest.partitions] != [each.name for each in saved.partitions]:
            raise CheckpointError(f"{root / VALUES} is about other partitions than the saved state of the queue.")
        self._blocks: list[tuple[str, BlockReader]] = []
        self._nbytes: dict[tuple[str, str], int] = {}
        for partition, state in zip(manifest.partitions, saved.partitions, strict=True):
            self._blocks += _blocks(root / plain(partition.directory), partition, state)
            for field in partition.fields:
                self._nbytes[partition.name, field.name] = sum(block.values.nbytes for block in field.blocks)

    def nbytes(self) -> dict[tuple[str, str], int]:
        """{(partition, field): size of its files of values}."""
        return dict(self._nbytes)

    def verify(self) -> None:
        """Read everything. Raises CheckpointError for the first file that differs from what was written."""
        for _, block in self._blocks:
            for _ in block.chunks():
                pass

    async def put(self, storage: StorageManager, shift: int) -> list[StoredRows]:
        """Store everything, with ``shift`` added to every sample's index.

        Returns where the values lie, except those in unit 0. The samples have the indexes that were saved.
        """
        stored: list[StoredRows] = []
        most_nbytes = await _chunk_nbytes(storage)
        for field, block in self._blocks:
            chunks = block.chunks(most_nbytes)
            while (chunk := await off_loop(_next, chunks)) is not None:
                samples, column = chunk
                units = await storage.store((samples + shift).tolist(), {field: column})
                if units is not None:
                    stored.append((field, samples, by_row(units)))
        return stored


async def _chunk_nbytes(storage: StorageManager) -> int:
    capacities: list[int | None] = [getattr(unit, "capacity_bytes", None) for unit in await storage.stats()]
    return min([READ_NBYTES, *(max(1, most // _SHARE_OF_UNIT) for most in capacities if most is not None)])


def _next(chunks: Iterator[tuple[IntArray, WireColumn]]) -> tuple[IntArray, WireColumn] | None:
    return next(chunks, None)


def _blocks(directory: Path, partition: PartitionFiles, saved: SavedPartition) -> list[tuple[str, BlockReader]]:
    samples, rows = rows_with(saved)
    found = SavedFile(directory, partition.samples).array(INT64, (len(samples),))
    if not np.array_equal(found, samples) or {field.name for field in partition.fields} != set(rows):
        raise CheckpointError(f"partition {saved.name!r}: the values are of other samples or fields than its state.")
    blocks = []
    for field in partition.fields:
        own = [BlockReader(directory, block, samples) for block in field.blocks]
        held = np.sort(np.concatenate([block.samples for block in own])) if own else np.empty(0, np.int64)
        if not np.array_equal(held, samples[rows[field.name]]):
            raise CheckpointError(f"partition {saved.name!r}: the values of field {field.name!r} are not all there.")
        blocks += [(field.name, block) for block in own]
    return blocks


def _decoded(data: bytes) -> ValueFiles:
    try:
        manifest = msgspec.json.decode(data, type=ValueFiles)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{STORAGE}/{VALUES} can't be read: {error}.") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{STORAGE}/{VALUES} has format {manifest.format}, this version reads {FORMAT}.")
    return manifest
