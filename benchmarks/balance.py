# SPDX-License-Identifier: Apache-2.0
"""How long does it take to split 32768 lengths into 64 balanced parts, and how even are they? Prints one JSON line."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from functools import partial
from itertools import count

from benchmarks.common import arguments, median_ms, report
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--items", type=int, default=32768)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    items, parts, repeats = (256, 4, 1) if args.quick else (args.items, args.parts, args.repeats)
    rng = random.Random(0)
    # Log-normal: what response lengths of a language model look like, many short and few very long.
    lengths = [min(16384, 1 + int(rng.lognormvariate(6.5, 0.9))) for _ in range(items)]
    figures: dict[str, float] = {}
    for name, equal_size in (("equal_size", True), ("any_size", False)):
        ours = spread(lengths, karmarkar_karp(lengths, parts, equal_size))
        plain = spread(lengths, plain_differencing(lengths, parts, equal_size))
        split = partial(karmarkar_karp, lengths, parts, equal_size)
        figures[f"{name}_ms"] = median_ms(split, repeats, warmup=0)
        figures[f"{name}_spread"] = ours
        figures[f"{name}_spread_vs_plain"] = ours / plain if plain else float(ours == plain)
    report("balanced parts", items=items, parts=parts, **figures)


if __name__ == "__main__":
    main()
