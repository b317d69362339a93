# SPDX-License-Identifier: Apache-2.0
"""How fast does a live stream of batches reach a reader, beside what a user would write instead? Prints one JSON line.

A process puts batches of 32 rows (1.75 MiB, five fields) as fast as it can, at most eight ahead of a reader in another
process, who adds up every value. Each figure comes from fresh processes; all channels take turns within a round. Every
run also prints a JSON line to stderr. ``torch_queue`` and ``ray_queue`` keep nothing, so only data queues are cleared.

Ray and the peer live in an environment of their own, the one of ``benchmarks.versus_upstream``. Without it they are
skipped, unless ``--only`` names them: then it is installed, which needs a package index.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.channels.batches import AHEAD, SIZE
from benchmarks.common import arguments, report
from benchmarks.versus import environment
from benchmarks.versus.fresh import figures_of

DEADLINE_S = 90
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "TQ_CONTROLLER_GET_METADATA_TIMEOUT": str(DEADLINE_S)}
"""For the peer: a reader that waits for longer than a second would fail."""


class Way(NamedTuple):
    """A channel: where it is defined, whether it keeps batches until they are cleared, whether it needs Ray."""

    function: str
    keeps: bool
    needs_ray: bool


WAYS = {
    "loader": Way("transfer:by_loader", keeps=True, needs_ray=False),
    "loader_dense": Way("transfer:by_loader_dense", keeps=True, needs_ray=False),
    "calls": Way("transfer:by_calls", keeps=True, needs_ray=False),
    "torch_queue": Way("queues:torch_queue", keeps=False, needs_ray=False),
    "ray_queue": Way("queues:ray_queue", keeps=False, needs_ray=True),
    "peer": Way("transfer:by_calls_of_peer", keeps=True, needs_ray=True),
}
REFERENCE = "torch_queue"


class Case(NamedTuple):
    way: str
    threads: int
    """Of torch, in the reader."""
    cleared: bool

    @property
    def label(self) -> str:
        kept = "" if self.cleared or not WAYS[self.way].keeps else ", kept"
        return f"{self.way}, {self.threads} torch thread{'s' * (self.threads > 1)}{kept}"


def cases_of(names: Sequence[str], threads: Sequence[int], cleared: Sequence[bool]) -> list[Case]:
    """All combinations; where a channel keeps nothing, one of them for both."""
    every = itertools.product(threads, cleared, names)
    return [Case(name, count, clears) for count, clears, name in every if clears or WAYS[name].keeps]


class Size(NamedTuple):
    """What all runs have in common."""

    batches: int
    producer_threads: int
    """Of torch. Two processes whose OpenMP threads spin on the same cores hold each other up for milliseconds."""


def measured(case: Case, size: Size, python: str | None) -> dict[str, Any]:
    """The figures of one run. Raises RuntimeError with what the process printed.

    Args:
        python: Interpreter of the environment with Ray and the peer; None: this one.
    """
    order = {**case._asdict(), **size._asdict(), "way": WAYS[case.way].function}
    found, done = figures_of("benchmarks.channels.worker", order, python, DEADLINE_S, SETTINGS)
    if found is None:
        raise RuntimeError(f"{case.label} gave no figures but exit code {done.returncode}: {done.stderr[-3000:]}")
    return found


def alternating(cases: Sequence[Case], size: Size, rounds: int, python: str | None) -> dict[Case, dict[str, Any]]:
    """Medians over the rounds, and the rows per second of every round."""
    runs: dict[Case, list[dict[str, Any]]] = defaultdict(list)
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):  # who goes first changes from round to round
            load = os.getloadavg()[0]
            try:
                found = measured(case, size, python if WAYS[case.way].needs_ray else None)
            except (RuntimeError, subprocess.TimeoutExpired) as error:  # the peer's may fail; the others go on
                print(error, file=sys.stderr, flush=True)
                continue
            print(json.dumps({**case._asdict(), **found, "load": load}), file=sys.stderr, flush=True)
            runs[case].append(found)
    return {
        case: {
            **{name: statistics.median(run[name] for run in found) for name in found[0]},
            "rounds": [round(run["rows_per_s"]) for run in found],
        }
        for case, found in runs.items()
    }


def beside_reference(figures: dict[Case, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By label, with ratios to torch's queue at the same number of threads where that was measured, too."""
    lines = {}
    for case, found in figures.items():
        reference = figures.get(Case(REFERENCE, case.threads, True))
        names = () if reference is None or case.way == REFERENCE else ("rows_per_s", "sums_s")
        ratios = {f"{name}_ratio": found[name] / reference[name] for name in names if reference is not None}
        lines[case.label] = {**found, **ratios}
    return lines


def ray_python(names: Sequence[str], named: bool, folder: Path) -> tuple[str | None, list[str]]:
    """The interpreter with Ray and the peer, and the channels that can be measured."""
    if not any(WAYS[name].needs_ray for name in names):
        return None, list(names)
    if named or (folder / "bin" / "python").exists():
        return environment.interpreter(folder), list(names)
    left = [name for name in names if not WAYS[name].needs_ray]
    skipped = ", ".join(name for name in names if name not in left)
    print(f"skipped {skipped}: Ray and the peer are not in {folder}; --only installs them there.", file=sys.stderr)
    return None, left


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*WAYS], metavar="WAY", help=f"of {' '.join(WAYS)}")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch, in the reader")
    parser.add_argument("--producer-threads", type=int, default=1, help="of torch, in the producer")
    parser.add_argument("--cleared", choices=["yes", "no", "both"], default="both", help="each batch, by its reader")
    parser.add_argument("--venv", type=Path, default=environment.default_folder(), help="the peer's environment")
    args = parser.parse_args(argv)
    batches, rounds, threads = (8, 1, [1]) if args.quick else (args.batches, args.rounds, args.threads)
    names = args.only or (["loader", "torch_queue"] if args.quick else [*WAYS])
    python, names = ray_python(names, args.only is not None, args.venv)
    cleared = [True] if args.quick else {"yes": [True], "no": [False], "both": [True, False]}[args.cleared]
    load = os.getloadavg()[0]
    figures = alternating(cases_of(names, threads, cleared), Size(batches, args.producer_threads), rounds, python)
    report(
        "a live stream beside its alternatives",
        batches=batches, rows_per_batch=SIZE, batch_mib=1.75, ahead=AHEAD,
        producer_threads=args.producer_threads, cores=os.cpu_count(), load=load,
        channels=beside_reference(figures),
    )  # fmt: skip


if __name__ == "__main__":
    main()
