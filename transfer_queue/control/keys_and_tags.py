# SPDX-License-Identifier: Apache-2.0
"""Keys and tags of one partition's samples.

Keys are in many small dicts: a single dict of a million keys would block all clients each time it grows. Tags are
packed: a dict for each sample would take most of the controller's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from transfer_queue.calls import PIECE
from transfer_queue.control.rows import Rows, RowState, RowTable
from transfer_queue.protocol import Indexes, Tags, pack_tags, unpack_tags

_BLOCK = 4096
"""Consecutive indexes with their keys in one dict."""
_SHARDS = 64


class KeyMap:
    """key <-> global index, both ways."""

    def __init__(self) -> None:
        self._shards: list[dict[str, int]] = []  # key -> index, by the key's hash
        self._blocks: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """index -> key, by the index's block, in order of insertion."""
        self._size = 0
        self.watches: dict[object, dict[int, str]] = {}
        """By reader of the keys as they were: those of samples that are deleted, for ``names_of``."""

    def __len__(self) -> int:
        return self._size

    def bind(self, key: str, index: int) -> None:
        """Name a sample. The key must be unknown, and the sample newer than those named before."""
        if not self._shards:
            self._shards = [{} for _ in range(_SHARDS)]
        self._shards[hash(key) % _SHARDS][key] = index
        self._blocks[index // _BLOCK][index] = key
        self._size += 1

    def index_of(self, key: str) -> int | None:
        return self._shards[hash(key) % _SHARDS].get(key) if self._shards else None

    def indexes_of(self, keys: Sequence[str]) -> list[int | None]:
        """``index_of`` each key."""
        shards = self._shards
        return [shards[hash(key) % _SHARDS].get(key) for key in keys] if shards else [None] * len(keys)

    def key_of(self, index: int) -> str | None:
        block = self._blocks.get(index // _BLOCK)
        return None if block is None else block.get(index)

    def unbind(self, indexes: Iterable[int]) -> None:
        """Delete the keys of these samples."""
        for index in indexes:
            block = self._blocks.get(index // _BLOCK)
            key = None if block is None else block.pop(index, None)
            if block is None or key is None:
                continue
            if not block:
                del self._blocks[index // _BLOCK]
            del self._shards[hash(key) % _SHARDS][key]
            self._size -= 1
            for watch in self.watches.values():
                watch[index] = key

    def names_of(self, indexes: Indexes, gone: dict[int, str]) -> tuple[list[str], list[int]]:
        """(keys, their indexes): those of these samples that had a key when ``gone`` began."""
        if not self._size and not gone:
            return [], []
        named = [(gone.get(i) if (key := self.key_of(i)) is None else key, i) for i in indexes.tolist()]
        return [key for key, _ in named if key is not None], [i for key, i in named if key is not None]

    def freeing(self) -> Iterator[None]:
        """Frees the keys of a deleted partition, a dict at a time."""
        while self._blocks:
            self._blocks.popitem()
            yield
        while self._shards:
            self._shards.pop()
            yield

    def page(self, after: int, limit: int) -> tuple[list[tuple[str, int]], bool]:
        """The first keys of samples after this index with their indexes, and whether there are more."""
        found: list[tuple[str, int]] = []
        for number, block in self._blocks.items():
            if number < after // _BLOCK:
                continue
            for index, key in block.items():
                if index <= after:
                    continue
                if len(found) == limit:
                    return found, True
                found.append((key, index))
        return found, False

    def is_ascending(self) -> bool:
        """Whether all keys are in the order of their samples, and known both ways; for tests."""
        named = list(self.items())
        ascending = all(before < after for (_, before), (_, after) in pairwise(named))
        both_ways = all(self.index_of(key) == index for key, index in named)
        return ascending and both_ways and len(named) == self._size == sum(map(len, self._shards))

    def items(self) -> Iterator[tuple[str, int]]:
        """(key, index) of every sample with a key."""
        return ((key, index) for block in self._blocks.values() for index, key in block.items())


_COLUMN = "tags"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tags)


def unpacked_tags(packed: bytes | None) -> Tags:
    """The tags that ``TagStore.packed`` gave; ``{}`` for a sample without tags."""
    return _decoder.decode(packed) if packed else {}


class TagStore(Mapping[int, Tags]):
    """Global index -> tags, for samples with tags, in a column of the partition's table. Reads return copies."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.watches: dict[object, dict[int, bytes | None]] = {}
        """By reader of the tags as they were: those that have changed or are deleted, for ``save``."""
        self.late: Callable[[], None] | None = None
        """Sets the tags that say what became of groups. It is called before heads' tags are read."""

    def catch_up(self) -> None:
        """Set what is late."""
        if self.late is not None:
            self.late()

    def put(self, rows: Rows, tags: Sequence[Tags], merge: bool) -> None:
        """Set the tags of each row; ``merge`` keeps other existing tags."""
        column = self._table.ensure_column(_COLUMN, np.object_)
        before = column[rows].tolist()
        for watch in self.watches.values():
            for index, old in zip(self._table.column("index")[rows].tolist(), before, strict=True):
                watch.setdefault(index, old)
        if merge and any(before):
            pairs = zip(before, tags, strict=True)
            tags = [{**_decoder.decode(old), **new} if old else new for old, new in pairs]
        last, packed = None, None
        for row, own in zip(rows.tolist(), tags, strict=True):
            if own is not last:  # many groups wait with the same tags, which are one object in memory
                last, packed = own, _encoder.encode(own) if own else None
            column[row] = packed

    def of(self, indexes: Indexes, rows: Rows) -> dict[int, Tags]:
        """The tags of those samples that have some; ``rows`` are the samples' rows."""
        found = dict(zip(indexes.tolist(), unpack_tags(pack_tags(self.packed(rows))), strict=False))
        return {index: own for index, own in found.items() if own}

    def packed(self, rows: Rows) -> list[bytes | None]:
        """The tags of these rows as they are stored, for ``unpacked_tags``."""
        if not self._table.has_column(_COLUMN):
            return [None] * len(rows)
        if self.late is not None and (self._table.column("state")[rows] == RowState.HEAD).any():
            self.late()
        found: list[bytes | None] = self._table.column(_COLUMN)[rows].tolist()
        return found

    def has_any(self) -> bool:
        """Whether any sample has had tags."""
        return self._table.has_column(_COLUMN)

    def freeing(self) -> Iterator[None]:
        """Frees the tags of a deleted partition, a piece at a time."""
        if self._table.has_column(_COLUMN):
            column = self._table.column(_COLUMN)
            for start in range(0, len(column), PIECE):
                column[start : start + PIECE] = None
                yield

    def save(self, indexes: Indexes, before: Mapping[int, bytes | None]) -> tuple[list[int], list[bytes]]:
        """Which of these samples had tags when ``before`` began, by their position; and the tags, packed."""
        if not self._table.has_column(_COLUMN):
            return [], []
        self.catch_up()
        rows, found = self._table.find(indexes)
        column = self._table.column(_COLUMN)[rows] if self._table.size else np.empty(len(rows), dtype=np.object_)
        column[~found] = None
        packed = column.tolist()
        if before:
            packed = [before.get(i, own) for i, own in zip(indexes.tolist(), packed, strict=True)]
        return [at for at, own in enumerate(packed) if own], [own for own in packed if own]

    def load(self, rows: Rows, packed: Sequence[bytes]) -> None:
        """Set the tags of these rows, which must have none. Raises msgspec.DecodeError for bytes that aren't tags."""
        if not len(packed):
            return
        unpack_tags(pack_tags(packed))
        column = self._table.ensure_column(_COLUMN, np.object_)
        for row, own in zip(rows.tolist(), packed, strict=True):
            column[row] = own

    def delete(self, rows: Rows) -> None:
        """Delete the tags of these rows."""
        if not self._table.has_column(_COLUMN):
            return
        column = self._table.column(_COLUMN)
        for watch in self.watches.values():
            for index, own in zip(self._table.column("index")[rows].tolist(), column[rows].tolist(), strict=True):
                if own:
                    watch.setdefault(index, own)
        column[rows] = None

    def __getitem__(self, index: int) -> Tags:
        wanted = np.array([index], dtype=np.int64)
        rows, found = self._table.find(wanted)
        return self.of(wanted[found], rows[found])[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table.column("index")[self._rows()].tolist())

    def __len__(self) -> int:
        return len(self._rows())

    def _rows(self) -> Rows:
        if not self._table.has_column(_COLUMN):
            return np.empty(0, dtype=np.intp)
        return self._table.column(_COLUMN).nonzero()[0]
