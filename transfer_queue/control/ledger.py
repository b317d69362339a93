# SPDX-License-Identifier: Apache-2.0
"""What each (dp_rank, batch_index) of one task in one partition was given, until it is settled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import Indexes

BatchKey = tuple[int | None, int]
"""(dp_rank, batch_index)"""


@dataclass(slots=True)
class Entry:
    """One batch. ``consumes``: those of its samples that nobody else gets.

    ``owned`` counts the ones this entry holds consumed and that aren't cleared yet.
    """

    key: BatchKey
    number: int
    indexes: Indexes
    consumes: Indexes
    token: str
    padding: npt.NDArray[np.uint8] | None = None
    owned: int = 0


class _Settled:
    """Batch indexes of one rank that are settled: everything below a mark, and a few above it."""

    def __init__(self) -> None:
        self.below = 0
        self._above: set[int] = set()

    def add(self, batch_index: int) -> None:
        self._above.add(batch_index)
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1

    def __contains__(self, batch_index: int) -> bool:
        return batch_index < self.below or batch_index in self._above


class Ledger:
    """Entries by batch and by number; settled batches leave only a mark, so the ledger stays bounded."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: dict[BatchKey, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._settled: dict[int | None, _Settled] = {}
        self._next_index: dict[int | None, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: BatchKey) -> Entry | None:
        return self._entries.get(key)

    def is_settled(self, key: BatchKey) -> bool:
        settled = self._settled.get(key[0])
        return settled is not None and key[1] in settled

    def next_index(self, dp_rank: int | None) -> int:
        """The batch after the last one that this rank asked for without naming a batch_index."""
        return self._next_index.get(dp_rank, 0)

    def took(self, key: BatchKey) -> None:
        """The rank has been given this batch, so its next unnamed one is a later one."""
        self._next_index[key[0]] = max(self.next_index(key[0]), key[1] + 1)

    def write(
        self, key: BatchKey, indexes: Indexes, consumes: Indexes, padding: npt.NDArray[np.uint8] | None = None
    ) -> Entry:
        """A new entry. The key must be free."""
        self._count += 1
        entry = Entry(key, self._count, indexes, consumes, f"{self._name}#{self._count}", padding)
        self._entries[key] = entry
        self._by_number[entry.number] = entry
        return entry

    def ack(self, tokens: Iterable[str]) -> int:
        """Settle the batches of these tokens; unknown or late ones settle nothing. Returns how many were settled."""
        settled = 0
        for token in tokens:
            name, _, number = token.rpartition("#")
            entry = self._by_number.get(int(number)) if name == self._name and number.isdigit() else None
            if entry is not None:
                self._settle(entry)
                settled += 1
        return settled

    def samples_cleared(self, numbers: npt.NDArray[np.int32]) -> None:
        """Samples of these entries were cleared, one number per sample; an entry with none left is settled."""
        given, counts = np.unique(numbers[numbers > 0], return_counts=True)
        for number, count in zip(given.tolist(), counts.tolist(), strict=True):
            entry = self._by_number.get(number)
            if entry is None:
                continue
            entry.owned -= count
            if entry.owned <= 0:
                self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        del self._entries[entry.key]
        del self._by_number[entry.number]
        self._settled.setdefault(entry.key[0], _Settled()).add(entry.key[1])

    def reset(self) -> None:
        """After a reset of consumption settled batch indexes may be drawn anew, and no entry owns samples."""
        self._settled.clear()
        self._next_index.clear()
        for entry in self._entries.values():
            entry.owned = 0

    def check_invariants(self, given: npt.NDArray[np.int32]) -> None:
        """``given``: the entry number of each live sample. Raises AssertionError; for tests."""
        assert len(self._entries) == len(self._by_number), "entries are known both ways"
        numbers, counts = np.unique(given[given > 0], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            entry = self._by_number.get(number)
            assert entry is None or entry.owned == count, f"entry {number} owns {count} live samples"
        for key, entry in self._entries.items():
            assert entry.key == key and not self.is_settled(key), f"{key} is settled and still there"
