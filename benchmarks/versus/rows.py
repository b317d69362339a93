# SPDX-License-Identifier: Apache-2.0
"""The work that both packages do: one row, one function of a client and the queue's configuration."""

# Both packages run this file. It uses what they have in common: names of the public API, and no option of only one.

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from benchmarks import cases, control_rate, loader, put_get_bandwidth, small_ops, stream_latency
from benchmarks.common import memcpy

Figures = dict[str, float]
REPEATS = 15  # of a large put and get; a slow case gets fewer
POLL_S = 1.0  # the peer's pause between two looks at an empty queue


@dataclass(frozen=True)
class Row:
    """``measure(client, conf, quick)``; ``streaming`` rows need the queue set up for a loader."""

    measure: Callable[[Any, Any, bool], Figures]
    streaming: bool = False
    rounds: int = 3
    deadline_s: float = 180.0


def _bandwidth(make: Callable[[], TensorDict]) -> Callable[[Any, Any, bool], Figures]:
    def measure(client: Any, conf: Any, quick: bool) -> Figures:
        data = make()
        before = memcpy(cases.nbytes(data)).torch_ms
        found = put_get_bandwidth.put_get_ms(client, data, 2 if quick else REPEATS)
        # Memory of a shared machine has fast and slow seconds.
        return {**found, "memcpy_ms": (before + memcpy(cases.nbytes(data)).torch_ms) / 2}

    return measure


def _small(client: Any, conf: Any, quick: bool) -> Figures:
    return small_ops.p50_ms(client, 100 if quick else small_ops.OPERATIONS)


def _operations(clients: int) -> Callable[[Any, Any, bool], Figures]:
    def measure(client: Any, conf: Any, quick: bool) -> Figures:
        return {"per_s": small_ops.operations_per_s(client, conf, clients, 100 if quick else small_ops.OPERATIONS)}

    return measure


def _fetch(samples: int) -> Callable[[Any, Any, bool], Figures]:
    return lambda client, conf, quick: control_rate.fetch_among_ms(client, samples, 10 if quick else 100)


def _beside(client: Any, conf: Any, quick: bool) -> Figures:
    return control_rate.fetch_beside_ms(client, 200, 10 if quick else 100)


def _latency(client: Any, conf: Any, quick: bool) -> Figures:
    found = stream_latency.latencies_ms(conf, 0, 1, 4 if quick else 20, (0.0, POLL_S))
    return {"p50_ms": statistics.median(found)}


def _loader(workers: int) -> Callable[[Any, Any, bool], Figures]:
    def measure(client: Any, conf: Any, quick: bool) -> Figures:
        return loader.stream(conf, workers, 40 if quick else 200, clear=False)

    return measure


ROWS = {
    "dense_64_mib": Row(_bandwidth(lambda: cases.dense(64))),
    "dense_256_mib": Row(_bandwidth(lambda: cases.dense(256))),
    "rl_batch": Row(_bandwidth(cases.rl_batch)),
    "jagged": Row(_bandwidth(cases.jagged)),
    "strings": Row(_bandwidth(cases.strings)),
    "small": Row(_small),
    "operations_1": Row(_operations(1)),
    "operations_4": Row(_operations(4)),
    "fetch_1e3": Row(_fetch(10**3)),
    "beside_200": Row(_beside),  # before the large ones: the peer's books never shrink, and would slow it here
    "fetch_1e5": Row(_fetch(10**5)),
    "fetch_1e6": Row(_fetch(10**6), rounds=2, deadline_s=300.0),
    "latency": Row(_latency, streaming=True),
    "loader_0": Row(_loader(0), streaming=True, rounds=2, deadline_s=600.0),
    "loader_2": Row(_loader(2), streaming=True, rounds=2, deadline_s=600.0),
}
