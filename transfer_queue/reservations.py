# SPDX-License-Identifier: Apache-2.0
"""Indexes that a client holds for its next puts, so that a steady stream of puts needs no exchange to reserve them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from transfer_queue.utils.recent import RecentSizes

_MOST_PARTITIONS = 8
"""Producers go on to the next partition and never come back to the ones before."""
_STEADY_PUTS = 2
"""Ask ahead after so many puts into one partition: a lone put should leave no gap in the indexes."""


class Ahead(NamedTuple):
    """What a publish tells the controller about the next puts: how many indexes to reserve, which won't be used."""

    reserve: int
    unused: list[int]


class _Partition:
    """``runs``: what is held, ascending. ``passed``: what was, and is too little for the put that came."""

    def __init__(self) -> None:
        self.runs: list[range] = []
        self.passed: list[int] = []
        self.sizes = RecentSizes()

    def take(self, count: int) -> list[int] | None:
        while self.runs:
            run = self.runs.pop(0)
            if len(run) < count:
                self.passed += run
                continue
            if len(run) > count:
                self.runs.insert(0, run[count:])
            return list(run[:count])
        return None

    def wish(self) -> int:
        if len(self.sizes) <= _STEADY_PUTS:
            return 0
        room = self.sizes.room
        return 0 if any(len(run) >= room for run in self.runs) else room

    def add(self, run: range) -> None:
        if not self.runs:
            self.runs.append(run)
            return
        runs: list[range] = []
        for each in sorted([*self.runs, run], key=lambda each: each.start):
            if runs and runs[-1].stop == each.start:
                runs[-1] = range(runs[-1].start, each.stop)
            else:
                runs.append(each)
        self.runs = runs

    def give_up(self) -> list[int]:
        given_up = [*self.passed, *(index for run in self.runs for index in run)]
        self.runs, self.passed = [], []
        return given_up


class Reservations:
    """Per partition. The indexes of one put are neighbours: else samples of others would lie between those of a group.
    They ascend from put to put, as long as one comes after the other: so samples are drawn in the order of their puts.

    A fork's child starts with none: they are its parent's.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._partitions: dict[str, _Partition] = {}
        """The one that was put into last is the last."""

    def _here(self) -> threading.Lock:
        if self._pid != os.getpid():  # the lock may have been held by a thread that the fork did not copy
            self._begin()
        return self._lock

    def take(self, partition: str, count: int) -> list[int] | None:
        """Neighbours that are reserved for this partition, the lowest there are of so many.

        Shorter runs below them are passed over, for the next put must not get lower ones.
        """
        with self._here():
            held = self._partitions.get(partition)
            return None if held is None else held.take(count)

    def wish(self, partition: str, count: int) -> Ahead:
        """What the publish of so many samples should ask for ahead, and give back."""
        with self._here():
            held = self._latest(partition)
            held.sizes.note(count)
            for name in self._others_before():
                if not self._partitions[name].runs and not self._partitions[name].passed:
                    del self._partitions[name]
            passed, held.passed = held.passed, []
            return Ahead(held.wish(), passed)

    def keep(self, partition: str, indexes: Sequence[int]) -> dict[str, list[int]]:
        """Hold what the controller reserved, which are neighbours. Threads that put at the same time may each have
        asked for some.

        Returns the indexes of partitions that were not put into for the longest time, to be given back.
        """
        if not len(indexes):
            return {}
        with self._here():
            self._latest(partition).add(range(indexes[0], indexes[-1] + 1))
            left = self._others_before()
            return {name: given_up for name in left if (given_up := self._partitions.pop(name).give_up())}

    def drop(self, partition: str) -> list[int]:
        """Let go of what is held for a partition, and return it."""
        with self._here():
            held = self._partitions.get(partition)
            return [] if held is None else held.give_up()

    def _others_before(self) -> list[str]:
        """Partitions that were put into before the latest few."""
        return list(self._partitions)[:-_MOST_PARTITIONS] if len(self._partitions) > _MOST_PARTITIONS else []

    def _latest(self, partition: str) -> _Partition:
        held = self._partitions.pop(partition) if partition in self._partitions else _Partition()
        self._partitions[partition] = held
        return held
