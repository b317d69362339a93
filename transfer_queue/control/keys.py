# SPDX-License-Identifier: Apache-2.0
"""User keys of one partition: a second name of a sample, in order of insertion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KeyMap:
    """key <-> global index, both ways."""

    def __init__(self) -> None:
        self._index_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._index_of)

    def bind(self, key: str, index: int) -> None:
        """Name a sample. The key must be unknown."""
        self._index_of[key] = index
        self._key_of[index] = key

    def index_of(self, key: str) -> int | None:
        return self._index_of.get(key)

    def key_of(self, index: int) -> str | None:
        return self._key_of.get(index)

    def forget(self, indexes: Iterable[int]) -> None:
        """These samples are gone, and so are their names."""
        if not self._key_of:
            return
        for index in indexes:
            key = self._key_of.pop(index, None)
            if key is not None:
                del self._index_of[key]

    def items(self) -> Iterator[tuple[str, int]]:
        return iter(self._index_of.items())

    def mapping(self) -> dict[str, int]:
        """A copy: key -> index."""
        return dict(self._index_of)
