# SPDX-License-Identifier: Apache-2.0
"""The saved form of a control plane: plain data, and the slices that it travels in.

Arrays are raw little-endian bytes, one entry per row. Checkpoints contain it: add fields with a default, never rename
or renumber.

A slice is a saved queue of its own, small enough to be made or taken in one turn of a server. The first slice has the
tasks and samplers. A partition that is cut goes on in the next slice under the same name. That one has
further rows, with their keys and tags, and further batches of its ledgers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import Rows, RowState, positions_in
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import DeclaredField, Indexes, pack_indexes, unpack_indexes

FORMAT = 1


class SavedBatch(msgspec.Struct):
    """A ledger entry. ``consumes`` None: all of ``indexes``."""

    rank: int | None
    batch_index: int
    number: int
    indexes: bytes
    token: str
    owned: int
    consumes: bytes | None = None
    padding: bytes | None = None
    dp_size: int | None = None


class SavedRank(msgspec.Struct):
    """Batches drawn for a rank, as runs [start, stop), and the next one for a fetch without batch_index.

    ``missed``: batches before that one that the rank was given, but never received.
    """

    rank: int | None
    starts: list[int]
    stops: list[int]
    next_index: int | None = None
    missed: list[int] = []


class SavedLedger(msgspec.Struct):
    entries: list[SavedBatch]
    ranks: list[SavedRank]
    count: int
    resets: int


class SavedConsumer(msgspec.Struct):
    """``given`` int32 and ``consumed`` bool, one per row.

    ``ended``, ``dropped``: of the stream without a filter. ``ended_filters``: (filter, reason, dropped) of others.
    """

    task: str
    given: bytes
    consumed: bytes
    ledger: SavedLedger
    ended: str | None = None
    dropped: int = 0
    over_at: int | None = None
    told: list[int] = []
    ends: list[tuple[int | None, list[int]]] = []
    ended_filters: list[tuple[str, str, int]] = []


class SavedField(msgspec.Struct):
    """``has`` bool per row; ``shapes`` int32 [rows, ndim] if rows differ. ``written`` False: only expected.

    ``units`` int32 per row: where the values lay in the queue that saved this; None: all in unit 0.
    ``dtypes``, if there are several, with uint8 ``row_dtypes``: the position of each row's.
    """

    name: str
    written: bool
    has: bytes
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    is_nested: bool = False
    is_non_tensor: bool = False
    ndim: int | None = None
    mixed: bool = False
    shapes: bytes | None = None
    dtypes: list[str | None] = []
    row_dtypes: bytes | None = None
    declared: DeclaredField | None = None
    units: bytes | None = None


class SavedPartition(msgspec.Struct):
    """Rows are samples and pre-allocated ones (``state`` uint8), without the rows that writers had reserved.

    ``missing_free`` counts the reserved rows that were pre-allocated.
    """

    name: str
    incarnation: int
    sealed: bool
    num_samples: int | None
    num_published: int
    num_puts: int
    preallocate: int
    index: bytes
    state: bytes
    put_offset: bytes
    put_size: bytes
    put_number: bytes
    fields: list[SavedField]
    consumers: list[SavedConsumer]
    keys: list[str] = []
    key_indexes: bytes = b""
    tagged: bytes = b""
    tags: list[bytes] = []
    published_ago_s: float | None = None
    missing_free: int = 0


class SavedSampler(msgspec.Struct):
    """A sampler's state; ``kind`` is its class."""

    kind: str
    state: dict[str, Any]


class SavedTask(msgspec.Struct):
    """``sampler`` None: the task uses the queue's default sampler."""

    name: str
    spec: Any = None
    dp_size: int | None = None
    tail: str | None = None
    sampler: SavedSampler | None = None


class SavedQueue(msgspec.Struct):
    format: int
    next_index: int
    incarnations: int
    partitions: list[SavedPartition]
    tasks: list[SavedTask]
    sampler: SavedSampler


class _FormatOnly(msgspec.Struct):
    format: int


_decoder = msgspec.msgpack.Decoder(SavedQueue)


def decode(data: bytes) -> SavedQueue:
    """Raises CheckpointError for what is no saved state, or one of a newer version."""
    try:
        found = msgspec.msgpack.decode(data, type=_FormatOnly).format
        if found == FORMAT:
            return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"the saved state of the queue can't be read: {error}.") from error
    raise CheckpointError(
        f"the saved state of the queue has format {found}, this version reads {FORMAT}. Update lightning-tq, or save "
        f"again with the version that runs here."
    )


def saved_indexes(saved: SavedQueue) -> Indexes:
    """All indexes that the saved rows have."""
    return np.concatenate([np.empty(0, np.int64), *(unpack_indexes(each.index) for each in saved.partitions)])


def live_rows(saved: SavedPartition) -> npt.NDArray[np.bool_]:
    """Which rows are samples."""
    live: npt.NDArray[np.bool_] = np.frombuffer(saved.state, dtype=np.uint8) == RowState.LIVE
    return live


def rows_with(saved: SavedPartition) -> tuple[Indexes, dict[str, Rows]]:
    """Samples of a saved partition, and for each field the positions of those that have it."""
    live = live_rows(saved)
    has = {each.name: np.frombuffer(each.has, dtype=np.bool_)[live].nonzero()[0] for each in saved.fields}
    return unpack_indexes(saved.index)[live], {name: rows for name, rows in has.items() if len(rows)}


def places_of(saved: SavedPartition) -> dict[str, npt.NDArray[np.int32]]:
    """By field, the storage unit of each sample, where some lay in another unit than 0."""
    live = live_rows(saved)
    return {each.name: np.frombuffer(each.units, dtype="<i4")[live] for each in saved.fields if each.units is not None}


StoredRows = tuple[str, Indexes, npt.NDArray[np.int32]]
"""A field, some samples of it, and the storage unit of each."""


def _place(saved: SavedQueue, stored: Iterable[StoredRows]) -> None:
    """Replace what the state says of where values lie: those of a checkpoint lie where they were stored now."""
    by_field: dict[str, list[StoredRows]] = {}
    for each in stored:
        by_field.setdefault(each[0], []).append(each)
    for partition in saved.partitions:
        own = unpack_indexes(partition.index)
        for field in partition.fields:
            units = np.zeros(len(own), dtype="<i4")
            for _, indexes, where in by_field.get(field.name, ()):
                at, found = positions_in(own, indexes)
                units[at[found]] = where[found]
            field.units = units.tobytes() if units.any() else None


# ---- slices ----

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


def grouped(sections: Iterable[tuple[T, int]]) -> list[list[T]]:
    """Sections of partitions, each with its number of rows, by slice; there is at least one slice."""
    groups: list[list[T]] = [[]]
    room = ROWS
    for section, num_rows in sections:
        cost = num_rows + _PARTITION
        if groups[-1] and cost > room:
            groups.append([])
            room = ROWS
        groups[-1].append(section)
        room -= cost
    return groups


def later(head: SavedQueue, partitions: list[SavedPartition]) -> SavedQueue:
    """A slice that is not the first one."""
    return SavedQueue(head.format, head.next_index, head.incarnations, partitions, [], SavedSampler("", {}))


# ---- cutting into slices ----


def split(saved: SavedQueue) -> Iterator[SavedQueue]:
    """Raises CheckpointError where columns of one partition differ in length."""
    groups = grouped((section, len(section.state)) for partition in saved.partitions for section in _cut(partition))
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
    of_rows += [len(each.row_dtypes) for each in whole.fields if each.row_dtypes is not None]
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
    row_dtypes = None if whole.row_dtypes is None else whole.row_dtypes[start:stop]
    units = None if whole.units is None else whole.units[4 * start : 4 * stop]
    return _replace(whole, has=whole.has[start:stop], shapes=shapes, row_dtypes=row_dtypes, units=units)


def _cut_consumer(whole: SavedConsumer, at: int) -> SavedConsumer:
    start, stop = at * ROWS, (at + 1) * ROWS
    ledger = _replace(
        whole.ledger,
        entries=whole.ledger.entries[at * BATCHES : (at + 1) * BATCHES],
        ranks=[] if at else whole.ledger.ranks,
    )
    return _replace(whole, given=whole.given[4 * start : 4 * stop], consumed=whole.consumed[start:stop], ledger=ledger)


# ---- joining slices ----


def merge(slices: Iterable[SavedQueue]) -> SavedQueue:
    """The queue whose slices these are, all of them and in order."""
    first, *others = slices
    sections = [section for each in (first, *others) for section in each.partitions]
    partitions = [_join(list(of_one)) for _, of_one in groupby(sections, lambda section: section.name)]
    return _replace(first, partitions=partitions)


def _join(sections: list[SavedPartition]) -> SavedPartition:
    first = sections[0]
    if len(sections) == 1:
        return first
    starts = np.cumsum([0, *(len(section.state) for section in sections)]).tolist()
    tagged = [unpack_indexes(section.tagged) + start for section, start in zip(sections, starts, strict=False)]
    columns = ("index", "state", *_PUT_COLUMNS, "key_indexes")
    return _replace(
        first,
        **{name: b"".join(getattr(section, name) for section in sections) for name in columns},
        fields=[_join_field([section.fields[at] for section in sections]) for at in range(len(first.fields))],
        consumers=[
            _join_consumer([section.consumers[at] for section in sections]) for at in range(len(first.consumers))
        ],
        keys=[key for section in sections for key in section.keys],
        tagged=pack_indexes(np.concatenate(tagged)),
        tags=[own for section in sections for own in section.tags],
    )


def _join_field(sections: list[SavedField]) -> SavedField:
    joined: dict[str, bytes | None] = {"has": b"".join(section.has for section in sections)}
    for name in ("shapes", "row_dtypes"):
        if getattr(sections[0], name) is not None:
            joined[name] = b"".join(getattr(section, name) or b"" for section in sections)
    if any(section.units is not None for section in sections):
        joined["units"] = b"".join(section.units or bytes(4 * len(section.has)) for section in sections)
    return _replace(sections[0], **joined)


def _join_consumer(sections: list[SavedConsumer]) -> SavedConsumer:
    ledger: SavedLedger = _replace(
        sections[0].ledger, entries=[entry for section in sections for entry in section.ledger.entries]
    )
    given, consumed = (b"".join(getattr(section, name) for section in sections) for name in ("given", "consumed"))
    return _replace(sections[0], given=given, consumed=consumed, ledger=ledger)


# ---- as bytes ----


def joined(parts: list[bytes]) -> bytes:
    """A saved queue, of its encoded slices."""
    return parts[0] if len(parts) == 1 else msgspec.msgpack.encode(merge(map(decode, parts)))


def encoded_parts(data: bytes, stored: Iterable[StoredRows]) -> list[bytes]:
    """The slices of an encoded queue, each encoded. ``stored``: where its values lie now, if not in unit 0."""
    saved = decode(data)
    _place(saved, stored)
    return [msgspec.msgpack.encode(each) for each in split(saved)]
