# SPDX-License-Identifier: Apache-2.0
"""The meter: what one server counts of its requests, their values and its loop. Plain numbers, read by GetStats."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from transfer_queue import protocol as p
from transfer_queue.protocol import unpack_indexes, unpack_tags
from transfer_queue.storage.messages import Delete, Read, UnitRequest, Write

REQUEST_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LOOP_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
AGE_BOUNDS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)
VERSION_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
BOUNDS = {"seconds": REQUEST_BOUNDS_S, "loop": LOOP_BOUNDS_S, "age_s": AGE_BOUNDS_S, "versions": VERSION_BOUNDS}
VERSION_TAG = "policy_version"
"""Samples with this tag tell which version of the policy made them."""

_NAMES: dict[type[p.Request], str] = {
    p.Fetch: "GET_META", p.Publish: "NOTIFY_DATA_UPDATE", p.ClearSamples: "CLEAR_META", p.ListKeys: "KV_LIST",
    p.ResolveKeys: "KV_RETRIEVE_META", p.KeysOf: "KV_RETRIEVE_KEYS", p.ConsumptionStatus: "GET_CONSUMPTION",
    p.Put: "PUT", Write: "PUT", Read: "GET", Delete: "CLEAR_DATA",
}  # fmt: skip
"""Names that readers of TransferQueue's metrics know. Others are named after their message."""
_OF_UNITS: tuple[type[p.Request], ...] = (p.Put, *get_args(UnitRequest))
_MOST_TASKS = 100
_OTHERS = "(others)"
_MOST_MARKS = 4096
_FIRST_RESOLUTION_S = 0.01
_LATELY_S = 60.0
_OLDEST = -(2**63)
"""No int of a message is less."""


class Histogram:
    """Counts of values: at most the first bound, at most the second, …, more than the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def plain(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "sum": self.total}


class _Verb:
    """Requests of one kind that were answered."""

    __slots__ = ("errors", "name", "of_unit", "samples", "seconds")

    def __init__(self, kind: type[p.Request]) -> None:
        self.name = _NAMES.get(kind) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()
        self.of_unit = issubclass(kind, _OF_UNITS)
        self.seconds = Histogram(REQUEST_BOUNDS_S)
        self.errors = self.samples = 0

    def plain(self) -> dict[str, Any]:
        return {"seconds": self.seconds.plain(), "errors": self.errors, "samples": self.samples}


class _Ages:
    """When samples were reserved, as far as their age needs it: indexes ascend with time, so a few marks will do."""

    def __init__(self) -> None:
        self._indexes: list[int] = []
        self._times: list[float] = []
        self._resolution_s = _FIRST_RESOLUTION_S
        self.next_mark = -1.0
        """Until then, samples count as reserved at the last mark."""

    def mark(self, index: int, now: float) -> None:
        """This sample is reserved now, and so are later ones."""
        if self._indexes and index <= self._indexes[-1]:
            return
        self._indexes.append(index)
        self._times.append(now)
        if len(self._indexes) > _MOST_MARKS:
            self._resolution_s *= 2
            del self._indexes[1::2], self._times[1::2]
        self.next_mark = now + self._resolution_s

    def of(self, index: int, now: float) -> float | None:
        """Seconds since this sample was reserved; None for one from before this server."""
        at = bisect_right(self._indexes, index)
        return now - self._times[at - 1] if at else None


class _Newest:
    """The newest version that was put lately: in the present minute with puts, or in the one before it.

    So a run that begins again at version 0, or one wrong version, is not measured by what was long ago.
    """

    def __init__(self) -> None:
        self._before = self._this_minute = _OLDEST
        self._ends = -math.inf
        self.version: int | None = None
        """None: no version was put."""

    def put(self, version: int, now: float) -> None:
        if now >= self._ends:
            self._before, self._this_minute, self._ends = self._this_minute, version, now + _LATELY_S
        self._this_minute = max(self._this_minute, version)
        self.version = max(self._before, self._this_minute)


class Meter:
    """Every answer passes it, so it does little: some integers per request, and nothing in proportion to samples,
    except to those with a version tag.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        version_of: Callable[[str], int | None] = lambda partition: None,
    ) -> None:
        """``version_of``: of a partition, the version that trains its groups."""
        self._clock = clock
        self._version_of = version_of
        self._verbs: dict[type[p.Request], _Verb] = {}
        self._loop = Histogram(LOOP_BOUNDS_S)
        self._ages = _Ages()
        self._age_s: dict[str, Histogram] = {}
        self._versions: dict[str, Histogram] = {}
        self._newest = _Newest()

    # ---- what happens ----

    def turn(self, seconds: float) -> None:
        """The loop was busy for so long, and a request that came meanwhile waited."""
        self._loop.add(seconds)

    def answered(self, request: Any, since: float, reply: p.Reply) -> None:
        """A request that came at ``since`` was answered. The time it waited for others counts."""
        kind, now = type(request), self._clock()
        verb = self._verbs.get(kind)
        if verb is None:
            verb = self._verbs[kind] = self._verb_of(kind)
        verb.seconds.add(now - since)
        if isinstance(reply, p.Failed):
            verb.errors += 1
            return
        if (kind is p.Put or kind is p.Publish) and request.tags:
            self._put(request.tags, now)
        begin = request.begin if kind is p.Put else request
        indexes = getattr(reply, "indexes", None) or getattr(begin, "indexes", None)
        if not indexes:
            return
        verb.samples += len(indexes) // 8
        if isinstance(reply, p.Reserved) and now >= self._ages.next_mark:
            self._ages.mark(_first(indexes), now)
        elif isinstance(reply, p.Batch) and isinstance(request, p.Fetch):
            self._handed_out(request.task, reply, now)

    def _verb_of(self, kind: type[p.Request]) -> _Verb:
        """The one with this name, which two kinds may share."""
        new = _Verb(kind)
        return next((verb for verb in self._verbs.values() if verb.name == new.name), new)

    def _put(self, tags: dict[int, p.Tags], now: float) -> None:
        versions = _versions(tags.values())
        if versions:
            self._newest.put(max(versions), now)

    def _handed_out(self, task: str, batch: p.Batch, now: float) -> None:
        oldest = _first(batch.indexes) if len(batch.indexes) == 8 else int(unpack_indexes(batch.indexes).min())
        age_s = self._ages.of(oldest, now)
        if age_s is not None:
            _of(self._age_s, task, AGE_BOUNDS_S).add(age_s)
        newest = self._version_of(batch.partition) if batch.versions else self._newest.version
        if newest is not None and (batch.versions or batch.tags):
            histogram = _of(self._versions, task, VERSION_BOUNDS)
            for version in batch.versions.values() or _versions(unpack_tags(batch.tags)):
                histogram.add(max(0, newest - version))

    # ---- what came of it ----

    def of_controller(self) -> dict[str, Any]:
        """``requests`` by name, each with its latencies; ``loop``: how long each turn took; ``age_s``: of the oldest
        sample of each batch, by task; ``versions``: versions behind the newest group or sample, by task.
        """
        return {
            "bounds": {name: list(bounds) for name, bounds in BOUNDS.items()},
            "requests": self._requests(of_unit=False),
            "loop": self._loop.plain(),
            "age_s": {task: histogram.plain() for task, histogram in self._age_s.items()},
            "versions": {task: histogram.plain() for task, histogram in self._versions.items()},
        }

    def of_unit(self, put_nbytes: Mapping[str, int], got_nbytes: Mapping[str, int]) -> dict[str, Any]:
        """``requests`` as above; ``bytes`` of values in messages, and in memory that client and unit share.

        Args:
            put_nbytes: Those that the unit has committed.
            got_nbytes: Those that readers were given.
        """
        return {"requests": self._requests(of_unit=True), "bytes": {"put": put_nbytes, "get": got_nbytes}}

    def _requests(self, of_unit: bool) -> dict[str, Any]:
        return {verb.name: verb.plain() for verb in self._verbs.values() if verb.of_unit is of_unit}


def _first(indexes: bytes) -> int:
    return int.from_bytes(indexes[:8], "little")


def _versions(tags: Iterable[p.Tags]) -> list[int]:
    return [version for own in tags if type(version := own.get(VERSION_TAG)) is int]


def _of(histograms: dict[str, Histogram], task: str, bounds: Sequence[float]) -> Histogram:
    """The task's histogram. There are so many at most, whatever tasks are called."""
    found = histograms.get(task)
    if found is None:
        name = task if len(histograms) < _MOST_TASKS else _OTHERS
        found = histograms.setdefault(name, Histogram(bounds))
    return found
