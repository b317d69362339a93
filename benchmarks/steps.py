# SPDX-License-Identifier: Apache-2.0
"""Where does a client's time go in a put, a get, and a batch of a stream? Prints one JSON line.

A clock around each step, without those within it. Microseconds, the median of each step by itself: they add up nearly.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

import transfer_queue as tq
from benchmarks import cases
from benchmarks.common import arguments, report
from benchmarks.small_ops import one_sample
from transfer_queue import protocol
from transfer_queue.client import get, put
from transfer_queue.dataloader.fetching import BatchFetcher
from transfer_queue.storage import pack, recycling, unpack, unpack_fast
from transfer_queue.storage.copying import Copies
from transfer_queue.storage.shm import read, shared_memory
from transfer_queue.transport import caller
from transfer_queue.transport.unix import UnixConnection

STEPS: dict[str, list[tuple[Any, str]]] = {
    "describe the batch": [(put, "as_rows"), (put, "described_rows"), (put, "to_specs")],
    "columns of tensors": [(pack, "prepare")],
    "messages": [
        (protocol, "encode_request"),
        (protocol, "decode_reply"),
        (shared_memory, "decode_answer"),
        (shared_memory, "encode_columns"),
        (read, "unpack_columns"),
    ],
    "send": [(UnixConnection, "send")],
    "wait for the answer": [(caller, "wait_for_some")],
    "metadata": [(get, "to_meta")],
    "memory for the batch": [(recycling, "empty")],
    "copy": [(Copies, "finish"), (Copies, "__call__")],
    "tensors of columns": [(unpack, "unpack"), (unpack_fast.Jagged, "__call__"), (unpack_fast.Jagged, "even")],
    "ask for the next batch": [(BatchFetcher, "__call__")],
    "look at every page": [(cases, "touch")],
}
OTHER = "other Python"
SEND = "send"


class Clock:
    """Seconds per step of one thread; within a step the clock of the one around it stands still."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.messages = 0
        self._within = [OTHER]
        self._since = 0.0

    def begin(self) -> None:
        self.seconds.clear()
        self.messages = 0
        self._since = time.perf_counter()

    def end(self) -> dict[str, float]:
        self._pass_to(self._within[-1])
        return dict(self.seconds)

    def enter(self, step: str) -> None:
        self._pass_to(self._within[-1])
        self._within.append(step)
        self.messages += step == SEND

    def leave(self) -> None:
        self._pass_to(self._within.pop())

    def _pass_to(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{function} is no step: other steps may run while it waits.")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(step)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Every step tells the clock."""
    whole = [(owner, name, vars(owner)[name], step) for step, found in STEPS.items() for owner, name in found]
    for owner, name, function, step in whole:
        setattr(owner, name, clock.timed(function, step))
    try:
        yield
    finally:
        for owner, name, function, _ in whole:
            setattr(owner, name, function)


def medians(clock: Clock, call: Callable[[], Any], repeats: int, between: Callable[[], Any] | None = None) -> Any:
    """Microseconds of each step of a call, and of the whole call; and how many messages it sends."""
    for _ in range(3):
        call()
        if between is not None:
            between()
    found, totals, messages = [], [], []
    for _ in range(repeats):
        clock.begin()
        call()
        found.append(clock.end())
        totals.append(sum(found[-1].values()))
        messages.append(clock.messages)
        if between is not None:
            between()
    names = [name for name in (*STEPS, OTHER) if any(name in each for each in found)]
    steps = {name: statistics.median(each.get(name, 0.0) for each in found) * 1e6 for name in names}
    kept = {name: us for name, us in steps.items() if us >= 0.5}
    return {"us": statistics.median(totals) * 1e6, "messages": statistics.median(messages), "steps_us": kept}


def put_and_get(clock: Clock, client: tq.TransferQueueClient, data: TensorDict, repeats: int) -> dict[str, Any]:
    metas: list[tq.BatchMeta] = []
    put = medians(
        clock,
        lambda: metas.append(client.put(data, partition_id="steps")),
        repeats,
        lambda: client.clear_samples(metas.pop()) if len(metas) > 1 else None,
    )
    get = medians(clock, lambda: client.get_data(metas[0]), repeats)
    client.clear_partition("steps")
    return {"put": put, "get": get}


def small(clock: Clock, client: tq.TransferQueueClient, repeats: int) -> dict[str, Any]:
    data = one_sample()
    put = medians(clock, lambda: client.put(data, partition_id="small"), repeats + 3)
    get = medians(clock, lambda: client.get_data(client.get_meta(["x"], 1, "small", task_name="read")), repeats)
    client.clear_partition("small")
    return {"put": put, "fetch and get": get}


def batch_of_a_stream(clock: Clock, conf: Any, client: tq.TransferQueueClient, repeats: int) -> Any:
    """As a reader without workers that fetches its batches itself, and looks at every page."""
    data, beside = cases.rl_batch(32), 24
    for _ in range(repeats + beside):
        client.put(data, partition_id="stream")
    dataset = tq.StreamingDataset(conf, 32, 32, list(data.keys()), "stream", "train", 0)
    batches = iter(tq.StreamingDataLoader(dataset, num_workers=0))

    def look() -> None:
        cases.touch(next(batches)[0])

    for _ in range(beside // 2):
        look()
    found = medians(clock, look, repeats)
    client.clear_partition("stream")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    repeats = 3 if args.quick else 200
    conf, clock = tq.init(), Clock()
    client = tq.get_client()
    with watched(clock):
        figures = {
            "1 KiB": small(clock, client, repeats),
            "jagged 4 MiB": put_and_get(clock, client, cases.jagged(), repeats),
            "RL batch 56 MiB": put_and_get(
                clock, client, cases.rl_batch(*((8, 16) if args.quick else ())), repeats // 3
            ),
            "batch of a stream, 1.75 MiB": batch_of_a_stream(clock, conf, client, repeats),
        }
    report("where a client's time goes", repeats=repeats, **figures)
    tq.close()


if __name__ == "__main__":
    main()
