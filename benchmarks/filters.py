# SPDX-License-Identifier: Apache-2.0
"""What a filter over tags costs the control plane among many ready samples: a clock around its turns, one JSON line."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import arguments, report
from tests.local_plane import LocalPlane
from transfer_queue import protocol as p

READY, QUICK_READY = 1_000_000, 20_000
BATCH = 32
PER_PUT = 20_000


class Turns:
    """Sends requests to a plane, and notes how long each turn takes."""

    def __init__(self) -> None:
        self.plane = LocalPlane()
        self.took_ms: list[float] = []
        self._ids = itertools.count(1)

    def ask(self, verb: Any, *args: Any, **kwargs: Any) -> Any:
        request = verb(next(self._ids), *args, **kwargs)
        replies = self._timed(lambda: self.plane.handle("c", request, 0.0))
        self.plane.received("c", [request.id])
        return next((to.reply for to in replies if to.reply.id == request.id), None)

    def finish(self) -> list[Any]:
        """Do what is left for later turns."""
        replies = []
        while self.plane.next_deadline() == -math.inf:
            replies += self._timed(lambda: self.plane.expire(0.0))
        return replies

    def _timed(self, act: Callable[[], list[Any]]) -> list[Any]:
        began = time.perf_counter()
        replies = act()
        self.took_ms.append((time.perf_counter() - began) * 1e3)
        return replies

    def fetch(self, where: str | None, wait_s: float = 0.0, size: int = BATCH) -> Any:
        return self.ask(p.Fetch, "p", "train", ["x"], size, wait_s=wait_s, where=where)

    def put(self, count: int) -> None:
        reserved = self.ask(p.Reserve, "p", count)
        indexes = p.unpack_indexes(reserved.indexes).tolist()
        tags = {i: {"policy_version": i // 1000, "env": ("math", "code")[i % 2], "reward": i / 7} for i in indexes}
        specs = {"x": p.FieldSpec("int64", (4,))}
        self.ask(p.Publish, "p", reserved.indexes, specs, tags, completes=reserved.id)


def longest_ms(turns: Turns, act: Callable[[], Any], times: int = 100) -> float:
    """The longest turn of a call; the median of many calls."""
    longest = []
    for _ in range(times):
        turns.took_ms.clear()
        act()
        longest.append(max(turns.took_ms))
    return statistics.median(longest)


def measured(ready: int) -> dict[str, Any]:
    turns = Turns()
    for _ in range(ready // PER_PUT):
        turns.put(PER_PUT)
    turns.fetch(None)
    where = f"policy_version >= {ready // 2000} and env == 'math'"
    turns.took_ms.clear()
    turns.fetch(where, wait_s=1.0)
    turns.finish()
    first = list(turns.took_ms)
    found = {
        "ready": ready,
        "first_fetch_ms": sum(first),
        "first_fetch_turns": len(first),
        "first_fetch_longest_turn_ms": max(first),
        "fetch_without_filter_ms": longest_ms(turns, lambda: turns.fetch(None)),
        "fetch_ms": longest_ms(turns, lambda: turns.fetch(where)),
        "put_ms": longest_ms(turns, lambda: turns.put(1)),
    }
    turns.fetch("env == 'none'", wait_s=1e6)
    turns.finish()
    return {**found, "put_beside_parked_fetch_ms": longest_ms(turns, lambda: turns.put(1))}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    report("a fetch with a filter over tags", **measured(QUICK_READY if args.quick else READY))


if __name__ == "__main__":
    main()
