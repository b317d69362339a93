# SPDX-License-Identifier: Apache-2.0
"""One field on disk: whatever wire columns its values came in, what is read is what was written, row by row."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.checkpoint import field_files
from transfer_queue.checkpoint.field_files import BlockReader, FieldWriter
from transfer_queue.checkpoint.files import BlockFiles, FieldFiles
from transfer_queue.errors import CheckpointError
from transfer_queue.storage.wire import OBJECTS, IntArray, Layout, WireColumn, dense_layout, ragged_layout

Row = tuple[str, tuple[int, ...], bytes]
"""(dtype or "objects", shape, bytes)"""
ITEMSIZE = {"int32": 4, "bfloat16": 2, "bool": 1, "complex128": 16}
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    if draw(st.integers(0, 4)) == 0:
        return "objects", (), draw(st.binary(min_size=1, max_size=9))
    dtype, shape = draw(st.sampled_from(sorted(ITEMSIZE))), draw(shapes)
    nbytes = int(np.prod(shape, dtype=int)) * ITEMSIZE[dtype]
    return dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes))


def layout_of(row: Row, ragged: bool) -> Layout:
    dtype, shape, _ = row
    if dtype == "objects":
        return OBJECTS
    if ragged and shape:
        return ragged_layout(dtype, ITEMSIZE[dtype], len(shape))
    return dense_layout(dtype, ITEMSIZE[dtype], shape)


def wire_of(layout: Layout, own: list[Row], gap: int) -> WireColumn:
    """``gap``: bytes between the rows, as where a reader has others' memory before it."""
    sizes = np.array([len(row[2]) for row in own])
    data = np.frombuffer(b"".join(row[2] for row in own), np.uint8)
    if layout == OBJECTS:
        return WireColumn(layout, len(own), data, sizes.reshape(-1, 1))
    if layout.kind == "dense":
        if not gap or not layout.row_nbytes:
            return WireColumn(layout, len(own), data)
        spread = np.zeros((len(own), 2, layout.row_nbytes), np.uint8)
        spread[:, 1] = data.reshape(len(own), -1)
        return WireColumn(layout, len(own), spread.reshape(-1), selection=np.arange(len(own)) * 2 + 1)
    row_meta = np.array([row[1] for row in own], np.int64).reshape(len(own), -1)
    if not gap:
        return WireColumn(layout, len(own), data, row_meta)
    spread = b"".join(b"\0" * gap + row[2] for row in own)
    starts = np.cumsum(sizes + gap) - sizes
    return WireColumn(layout, len(own), np.frombuffer(spread, np.uint8), row_meta, selection=starts)


def parts_of(chunk: list[Row], ragged: list[bool], gap: int) -> list[tuple[IntArray, WireColumn]]:
    """The rows of a chunk as a storage answers: by layout, in no order."""
    found: dict[Layout, list[int]] = {}
    for at, row in enumerate(chunk):
        found.setdefault(layout_of(row, ragged[at % len(ragged)]), []).append(at)
    return [
        (np.array(where[::-1]), wire_of(layout, [chunk[at] for at in where[::-1]], gap))
        for layout, where in reversed(found.items())
    ]


def write(
    directory: Path, chunks: list[list[Row]], ragged: list[bool], gap: int, hint: bool
) -> tuple[FieldFiles, IntArray]:
    writer = FieldWriter(directory, "f", "f", hint)
    samples = np.arange(sum(map(len, chunks)), dtype=np.int64) * 3 + 5
    start = 0
    for chunk in chunks:
        writer.add(samples[start : start + len(chunk)], parts_of(chunk, ragged, gap))
        start += len(chunk)
    return writer.close(samples), samples


def read(directory: Path, field: FieldFiles, samples: IntArray) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for block in field.blocks:
        for own, wire in BlockReader(directory, block, samples).chunks():
            edges = wire.bounds if wire.layout == OBJECTS else wire.as_ragged().bounds
            for at, sample in enumerate(own.tolist()):
                shape: tuple[int, ...] = ()
                if wire.layout != OBJECTS:
                    row_meta = wire.as_ragged().row_meta
                    assert row_meta is not None
                    shape = tuple(row_meta[at].tolist())
                assert sample not in found
                data = wire.data[edges[at] : edges[at + 1]].tobytes()
                found[sample] = (wire.layout.dtype or "objects", shape, data)
    return found


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    chunks=st.lists(st.lists(rows(), min_size=1, max_size=8), min_size=1, max_size=4),
    ragged=st.lists(st.booleans(), min_size=1, max_size=5), gap=st.sampled_from([0, 0, 3]), hint=st.booleans(),
    handled=st.sampled_from([1, 7, 1 << 20]), most_rows=st.sampled_from([1, 3, 1 << 16]),
)  # fmt: skip
def test_every_row_is_read_as_it_was_written(chunks, ragged, gap, hint, handled, most_rows):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(field_files, "READ_NBYTES", handled)
        patched.setattr(field_files, "MOST_ROWS", most_rows)
        field, samples = write(Path(name), chunks, ragged, gap, hint)
        expected = [row for chunk in chunks for row in chunk]
        assert read(Path(name), field, samples) == dict(zip(samples.tolist(), expected, strict=True))
        kinds = {"objects" if row[0] == "objects" else (row[0], len(row[1])) for row in expected}
        assert len(field.blocks) <= 2 * len(kinds), "few files, however many wire columns there were"


def test_a_chunk_has_no_more_rows_than_a_unit_takes_quickly(tmp_path):
    count = 2 * field_files.MOST_ROWS + 1
    values = np.arange(count, dtype="<i4")
    field, samples = write(tmp_path, [[("int32", (), value.tobytes()) for value in values]], [False], 0, False)
    chunks = [column.rows for block in field.blocks for _, column in BlockReader(tmp_path, block, samples).chunks()]
    assert (max(chunks), sum(chunks)) == (field_files.MOST_ROWS, count)


def test_rows_of_one_shape_are_one_array_in_the_order_of_the_samples(tmp_path):
    chunk: list[Row] = [("int32", (2,), np.array([n, -n], "<i4").tobytes()) for n in range(5)]
    field, _ = write(tmp_path, [chunk, chunk], [False], 0, False)
    assert np.load(tmp_path / "f.npy").tolist() == [[n, -n] for n in [*range(5), *range(5)]]
    assert [block.samples for block in field.blocks] == [None]


def block_of(tmp_path: Path) -> tuple[BlockFiles, IntArray]:
    chunk: list[Row] = [("int32", (n % 3,), b"\1\0\0\0" * (n % 3)) for n in range(5)]
    field, samples = write(tmp_path, [chunk], [True], 0, True)
    return field.blocks[0], samples


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 4}, {"rows": -1}, {"rows": 1 << 62}, {"offsets": None}, {"layout": ragged_layout("int32", 2, 1)},
        {"layout": ragged_layout("float32", 4, 1)}, {"layout": dense_layout("int32", 4, (1 << 40, 1 << 40))},
        {"layout": dense_layout("int32", 4, (-1,))}, {"layout": OBJECTS}, {"layout": ragged_layout("int32", 4, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_a_list_that_contradicts_its_files_is_refused(tmp_path, change):
    import msgspec

    block, samples = block_of(tmp_path)
    with pytest.raises(CheckpointError):
        list(BlockReader(tmp_path, msgspec.structs.replace(block, **change), samples).chunks())
