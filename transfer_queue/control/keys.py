# SPDX-License-Identifier: Apache-2.0
"""User keys of one partition: a second name of a sample, in order of insertion."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from transfer_queue.protocol import Indexes

_LEAST_GONE = 64


class KeyMap:
    """key <-> global index, both ways."""

    def __init__(self) -> None:
        self._index_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}
        self._order: list[int] = []  # indexes in order of insertion, which is ascending; some may be gone
        self._num_gone = 0
        self._watches: list[dict[int, str]] = []

    def __len__(self) -> int:
        return len(self._index_of)

    def bind(self, key: str, index: int) -> None:
        """Name a sample. The key must be unknown, and the sample newer than those named before."""
        self._index_of[key] = index
        self._key_of[index] = key
        self._order.append(index)

    def index_of(self, key: str) -> int | None:
        return self._index_of.get(key)

    def key_of(self, index: int) -> str | None:
        return self._key_of.get(index)

    def forget(self, indexes: Iterable[int]) -> None:
        """These samples are gone, and so are their names."""
        for index in indexes:
            key = self._key_of.pop(index, None)
            if key is not None:
                del self._index_of[key]
                self._num_gone += 1
                for watch in self._watches:
                    watch[index] = key
        if self._num_gone > _LEAST_GONE and 2 * self._num_gone > len(self._order):
            self._order, self._num_gone = list(self._key_of), 0

    def watch(self) -> dict[int, str]:
        """From now on the names of samples that go are kept in here, for ``names_of``."""
        self._watches.append({})
        return self._watches[-1]

    def unwatch(self, watch: dict[int, str]) -> None:
        self._watches = [each for each in self._watches if each is not watch]

    def names_of(self, indexes: Indexes, gone: dict[int, str]) -> tuple[list[str], list[int]]:
        """(keys, their indexes): those of these samples that had a key when ``gone`` began."""
        named = [(self._key_of.get(i, gone.get(i)), i) for i in indexes.tolist()]
        return [key for key, _ in named if key is not None], [i for key, i in named if key is not None]

    def shrink(self, count: int) -> bool:
        """Free so many keys, the last ones first, of a partition that is gone. Returns whether there are more."""
        for _ in range(min(count, len(self._index_of))):
            self._index_of.popitem()
            self._key_of.popitem()
        del self._order[len(self._index_of) :]
        return bool(self._index_of)

    def page(self, after: str | None, limit: int) -> tuple[list[tuple[str, int]], bool]:
        """The first keys behind this one, with their indexes, and whether there are more.

        They are the first ones of all where that key is gone.
        """
        last = None if after is None else self._index_of.get(after)
        found: list[tuple[str, int]] = []
        for at in range(0 if last is None else bisect_right(self._order, last), len(self._order)):
            key = self._key_of.get(self._order[at])
            if key is None:
                continue
            if len(found) == limit:
                return found, True
            found.append((key, self._order[at]))
        return found, False

    def is_ascending(self) -> bool:
        """Are all keys in the order of their samples? For tests, and for what a checkpoint brings."""
        named = list(self._key_of)
        return named == sorted(named) == list(self._index_of.values()) == [i for i in self._order if i in self._key_of]

    def items(self) -> Iterator[tuple[str, int]]:
        return iter(self._index_of.items())

    def mapping(self) -> dict[str, int]:
        """A copy: key -> index."""
        return dict(self._index_of)
