# SPDX-License-Identifier: Apache-2.0
"""The saved form of a control plane: plain data, in slices.

Arrays are raw little-endian bytes, one entry per row. Checkpoints contain it: add fields with a default, never rename
or renumber.

A slice is a saved queue of its own, small enough to be made or taken in one turn of a server. The first slice has the
tasks and samplers. A partition that is cut goes on in the next slice under the same name. That one has
further rows, with their keys and tags, and further batches of its ledgers. In format 1 a checkpoint was one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import PUBLISHED
from transfer_queue.errors import CheckpointError
from transfer_queue.protocol import NO_INDEXES, DeclaredField, Indexes, Terms, unpack_indexes

Saved = TypeVar("Saved", bound=msgspec.Struct)
FORMAT = 2
FORMATS = (1, 2)
"""Those that this version reads."""


class SavedBatch(msgspec.Struct):
    """A ledger entry. ``consumes`` None: all of ``indexes``. ``batch_size`` None: an older file, which has none."""

    rank: int | None
    batch_index: int
    number: int
    indexes: bytes
    token: str
    owned: int
    consumes: bytes | None = None
    padding: bytes | None = None
    dp_size: int | None = None
    batch_size: int | None = None
    cut: list[int] = []


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
    over_ranks: list[int] = msgspec.field(default_factory=list, name="told")
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
    """Rows are samples and heads of groups (``state`` uint8). ``missing_free`` counts the pre-allocated ones.

    In older files pre-allocated rows that no writer had reserved are rows, too. ``groups``: columns of heads and
    members; ``terms`` of the groups, numbered from 1 in those columns; ``left_by``: tasks that draw none of
    them any more; ``lost``: by field, the indexes of rows that lost it with a storage unit.
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
    groups: dict[str, bytes] = {}
    terms: list[Terms] = []
    num_heads: int = 0
    left_by: list[str] = []
    lost: dict[str, bytes] = {}


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
    """``versions``: that train, by name or pattern of partitions. ``next_lease``: the token that it would have."""

    format: int
    next_index: int
    incarnations: int
    partitions: list[SavedPartition]
    tasks: list[SavedTask]
    sampler: SavedSampler
    versions: dict[str, int] = {}
    next_lease: int = 1


class _FormatOnly(msgspec.Struct):
    format: int


for _kind in (SavedQueue, _FormatOnly):
    msgspec.msgpack.Decoder(_kind)  # prepared at import: see config.py


def decode(data: bytes) -> SavedQueue:
    """Raises CheckpointError for what is no saved state, or one of a newer version."""
    return decoded(data, SavedQueue, "the saved state of the queue")


def decoded(data: bytes, kind: type[Saved], what: str, decode_as: Callable[..., Any] = msgspec.msgpack.decode) -> Saved:
    """Decode something that has a ``format``. Raises CheckpointError if ``what`` is foreign, damaged, or newer."""
    try:
        found = decode_as(data, type=_FormatOnly).format
        if found in FORMATS:
            whole: Saved = decode_as(data, type=kind)
            return whole
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{what} is none of ours, or damaged: {error}.") from error
    raise CheckpointError(
        f"{what} has format {found}, this version reads {FORMAT}. Update lightning-tq, or save again with the version "
        f"that runs here."
    )


def saved_indexes(saved: SavedQueue) -> Indexes:
    """All indexes that the saved rows have."""
    return np.concatenate([NO_INDEXES, *(unpack_indexes(each.index) for each in saved.partitions)])


def live_rows(saved: SavedPartition) -> npt.NDArray[np.bool_]:
    """Which rows are samples, or heads of groups."""
    live: npt.NDArray[np.bool_] = PUBLISHED[np.frombuffer(saved.state, dtype=np.uint8)]
    return live
