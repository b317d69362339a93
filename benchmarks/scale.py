# SPDX-License-Identifier: Apache-2.0
"""What each verb costs the control plane with many samples, ranks, tasks, partitions and sessions: CPU time, no socket.

Every axis grows alone from a small queue, then all of them together. ``us``: microseconds of CPU per request, or per
rank where all ranks ask. ``turn_ms``: the longest turn, which is what other clients wait for.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.common import arguments, in_fresh_process, report
from tests.local_plane import LocalPlane
from transfer_queue import protocol as p
from transfer_queue.calls import Turn

FIELDS = {name: p.FieldSpec("int64", (1024,)) for name in ("input_ids", "attention_mask", "rewards")}
NAMES = list(FIELDS)
BATCH = 8
ROUNDS = 4
REPEATS = 200
PER_PUT = 20_000
SECOND_S = 1.0


@dataclass(frozen=True)
class Size:
    """How large a queue is. Every task reads every partition with all ranks; sessions are ranks and producers."""

    samples: int = 10_000
    ranks: int = 8
    tasks: int = 1
    partitions: int = 1
    sessions: int = 8


SMALL = Size()
FULL = Size(samples=10**7, ranks=1024, tasks=8, partitions=100, sessions=1000)
AXES = {
    "samples": (10**4, 10**5, 10**6, 10**7),
    "ranks": (8, 64, 256, 1024),
    "tasks": (1, 8, 64),
    "partitions": (1, 100, 1000),
    "sessions": (8, 100, 1000),
}
QUICK = {"ranks": (8, 32), "sessions": (8,)}


class Clock:
    """CPU time of the turns of one kind of request."""

    def __init__(self) -> None:
        self.total_s = self.longest_s = 0.0

    def turn(self, act: Callable[[], list[Any]]) -> list[Any]:
        began = time.thread_time()
        replies = act()
        took = time.thread_time() - began
        self.total_s, self.longest_s = self.total_s + took, max(self.longest_s, took)
        return replies

    def figures(self, count: int) -> dict[str, float]:
        return {"us": self.total_s / count * 1e6, "turn_ms": self.longest_s * 1e3}


class Queue:
    """A plane of a given size, and requests to it. Time stands still unless a method moves it."""

    def __init__(self, size: Size, **config: Any) -> None:
        self.size = size
        self.plane = LocalPlane(**config)
        self.plane.calls.turn = Turn(time.process_time)  # a server's has a clock, too; others' work is not its own
        self.now = 0.0
        self._calls = itertools.count(1)
        self.partitions = [f"train@{number}" for number in range(size.partitions)]
        self.tasks = [f"task-{number}" for number in range(size.tasks)]
        self.clock = Clock()
        for task in self.tasks:
            self.ask("main", p.RegisterTask, task, "RankAwareSampler", size.ranks)

    def measured(self, count: int, act: Callable[[], Any]) -> dict[str, float]:
        """CPU time of everything that ``act`` asks for."""
        gc.collect()
        gc.disable()  # a server collects rarely, and has no torch to look through
        self.clock = Clock()
        act()
        gc.enable()
        return self.clock.figures(count)

    def ask(self, client: str, verb: Any, *args: Any, **kwargs: Any) -> Any:
        """The reply to this request; None while it is parked. The client has it at once, as if it had asked again."""
        request = verb(next(self._calls), *args, **kwargs)
        replies = self.clock.turn(lambda: self.plane.handle(client, request, self.now))
        for to in replies:
            self.plane.received(to.client, [to.reply.id])
            assert not isinstance(to.reply, p.Failed), to.reply
        self.plane.take_unused()
        return next((to.reply for to in replies if to.reply.id == request.id), None)

    def finish(self) -> None:
        """The turns that are due."""
        while (due := self.plane.next_deadline()) is not None and due <= self.now:
            for to in self.clock.turn(lambda: self.plane.expire(self.now)):
                self.plane.received(to.client, [to.reply.id])

    def put(self, partition: str, count: int, client: str = "producer") -> Any:
        reserved = self.ask(client, p.Reserve, partition, count, FIELDS)
        self.ask(client, p.Publish, partition, reserved.indexes, FIELDS, completes=reserved.id)
        self.finish()
        return reserved

    def fill(self) -> None:
        """The samples of this size, evenly over its partitions."""
        each = self.size.samples // self.size.partitions
        for partition in self.partitions:
            for start in range(0, each, PER_PUT):
                self.put(partition, min(PER_PUT, each - start))

    def fetch(self, partition: str, task: str, rank: int, index: int, wait_s: float = 0.0) -> Any:
        args = (partition, task, NAMES, BATCH, rank, index, self.size.ranks, wait_s)
        return self.ask(f"rank-{rank}", p.Fetch, *args, first_index=0)

    def park(self, partition: str, index: int) -> None:
        """Every rank of every task waits for this batch."""
        for task, rank in itertools.product(self.tasks, range(self.size.ranks)):
            self.fetch(partition, task, rank, index, wait_s=SECOND_S)

    # ---- what is measured ----

    def steps(self) -> dict[str, Any]:
        """Rounds that are ready: every rank fetches and acknowledges its batch, then the samples are cleared."""
        partition, task, ranks = self.partitions[-1], self.tasks[-1], range(self.size.ranks)
        batches = [[] for _ in range(ROUNDS)]
        self.put(partition, BATCH * self.size.ranks * (ROUNDS + 1))
        self.ask("rank-0", p.Fetch, partition, task, NAMES, BATCH, 0, 0, self.size.ranks)  # the task's first look

        def fetch() -> None:
            for index, rank in itertools.product(range(ROUNDS), ranks):
                batches[index].append(self.fetch(partition, task, rank, index))

        def ack() -> None:
            for given in batches:
                for rank, batch in enumerate(given):
                    self.ask(f"rank-{rank}", p.Ack, partition, task, [batch.token], earlier=True)

        def clear() -> None:
            for batch in batches[0]:
                self.ask("rank-0", p.ClearSamples, partition, batch.indexes)

        def clear_consumed() -> None:
            for _ in range(ROUNDS):
                self.ask("rank-0", p.ClearConsumed, partition, self.tasks)

        count = ROUNDS * self.size.ranks
        return {
            "put": self.measured(REPEATS, lambda: [self.put(partition, 1) for _ in range(REPEATS)]),
            "fetch": self.measured(count, fetch),
            "status": self.measured(1, lambda: self.ask("main", p.GetStats)),
            "ack": self.measured(count, ack),
            "clear": self.measured(len(ranks), clear),
            "clear_consumed": self.measured(ROUNDS, clear_consumed),
            "first_fetch_of_a_task": self.measured(1, lambda: self.fetch(partition, "new", 0, 0)),
            "list": self.measured(REPEATS, lambda: [self.ask("main", p.ListPartitions) for _ in range(REPEATS)]),
        }

    def waits(self) -> dict[str, Any]:
        """All ranks of all tasks wait for the first batch of an empty partition."""
        partition, count = "empty", self.size.ranks * self.size.tasks
        found = {"park": self.measured(count, lambda: self.park(partition, 0))}
        few = min(REPEATS, BATCH * self.size.ranks - 1)
        found["put_beside_parked"] = self.measured(few, lambda: [self.put(partition, 1) for _ in range(few)])
        found["status_beside_parked"] = self.measured(1, lambda: self.ask("main", p.GetStats))
        found["tick"] = self.measured(REPEATS, self._tick)
        missing = BATCH * self.size.ranks - few
        found["wake_all"] = self.measured(count, lambda: self.put(partition, missing))
        assert not self.plane.state.waits.count, "every rank has its batch"
        self.park(partition, 1)
        self.now += 2 * SECOND_S
        found["expire_all"] = self.measured(count, self.finish)
        self.park(partition, 1)
        found["rank_gone"] = self.measured(self.size.ranks, lambda: self._end("rank", self.size.ranks))
        return found

    def _tick(self) -> None:
        for _ in range(REPEATS):
            self.clock.turn(lambda: [] if self.plane.next_deadline() is None else self.plane.expire(self.now))

    def _end(self, kind: str, count: int) -> None:
        for number in range(count):
            self.clock.turn(lambda number=number: self.plane.client_gone(f"{kind}-{number}", self.now))

    def producers(self) -> dict[str, Any]:
        """Each session has reserved samples that it still writes; then a step of one of them."""
        partition, names = self.partitions[0], [f"writer-{number}" for number in range(self.size.sessions)]
        reserve = self.measured(len(names), lambda: [self.ask(n, p.Reserve, partition, 8, FIELDS) for n in names])
        put = self.measured(REPEATS, lambda: [self.put(partition, 1, "writer-0") for _ in range(REPEATS)])
        poll = self.measured(1, lambda: self.ask("main", p.Fetch, partition, "waits", ["absent"], 1))
        return {
            "reserve": reserve,
            "put_of_one_of_them": put,
            "poll_that_names_them": poll,
            "writer_gone": self.measured(len(names), lambda: self._end("writer", len(names))),
        }


def full(size: Size) -> dict[str, Any]:
    """A queue without room: each session waits to put, and others go on."""
    queue = Queue(replace(size, ranks=1, partitions=1), capacity=1000)
    queue.put("train@0", 1000)
    first = queue.fetch("train@0", "task-0", 0, 0)
    for number in range(size.sessions):
        queue.ask(f"writer-{number}", p.Reserve, "train@0", 8, FIELDS, wait_s=SECOND_S)

    def go_on() -> None:
        for _ in range(REPEATS):
            queue.ask("rank-0", p.Ack, "train@0", "task-0", [first.token])

    found = {"ack_beside_full": queue.measured(REPEATS, go_on)}
    queue.now += 2 * SECOND_S
    return {**found, "writers_expire": queue.measured(size.sessions, queue.finish)}


def measured(size: Size) -> dict[str, Any]:
    """Figures of a queue of this size, in a process of its own."""
    process = psutil.Process()
    before = process.memory_info().rss
    queue = Queue(size)
    queue.fill()
    filled = process.memory_info().rss
    found = {**queue.steps(), **queue.waits(), **queue.producers(), **full(size)}
    after = process.memory_info().rss
    stored = (filled - before) / max(1, size.samples)
    return {**found, "bytes_per_sample": stored, "mib": (after - before) / 2**20}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=[*AXES, "full"], help="one axis")
    args = parser.parse_args(argv)
    axes: dict[str, tuple[int, ...]] = dict(QUICK if args.quick else AXES)
    if args.only:
        axes = {name: values for name, values in axes.items() if name == args.only}
    figures: dict[str, Any] = {}
    for axis, values in axes.items():
        sizes = {value: replace(SMALL, **{axis: value}) for value in values}
        run = measured if args.quick else partial(in_fresh_process, measured, deadline_s=600.0)
        figures[axis] = {value: run(size) for value, size in sizes.items()}
    if not args.quick and args.only in (None, "full"):
        figures["full"] = {**asdict(FULL), **in_fresh_process(measured, FULL, deadline_s=600.0)}
    report("cost of the control plane by size", small=asdict(SMALL), batch=BATCH, rounds=ROUNDS, **figures)


if __name__ == "__main__":
    main()
