# SPDX-License-Identifier: Apache-2.0
"""User keys of one partition: a second name of a sample, in order of insertion.

They lie in many small dicts: a single one of a million keys would hold up everybody each time it grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from transfer_queue.protocol import Indexes

_BLOCK = 4096
"""Consecutive indexes whose keys lie together."""
_SHARDS = 64


class KeyMap:
    """key <-> global index, both ways."""

    def __init__(self) -> None:
        self._shards: list[dict[str, int]] = []  # key -> index, by the key's hash
        self._blocks: dict[int, dict[int, str]] = {}  # index -> key, by the index's block, in order of insertion
        self._size = 0
        self._watches: list[dict[int, str]] = []

    def __len__(self) -> int:
        return self._size

    def bind(self, key: str, index: int) -> None:
        """Name a sample. The key must be unknown, and the sample newer than those named before."""
        if not self._shards:
            self._shards = [{} for _ in range(_SHARDS)]
        self._shards[hash(key) % _SHARDS][key] = index
        block = self._blocks.get(index // _BLOCK)
        if block is None:
            block = self._blocks[index // _BLOCK] = {}
        block[index] = key
        self._size += 1

    def index_of(self, key: str) -> int | None:
        return self._shards[hash(key) % _SHARDS].get(key) if self._shards else None

    def key_of(self, index: int) -> str | None:
        block = self._blocks.get(index // _BLOCK)
        return None if block is None else block.get(index)

    def forget(self, indexes: Iterable[int]) -> None:
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
            for watch in self._watches:
                watch[index] = key

    def watch(self) -> dict[int, str]:
        """From now on the names of samples that go are kept in here, for ``names_of``."""
        self._watches.append({})
        return self._watches[-1]

    def unwatch(self, watch: dict[int, str]) -> None:
        self._watches = [each for each in self._watches if each is not watch]

    def names_of(self, indexes: Indexes, gone: dict[int, str]) -> tuple[list[str], list[int]]:
        """(keys, their indexes): those of these samples that had a key when ``gone`` began."""
        if not self._size and not gone:
            return [], []
        named = [(gone.get(i) if (key := self.key_of(i)) is None else key, i) for i in indexes.tolist()]
        return [key for key, _ in named if key is not None], [i for key, i in named if key is not None]

    def shrink(self, count: int) -> bool:
        """Free so many keys, the last ones first, of a partition that is gone. Returns whether there are more."""
        for _ in range(min(count, self._size)):
            number = next(reversed(self._blocks))
            _, key = self._blocks[number].popitem()
            del self._shards[hash(key) % _SHARDS][key]
            if not self._blocks[number]:
                del self._blocks[number]
            self._size -= 1
        return bool(self._size)

    def page(self, after: str | None, limit: int) -> tuple[list[tuple[str, int]], bool]:
        """The first keys after this one with their indexes, and whether there are more.

        If the key was deleted, the page starts at the beginning.
        """
        last = None if after is None else self.index_of(after)
        found: list[tuple[str, int]] = []
        for number, block in self._blocks.items():
            if last is not None and number < last // _BLOCK:
                continue
            for index, key in block.items():
                if last is not None and index <= last:
                    continue
                if len(found) == limit:
                    return found, True
                found.append((key, index))
        return found, False

    def is_ascending(self) -> bool:
        """Are all keys in the order of their samples, and known both ways? For tests."""
        named = list(self.items())
        ascending = all(before < after for (_, before), (_, after) in pairwise(named))
        both_ways = all(self.index_of(key) == index for key, index in named)
        return ascending and both_ways and len(named) == self._size == sum(map(len, self._shards))

    def items(self) -> Iterator[tuple[str, int]]:
        return ((key, index) for block in self._blocks.values() for index, key in block.items())

    def mapping(self) -> dict[str, int]:
        """A copy: key -> index."""
        return dict(self.items())
