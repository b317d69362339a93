# SPDX-License-Identifier: Apache-2.0
"""How long do a put and a get of large batches take, beside one memcpy of the same bytes? Prints one JSON line."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks import cases
from benchmarks.common import arguments, bounded, memcpy, report

PARTITION = "bandwidth"
BUDGET_S = 10.0  # a slow case gets fewer repeats
FULL: dict[str, Callable[[], TensorDict]] = {
    "dense_256_kib": lambda: cases.dense(0.25),
    "dense_1_mib": lambda: cases.dense(1),
    "dense_4_mib": lambda: cases.dense(4),
    "dense_16_mib": lambda: cases.dense(16),
    "dense_64_mib": lambda: cases.dense(64),
    "dense_256_mib": lambda: cases.dense(256),
    "rl_batch": cases.rl_batch,
    "rl_batch_scattered_get": cases.rl_batch,
    "rl_batch_strided_source": cases.strided,
    "jagged_256": cases.jagged,
    "strings_1024": cases.strings,
}
QUICK: dict[str, Callable[[], TensorDict]] = {
    "dense_256_kib": lambda: cases.dense(0.25),
    "rl_batch": lambda: cases.rl_batch(8, 16),
    "rl_batch_scattered_get": lambda: cases.rl_batch(8, 16),
    "rl_batch_strided_source": lambda: cases.strided(8, 16),
    "jagged_256": lambda: cases.jagged(8, 2, 16),
    "strings_1024": lambda: cases.strings(8, 10),
}


def put_get_ms(
    client: tq.TransferQueueClient, data: TensorDict, repeats: int, scattered: bool = False
) -> dict[str, float]:
    """Medians of put, and of get with a look at every page that came; cleared in between.

    The first round is not counted: it makes room that later ones find.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    puts, gets = [], []
    for _ in bounded(repeats + 1, BUDGET_S):
        started = time.perf_counter()
        meta = client.put(data, partition_id=PARTITION)
        stored = time.perf_counter()
        wanted = meta.select_samples(order) if scattered else meta
        asked = time.perf_counter()
        got = client.get_data(wanted)
        cases.touch(got)
        finished = time.perf_counter()
        puts.append((stored - started) * 1e3)
        gets.append((finished - asked) * 1e3)
        cases.check(data[order] if scattered else data, got)
        del got
        client.clear_partition(PARTITION)
    return {"put_ms": statistics.median(puts[1:] or puts), "get_ms": statistics.median(gets[1:] or gets)}


def beside_memcpy(client: tq.TransferQueueClient, data: TensorDict, repeats: int, **how: bool) -> dict[str, float]:
    """The case's medians, those of a warm memcpy of as many bytes, and the ratios; texts have no memcpy to compare."""
    nbytes = cases.nbytes(data)
    found = {"mib": nbytes / 2**20, **put_get_ms(client, data, repeats, **how)}
    if not all(isinstance(value, torch.Tensor) for value in data.values()):
        return found
    copies = memcpy(nbytes)._asdict()
    found |= {f"memcpy_{name}": ms for name, ms in copies.items()}
    for verb in ("put", "get"):
        for name, ms in copies.items():
            found[f"{verb}_per_memcpy_{name.removesuffix('_ms')}"] = found[f"{verb}_ms"] / ms
    return found


def all_cases(conf: dict[str, Any] | None, quick: bool) -> dict[str, dict[str, float]]:
    """Every case on a queue of that configuration."""
    tq.init(conf)
    client, repeats = tq.get_client(), 1 if quick else 9
    chosen = QUICK if quick else FULL
    try:
        return {
            name: beside_memcpy(client, make(), repeats, scattered=name.endswith("scattered_get"))
            for name, make in chosen.items()
        }
    finally:
        tq.close()


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    found = all_cases(None, args.quick)
    report("put and get beside memcpy", torch_threads=torch.get_num_threads(), cases=found)


if __name__ == "__main__":
    main()
