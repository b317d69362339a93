# SPDX-License-Identifier: Apache-2.0
"""One field of one partition on disk: rows of the same layout form a block, in any order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transfer_queue.checkpoint.files import (
    BlockFiles,
    DataFile,
    FieldFiles,
    GrowingArray,
    GrowingFile,
    SavedFile,
    write_array,
)
from transfer_queue.errors import CheckpointError, ProtocolError
from transfer_queue.storage.wire import (
    IntArray,
    Layout,
    PlacedColumns,
    Positions,
    WireColumn,
    join,
    running_sum,
    runs_within,
)

INT64 = np.dtype("<i8")
_NUMPY = frozenset({"bool", "float16", "float32", "float64", "complex64", "complex128"})
_NUMPY |= {f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)}
READ_NBYTES = 32 * 1024 * 1024
"""Bytes of values handled at a time."""
MOST_ROWS = 1 << 15
"""Rows handled at a time, because a storage unit serves nobody else while it takes them: about 10 ms."""


def dtype_of(layout: Layout) -> np.dtype[Any]:
    """The dtype of the elements in a .npy file."""
    unsigned = f"u{layout.itemsize}" if layout.itemsize in (1, 2, 4, 8) else f"V{layout.itemsize}"
    dtype: np.dtype[Any] = np.dtype(layout.dtype if layout.dtype in _NUMPY else unsigned).newbyteorder("<")
    return dtype


class FieldWriter:
    """Writes one field. ``ragged``: the tensors are known to differ in shape, so none is written as dense."""

    def __init__(self, directory: Path, name: str, stem: str, ragged: bool) -> None:
        self.name = name
        self._directory = directory
        self._stem = stem
        self._ragged = ragged
        self._blocks: dict[Layout, _BlockWriter] = {}

    def add(self, samples: IntArray, placed: PlacedColumns) -> None:
        """Add values of these samples; positions refer to ``samples``."""
        by_block: dict[Layout, list[tuple[Positions, WireColumn]]] = {}
        for positions, column in placed:
            layout = column.layout.family if self._ragged else column.layout
            by_block.setdefault(layout, []).append((positions, column))
        for layout, own in by_block.items():
            where, column = joined(own, layout)
            self._block(layout).add(samples[where], column)

    def _block(self, layout: Layout) -> _BlockWriter:
        if layout not in self._blocks:
            stem = f"{self._stem}.{len(self._blocks)}" if self._blocks else self._stem
            self._blocks[layout] = _BlockWriter(self._directory, stem, layout)
        return self._blocks[layout]

    def close(self, all_samples: IntArray) -> FieldFiles:
        return FieldFiles(self.name, [block.close(all_samples) for block in self._blocks.values()])

    def discard(self) -> None:
        for block in self._blocks.values():
            block.discard()


class _BlockWriter:
    def __init__(self, directory: Path, stem: str, layout: Layout) -> None:
        self._directory, self._stem, self._layout = directory, stem, layout
        self._samples: list[IntArray] = []
        self._row_meta: list[IntArray] = []
        self._values: GrowingFile
        if layout.kind == "objects":
            self._values = GrowingFile(directory / f"{stem}.msgpack")
        elif layout.kind == "dense":
            self._values = GrowingArray(directory / f"{stem}.npy", dtype_of(layout), layout.shape)
        else:
            self._values = GrowingArray(directory / f"{stem}.values.npy", dtype_of(layout))

    def add(self, samples: IntArray, column: WireColumn) -> None:
        self._samples.append(samples)
        self._values.write(column.data)
        if column.row_meta is not None:
            self._row_meta.append(column.row_meta)

    def close(self, all_samples: IntArray) -> BlockFiles:
        samples, offsets, shapes = np.concatenate(self._samples), None, None
        count = len(samples)
        if self._layout.kind != "dense":
            row_meta = np.concatenate(self._row_meta)
            sizes = row_meta.prod(axis=1)
            offsets = self._write("offsets", running_sum(sizes))
            shapes = self._write("shapes", row_meta) if row_meta.shape[1] > 1 else None
            count = int(sizes.sum())
        values = self._values.close(count)
        own = None if np.array_equal(samples, all_samples) else self._write("samples", samples)
        return BlockFiles(self._layout, len(samples), values, offsets, shapes, own)

    def _write(self, what: str, array: IntArray) -> DataFile:
        return write_array(self._directory / f"{self._stem}.{what}.npy", array.astype(INT64, copy=False))

    def discard(self) -> None:
        self._values.discard()


def joined(placed: PlacedColumns, layout: Layout) -> tuple[IntArray, WireColumn]:
    """Join the rows, by ascending position, into one wire column of this layout. Returns (positions, column)."""
    given = [np.arange(at.start, at.stop) if isinstance(at, slice) else at for at, _ in placed]
    where = np.sort(np.concatenate(given))
    only = placed[0][1]
    if len(placed) == 1 and only.selection is None and np.array_equal(where, given[0]):
        return where, only.as_ragged() if layout.kind == "ragged" else only
    ranked = [(np.searchsorted(where, own), column) for own, (_, column) in zip(given, placed, strict=True)]
    return where, join(ranked, len(where), layout)


class BlockReader:
    """Reads one block of a checkpoint: which samples it has, then its rows."""

    def __init__(self, directory: Path, block: BlockFiles, all_samples: IntArray) -> None:
        self._block = block
        self.nbytes = block.values.nbytes
        self._values = SavedFile(directory, block.values)
        self.samples = all_samples
        if block.samples is not None:
            self.samples = SavedFile(directory, block.samples).array(INT64, (block.rows,))
        if len(self.samples) != block.rows:
            raise CheckpointError(f"{self._values.path} has {block.rows} rows for {len(self.samples)} samples.")
        self._offsets = self._shapes = None
        if block.layout.kind != "dense":
            if block.offsets is None:
                raise CheckpointError(f"nothing says where the rows of {self._values.path} begin.")
            self._offsets = SavedFile(directory, block.offsets).array(INT64, (block.rows + 1,))
            if self._offsets[0] or (np.diff(self._offsets) < 0).any():
                raise CheckpointError(f"the rows of {self._values.path} don't follow each other.")
        if block.shapes is not None:
            self._shapes = SavedFile(directory, block.shapes).array(INT64, (block.rows, len(block.layout.shape)))
        self._skip = self._header()

    def chunks(self, most_nbytes: int = READ_NBYTES) -> Iterator[tuple[IntArray, WireColumn]]:
        """Yield (samples, their rows), about ``most_nbytes`` at a time."""
        layout = self._block.layout
        if self._offsets is None:
            edges = np.arange(self._block.rows + 1) * layout.row_nbytes
        else:
            edges = self._offsets * layout.itemsize
        cuts = runs_within(edges, most_nbytes, MOST_ROWS)
        sizes = (int(edges[stop] - edges[start]) for start, stop in cuts)
        for (start, stop), data in zip(cuts, self._values.chunks(sizes, self._skip), strict=True):
            try:
                column = WireColumn.received(layout, stop - start, data, self._row_meta(start, stop))
            except ProtocolError as error:
                raise CheckpointError(f"{self._values.path} contradicts itself: {error}.") from error
            yield self.samples[start:stop], column

    def mapped(self) -> WireColumn:
        """All rows, where they lie in the file."""
        block, data = self._block, np.empty(0, np.uint8)
        if self.nbytes > self._skip:
            data = np.memmap(self._values.path, np.uint8, "r", self._skip)
        return WireColumn.received(block.layout, block.rows, data, self._row_meta(0, block.rows))

    def _header(self) -> int:
        """The size of the header before the values. Raises CheckpointError if the rows don't add up to the file."""
        layout, block, nbytes = self._block.layout, self._block, 0
        end = block.rows if self._offsets is None else int(self._offsets[-1])
        if layout.kind != "objects":
            shape = (end, *layout.shape) if layout.kind == "dense" else (end,)
            nbytes = self._values.header(dtype_of(layout), shape)
        entry = layout.row_nbytes if layout.kind == "dense" else layout.itemsize
        if nbytes + end * entry != self.nbytes:
            raise CheckpointError(f"{self._values.path} has other rows than its list says.")
        return nbytes

    def _row_meta(self, start: int, stop: int) -> IntArray | None:
        if self._offsets is None:
            return None
        shapes = np.diff(self._offsets[start : stop + 1]) if self._shapes is None else self._shapes[start:stop]
        row_meta: IntArray = np.ascontiguousarray(shapes).reshape(-1)
        return row_meta
