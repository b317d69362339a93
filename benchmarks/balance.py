# SPDX-License-Identifier: Apache-2.0
"""How long does it take to split 32768 lengths into 64 balanced parts, and how even are they? Prints one JSON line."""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from itertools import count

from transfer_queue.sampler.karmarkar_karp import karmarkar_karp


def spread(lengths: list[int], parts: list[list[int]]) -> int:
    sums = [sum(lengths[item] for item in part) for part in parts]
    return max(sums) - min(sums)


def plain_differencing(lengths: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing as a textbook has it: one state per item, or per k items of neighbouring length."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    step, tie = (k if equal_size else 1), count()
    states = []
    for start in range(0, len(order), step):
        sets = [(lengths[item], [item]) for item in reversed(order[start : start + step])]
        sets += [(0, [])] * (k - len(sets))
        states.append((sets[-1][0] - sets[0][0], next(tie), sets))
    heapq.heapify(states)
    while len(states) > 1:
        first, second = heapq.heappop(states)[2], heapq.heappop(states)[2]
        sets = [(a + b, items + more) for (a, items), (b, more) in zip(first, reversed(second), strict=True)]
        sets.sort(key=lambda each: each[0], reverse=True)
        heapq.heappush(states, (sets[-1][0] - sets[0][0], next(tie), sets))
    return [items for _, items in states[0][2]]


def median_ms(lengths: list[int], k: int, equal_size: bool, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        karmarkar_karp(lengths, k, equal_size)
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=32768)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rng = random.Random(0)
    # Log-normal: what response lengths of a language model look like, many short and few very long.
    lengths = [min(16384, 1 + int(rng.lognormvariate(6.5, 0.9))) for _ in range(args.items)]
    result: dict[str, object] = {"benchmark": "balance", "items": args.items, "parts": args.parts}
    for name, equal_size in (("equal_size", True), ("any_size", False)):
        ours = spread(lengths, karmarkar_karp(lengths, args.parts, equal_size))
        plain = spread(lengths, plain_differencing(lengths, args.parts, equal_size))
        result[f"{name}_ms"] = median_ms(lengths, args.parts, equal_size, args.repeats)
        result[f"{name}_spread"] = ours
        result[f"{name}_spread_vs_plain"] = round(ours / plain, 3) if plain else float(ours == plain)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
