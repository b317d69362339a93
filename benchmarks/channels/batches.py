# SPDX-License-Identifier: Apache-2.0
"""The work that is the same on every channel: what the producer puts, and what the reader does with it."""

# Runs in the peer's and Ray's environment, too, so it must not import either package.

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from benchmarks import cases

SIZE = 32
AHEAD = 8
"""Batches that the producer may have put and the reader has not taken."""
DEADLINE_S = 60.0
Fields = dict[str, torch.Tensor]


class Channel(NamedTuple):
    """A running producer, seen by the reader."""

    batches: Iterator[Any]
    """The values of each batch, by field; every one has come when it is yielded."""
    put_times: Callable[[], list[float]]
    """Seconds of each put; called once, when all batches were read."""


Open = Callable[[int, int, bool, str], AbstractContextManager[Channel]]
"""open(batches, torch threads of the producer, cleared, an empty folder)."""


def rl_batch() -> Fields:
    """The same values in every process: 1.75 MiB in five fields."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dict(cases.rl_batch(SIZE).items())


def copied(batch: Any) -> Fields:
    """In memory of its own, as a producer makes each batch anew."""
    return {name: value.clone() for name, value in batch.items()}


def produce(
    put: Callable[[Fields], None], batches: int, threads: int, await_room: Callable[[], object] | None = None
) -> list[float]:
    """Put batches as fast as the channel takes them; the seconds of each ``put``.

    A channel without a bound of its own has ``await_room``; where there is none, ``put`` waits for room itself.
    """
    torch.set_num_threads(threads)
    batch, times = rl_batch(), []
    for _ in range(batches):
        fresh = copied(batch)
        if await_room is not None:
            await_room()
        started = time.perf_counter()
        put(fresh)
        times.append(time.perf_counter() - started)
    return times


def consume(channel: Channel, batches: int, threads: int) -> dict[str, float]:
    """Add up every value of every batch. The time starts when the first batch has come."""
    torch.set_num_threads(threads)
    found, sums_s, started = 0.0, 0.0, 0.0
    for batch in itertools.islice(channel.batches, batches):
        began = time.perf_counter()
        started = started or began
        found += cases.total(batch)
        sums_s += time.perf_counter() - began
    elapsed = time.perf_counter() - started
    times = channel.put_times()
    alone_s = sums_alone_s(batch, batches)
    expected = batches * cases.total(rl_batch())
    if not math.isclose(found, expected, rel_tol=1e-6):
        raise RuntimeError(f"all values add up to {found}, not to {expected}: a batch came wrong, twice or not at all.")
    return {
        "rows_per_s": (batches - 1) * SIZE / elapsed,
        "sums_s": sums_s,
        "sums_alone_s": alone_s,
        "put_p50_ms": statistics.median(times) * 1e3,
    }


def sums_alone_s(batch: Any, batches: int) -> float:
    """What the sums of so many batches take when they lie there already and nothing else runs."""
    there = [copied(batch) for _ in range(AHEAD)]
    started = time.perf_counter()
    for number in range(batches):
        cases.total(there[number % AHEAD])
    return time.perf_counter() - started
