# SPDX-License-Identifier: Apache-2.0
"""A rollout dict of Python lists: 1 GB of numbers (8 bytes each) at scale 1, ids and log-probabilities by halves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import transfer_queue as tq
from benchmarks.loads.common import OURS, RAY_STORE, Figures, load, queue, ray_cluster, total

NUMBERS = 125_000_000
ROW = (2_000, 20_000)
Rollouts = dict[str, list[list[Any]]]


def rollouts(scale: float) -> Rollouts:
    random, left, lengths = np.random.default_rng(0), int(NUMBERS * scale) // 2, []
    while left > 0:
        lengths.append(min(left, int(random.integers(*ROW))))
        left -= lengths[-1]
    return {
        "ids": [random.integers(0, 150_000, length).tolist() for length in lengths],
        "logprobs": [(-random.random(length)).tolist() for length in lengths],
    }


def timed(act: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, seconds, seconds of this process' CPU)."""
    began, cpu = time.perf_counter(), time.process_time()
    found = act()
    return found, time.perf_counter() - began, time.process_time() - cpu


def figures(rows: Rollouts, put_s: tuple[float, float], get_s: tuple[float, float]) -> Figures:
    numbers = sum(len(row) for column in rows.values() for row in column)
    (put, put_cpu), (get, get_cpu) = put_s, get_s
    return {
        "numbers": numbers, "rows": len(rows["ids"]), "put_s": put, "get_s": get, "seconds": put + get,
        "cpu_s": put_cpu + get_cpu, "ns_per_number": (put + get) / numbers * 1e9, "load": load(),
    }  # fmt: skip


def ours(scale: float, folder: str) -> Figures:
    rows = rollouts(scale)
    with queue(OURS, folder):
        client = tq.get_client()
        client.put({"x": [[1, 2], [3]]}, partition_id="warm")
        meta, *put_s = timed(lambda: client.put(rows, partition_id="lists"))
        (_, read), *get_s = timed(lambda: (data := client.get_data(meta), total(data)))
    check(rows, read)
    return figures(rows, tuple(put_s), tuple(get_s))  # type: ignore[arg-type]


def by_ray(scale: float, folder: str) -> Figures:
    rows = rollouts(scale)
    with ray_cluster(folder) as ray:
        ray.get(ray.put({"x": [[1, 2], [3]]}))
        ref, *put_s = timed(lambda: ray.put(rows))
        got, *get_s = timed(lambda: ray.get(ref))
    tensors, *to_tensors = timed(lambda: {name: list(map(torch.tensor, column)) for name, column in got.items()})
    check(rows, sum(float(row.sum()) for column in tensors.values() for row in column))
    return {**figures(rows, tuple(put_s), tuple(get_s)), "then_to_tensors_s": to_tensors[0]}  # type: ignore[arg-type]


def check(rows: Rollouts, read: float) -> None:
    expected = sum(sum(row) for column in rows.values() for row in column)
    if abs(read - expected) > 1e-3 * abs(expected):
        raise RuntimeError(f"all numbers add up to {read}, not to {expected}")


SYSTEMS = {OURS: ours, RAY_STORE: by_ray}
