# SPDX-License-Identifier: Apache-2.0
"""Ready sets by what they answer: the latest ones are kept, and all those that a waiting request holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from transfer_queue.control.ready import ReadySet

K = TypeVar("K", bound=Hashable)
_MOST = 32
"""Sets that are kept although no request holds them: those used last. Others are made by one scan when they are asked
for again."""


class KeptSets(Generic[K]):
    """Every set that may still be asked is here, so that changes of samples reach it."""

    def __init__(self) -> None:
        self._latest: dict[K, ReadySet] = {}
        self._held: WeakValueDictionary[K, ReadySet] = WeakValueDictionary()  # by requests alone

    def get(self, key: K, make: Callable[[], ReadySet]) -> ReadySet:
        """The set for this key, made if it is not here."""
        found = self._latest.pop(key, None)
        if found is None:
            found = self._held.pop(key, None) or make()
            if len(self._latest) >= _MOST:
                oldest = next(iter(self._latest))
                self._held[oldest] = self._latest.pop(oldest)
        self._latest[key] = found
        return found

    def items(self) -> Iterable[tuple[K, ReadySet]]:
        return [*self._latest.items(), *self._held.items()] if self._held else self._latest.items()

    def clear(self) -> None:
        self._latest.clear()
        self._held.clear()
