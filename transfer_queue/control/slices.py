# SPDX-License-Identifier: Apache-2.0
"""A saved queue in slices, each small enough to be made or taken in one turn of a server; and whole again.

Each slice is a saved queue of its own. The first one has the tasks and samplers. A partition that is cut goes on in the
next slice under the same name: further rows, with their keys and tags, and further batches of its ledgers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.control.saved import (
    SavedConsumer,
    SavedField,
    SavedLedger,
    SavedPartition,
    SavedQueue,
    SavedSampler,
    decode,
)
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import pack_indexes, unpack_indexes

ROWS = 3000
"""Rows of one slice: some milliseconds."""
BATCHES = 1000
"""Batches of each ledger in one slice: they take longer."""
_PARTITION = 100
"""A partition costs as much as so many rows."""

T = TypeVar("T")
_replace = msgspec.structs.replace
_PUT_COLUMNS = ("put_offset", "put_size", "put_number")


def num_cuts(num_rows: int, num_batches: Iterable[int]) -> int:
    """Into how many a partition is cut, with so many batches in each of its ledgers."""
    cuts = [-(-num_rows // ROWS), *(-(-count // BATCHES) for count in num_batches)]
    return max(1, *cuts)


def grouped(pieces: Iterable[tuple[T, int]]) -> list[list[T]]:
    """Pieces of partitions, each with its number of rows, by slice; there is at least one slice."""
    groups: list[list[T]] = [[]]
    room = ROWS
    for piece, num_rows in pieces:
        cost = num_rows + _PARTITION
        if groups[-1] and cost > room:
            groups.append([])
            room = ROWS
        groups[-1].append(piece)
        room -= cost
    return groups


def later(head: SavedQueue, partitions: list[SavedPartition]) -> SavedQueue:
    """A slice that is not the first one."""
    return SavedQueue(head.format, head.next_index, head.incarnations, partitions, [], SavedSampler("", {}))


# ---- cutting ----


def split(saved: SavedQueue) -> Iterator[SavedQueue]:
    """Raises CheckpointError where columns of one partition differ in length."""
    groups = grouped((piece, len(piece.state)) for partition in saved.partitions for piece in _cut(partition))
    yield _replace(saved, partitions=groups[0])
    for group in groups[1:]:
        yield later(saved, group)


def _cut(whole: SavedPartition) -> Iterator[SavedPartition]:
    num_rows = len(whole.state)
    count = num_cuts(num_rows, (len(each.ledger.entries) for each in whole.consumers))
    if count == 1:
        yield whole
        return
    _check_lengths(whole, num_rows)
    index = unpack_indexes(whole.index)
    bounds = index[ROWS:num_rows:ROWS] if num_rows > ROWS else index[:0]
    key_index, tagged = unpack_indexes(whole.key_indexes), unpack_indexes(whole.tagged)
    keys = _cuts(key_index, bounds, count)
    tags = _cuts(tagged, np.arange(ROWS, num_rows, ROWS), count)
    for at in range(count):
        start, stop = at * ROWS, (at + 1) * ROWS
        yield _replace(
            whole, index=pack_indexes(index[start:stop]), state=whole.state[start:stop],
            **{name: getattr(whole, name)[4 * start : 4 * stop] for name in _PUT_COLUMNS},
            fields=[_cut_field(each, start, stop) for each in whole.fields],
            consumers=[_cut_consumer(each, at) for each in whole.consumers],
            keys=whole.keys[keys[at]], key_indexes=pack_indexes(key_index[keys[at]]),
            tagged=pack_indexes(tagged[tags[at]] - start), tags=whole.tags[tags[at]],
            missing_free=0 if at else whole.missing_free,
        )  # fmt: skip


def _check_lengths(whole: SavedPartition, num_rows: int) -> None:
    of_rows = [len(whole.index) // 8, *(len(getattr(whole, name)) // 4 for name in _PUT_COLUMNS)]
    of_rows += [len(each.has) for each in whole.fields]
    of_rows += [len(each.shapes) // (4 * each.ndim) for each in whole.fields if each.shapes is not None and each.ndim]
    for each in whole.consumers:
        of_rows += [len(each.consumed), len(each.given) // 4]
    if set(of_rows) != {num_rows} or (len(whole.keys), len(whole.tags)) != (
        len(whole.key_indexes) // 8,
        len(whole.tagged) // 8,
    ):
        raise CheckpointError(
            f"the saved state of the queue contradicts itself: columns of partition {whole.name!r} differ in length."
        )


def _cuts(values: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], count: int) -> list[slice]:
    """Ascending values, cut at the bounds; all of them, also where they don't ascend."""
    inner = np.maximum.accumulate(values.searchsorted(bounds))[: count - 1].tolist() if len(bounds) else []
    edges = [0, *inner, *[len(values)] * (count - len(inner))]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _cut_field(whole: SavedField, start: int, stop: int) -> SavedField:
    shapes = whole.shapes
    if shapes is not None:
        width = 4 * (whole.ndim or 0)
        shapes = shapes[width * start : width * stop]
    return _replace(whole, has=whole.has[start:stop], shapes=shapes)


def _cut_consumer(whole: SavedConsumer, at: int) -> SavedConsumer:
    start, stop = at * ROWS, (at + 1) * ROWS
    ledger = _replace(
        whole.ledger,
        entries=whole.ledger.entries[at * BATCHES : (at + 1) * BATCHES],
        ranks=[] if at else whole.ledger.ranks,
    )
    return _replace(whole, given=whole.given[4 * start : 4 * stop], consumed=whole.consumed[start:stop], ledger=ledger)


# ---- joining ----


def merge(slices: Iterable[SavedQueue]) -> SavedQueue:
    """The queue whose slices these are, all of them and in order."""
    first, *others = slices
    pieces = [piece for each in (first, *others) for piece in each.partitions]
    partitions = [_join(list(of_one)) for _, of_one in groupby(pieces, lambda piece: piece.name)]
    return _replace(first, partitions=partitions)


def _join(pieces: list[SavedPartition]) -> SavedPartition:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    starts = np.cumsum([0, *(len(piece.state) for piece in pieces)]).tolist()
    tagged = [unpack_indexes(piece.tagged) + start for piece, start in zip(pieces, starts, strict=False)]
    columns = ("index", "state", *_PUT_COLUMNS, "key_indexes")
    return _replace(
        first,
        **{name: b"".join(getattr(piece, name) for piece in pieces) for name in columns},
        fields=[_join_field([piece.fields[at] for piece in pieces]) for at in range(len(first.fields))],
        consumers=[_join_consumer([piece.consumers[at] for piece in pieces]) for at in range(len(first.consumers))],
        keys=[key for piece in pieces for key in piece.keys],
        tagged=pack_indexes(np.concatenate(tagged)),
        tags=[own for piece in pieces for own in piece.tags],
    )


def _join_field(pieces: list[SavedField]) -> SavedField:
    shapes = None if pieces[0].shapes is None else b"".join(piece.shapes or b"" for piece in pieces)
    return _replace(pieces[0], has=b"".join(piece.has for piece in pieces), shapes=shapes)


def _join_consumer(pieces: list[SavedConsumer]) -> SavedConsumer:
    ledger: SavedLedger = _replace(
        pieces[0].ledger, entries=[entry for piece in pieces for entry in piece.ledger.entries]
    )
    given, consumed = (b"".join(getattr(piece, name) for piece in pieces) for name in ("given", "consumed"))
    return _replace(pieces[0], given=given, consumed=consumed, ledger=ledger)


# ---- as bytes ----


def joined(parts: list[bytes]) -> bytes:
    """A saved queue, of its encoded slices."""
    return parts[0] if len(parts) == 1 else msgspec.msgpack.encode(merge(map(decode, parts)))


def encoded_parts(data: bytes) -> list[bytes]:
    """The slices of an encoded queue, each encoded. What is small, or can't be read, stays as it is."""
    if len(data) <= ROWS:  # a row takes more than a byte
        return [data]
    parts = [msgspec.msgpack.encode(each) for each in split(decode(data))]
    return parts if len(parts) > 1 else [data]
