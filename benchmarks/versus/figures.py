# SPDX-License-Identifier: Apache-2.0
"""The lines of the comparison: which figure of which row, what it is called, and the goal it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEER, OURS = "TransferQueue", "lightning-tq"
TIMES = "\N{MULTIPLICATION SIGN}"
Rounds = Mapping[str, Mapping[str, list[Mapping[str, float]]]]  # package -> row -> one set of figures per round


@dataclass(frozen=True)
class Goal:
    """``value`` times the yardstick that the kind names.

    at_most, at_least: the figure's unit. copies: memcpy of the same bytes. faster: the peer's figure, so many times
    better. flat: our own figure ``of`` (row, name).
    """

    kind: str
    value: float
    of: tuple[str, str] = ("", "")

    def text(self, unit: str) -> str:
        figure = f"{self.value:,g}".replace(",", " ")
        return {
            "at_most": f"≤ {figure} {unit}".rstrip(),
            "at_least": f"≥ {figure} {unit}".rstrip(),
            "copies": f"≤ {figure}{TIMES} memcpy",
            "faster": f"≥ {figure}{TIMES}",
            "flat": f"≤ {figure}{TIMES} that among 1e3",
        }[self.kind]


@dataclass(frozen=True)
class Figure:
    """A line of the table. ``floor``: where nothing is, or noise around it; no ratio is made of such a value."""

    row: str
    name: str
    label: str
    unit: str
    goal: Goal | None = None
    more_is_better: bool = False
    floor: float = 0.0


def _bandwidth(row: str, label: str, goal: Goal) -> list[Figure]:
    return [Figure(row, f"{verb}_ms", f"{verb}, {label}", "ms", goal) for verb in ("put", "get")]


def _loader(workers: int) -> list[Figure]:
    row, label = f"loader_{workers}", f"loader, {workers} workers"
    return [
        Figure(row, "unique_samples_per_s", f"{label}: unique samples", "per s", Goal("faster", 20), True),
        Figure(row, "times_delivered", f"{label}: each sample came", "times", Goal("at_most", 1), floor=1.0),
        Figure(row, "growth_mib", f"{label}: memory growth", "MiB", Goal("at_most", 5), floor=5.0),
    ]


FLAT = Goal("flat", 2, ("fetch_1e3", "p50_ms"))
FIGURES = [
    *_bandwidth("dense_64_mib", "dense 64 MiB", Goal("copies", 2)),
    *_bandwidth("dense_256_mib", "dense 256 MiB", Goal("copies", 2)),
    *_bandwidth("rl_batch", "RL batch (1 024 samples, 5 fields, 56 MiB)", Goal("copies", 2.5)),
    *_bandwidth("jagged", "256 jagged samples (4 MiB)", Goal("faster", 10)),
    *_bandwidth("strings", "1 024 strings", Goal("faster", 5)),
    Figure("small", "put_p50_ms", "put of one 1 KiB sample", "ms", Goal("at_most", 0.6)),
    Figure("small", "fetch_and_get_p50_ms", "fetch and get of one 1 KiB sample", "ms", Goal("at_most", 0.5)),
    Figure("operations_1", "per_s", "small puts and gets, 1 client", "per s", Goal("at_least", 2000), True),
    Figure("operations_4", "per_s", "small puts and gets, 4 clients", "per s", Goal("at_least", 4000), True),
    Figure("fetch_1e3", "p50_ms", "fetch of 32 among 1e3 ready samples", "ms", Goal("at_most", 0.5)),
    Figure("fetch_1e5", "p50_ms", "fetch of 32 among 1e5 ready samples", "ms", FLAT),
    Figure("fetch_1e6", "p50_ms", "fetch of 32 among 1e6 ready samples", "ms", FLAT),
    Figure("fetch_1e6", "first_of_a_task_ms", "the same, first fetch of a new task", "ms"),
    Figure("beside_200", "p50_ms", "fetch of 32 beside 200 partitions of 1 000", "ms", FLAT),
    Figure("startup", "servers_mib", "memory of all servers without data", "MiB", Goal("at_most", 250)),
    Figure("startup", "all_mib", "the same with Ray, where it is needed", "MiB"),
    Figure("latency", "p50_ms", "put returned → batch yielded to a waiting consumer", "ms", Goal("at_most", 2)),
    *_loader(0),
    *_loader(2),
    Figure("startup", "import_to_first_put_s", "import → first put", "s", Goal("at_most", 3)),
    Figure("startup", "import_s", "import transfer_queue", "s", Goal("at_most", 0.2)),
]


def compared(rounds: Rounds, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Machine-readable: medians over the rounds with every round beside them, ratio, and whether the goal is met."""
    lines = [_line(figure, rounds) for figure in FIGURES if any(figure.row in rows for rows in rounds.values())]
    return {"facts": dict(facts), "lines": lines}


def _line(figure: Figure, rounds: Rounds) -> dict[str, Any]:
    peer, ours = (_median(rounds, package, figure.row, figure.name) for package in (PEER, OURS))
    copies = [ms for package in (PEER, OURS) for ms in _values(rounds, package, figure.row, "memcpy_ms")]
    memcpy = statistics.median(copies) if copies and figure.goal and figure.goal.kind == "copies" else None
    limit = None if figure.goal is None else _limit(figure, peer, memcpy, rounds)
    return {
        "label": figure.label,
        "unit": figure.unit,
        "more_is_better": figure.more_is_better,
        "peer": peer,
        "ours": ours,
        "memcpy_ms": memcpy,
        "ratio": _times_better(figure, peer, ours),
        "goal": figure.goal and figure.goal.text(figure.unit),
        "goal_as_ratio": _times_better(figure, peer, limit),
        "met": None if ours is None or limit is None else (ours >= limit if figure.more_is_better else ours <= limit),
        "rounds": {package: _values(rounds, package, figure.row, figure.name) for package in (PEER, OURS)},
    }


def _limit(figure: Figure, peer: float | None, memcpy: float | None, rounds: Rounds) -> float | None:
    """The worst value that still meets the goal."""
    assert figure.goal is not None
    if figure.goal.kind in ("at_most", "at_least"):
        return figure.goal.value
    if figure.goal.kind == "faster" and figure.more_is_better:
        return None if peer is None else peer * figure.goal.value
    if figure.goal.kind == "faster":
        return None if peer is None else peer / figure.goal.value
    yardstick = memcpy if figure.goal.kind == "copies" else _median(rounds, OURS, *figure.goal.of)
    return None if yardstick is None else yardstick * figure.goal.value


def _times_better(figure: Figure, peer: float | None, other: float | None) -> float | None:
    if peer is None or other is None or min(peer, other) <= figure.floor:
        return None
    return other / peer if figure.more_is_better else peer / other


def _values(rounds: Rounds, package: str, row: str, name: str) -> list[float]:
    return [figures[name] for figures in rounds.get(package, {}).get(row, []) if name in figures]


def _median(rounds: Rounds, package: str, row: str, name: str) -> float | None:
    values = _values(rounds, package, row, name)
    return statistics.median(values) if values else None
