# SPDX-License-Identifier: Apache-2.0
"""Real workloads: what a post-training run moves, beside the peer, Ray's store and Redis, where they can do it.

Every figure comes from a fresh interpreter, and all systems take turns within a round. ``--scale 0.1`` makes every
workload a tenth. Each run prints a JSON line to stderr; the last line has the medians. ``cpu_s`` is the CPU time of all
processes of a run, which other programs of the machine disturb less than seconds. ``most_mib`` is the memory of all.

The shapes, and where they come from:

- lists: rollouts as Python lists, as vLLM returns token ids (``CompletionOutput.token_ids``); 1 GB of numbers.
- maths: 128 prompts, cut at 2K tokens, of 8 answers, cut at 8K: DeepScaleR's first stage, and rllm's
  examples/deepscaler. Reference, values and reward are scored by tasks of their own, as in verl.
- images: 256 images of 5 MB, 16 answers each. An RGB image of 1 280 x 1 280 has 4.9 MB; max_pixels of public runs is
  0.3 to 4 million (EasyR1, MindSpeed-MM).
- agents: 4 096 episodes of 60K tokens on average. Software agents are trained with 32K to 128K (rllm's examples/swe).
- sources: five kinds of tasks whose answers take from 2 to 200 ms, and workers that die, as on preempted nodes.
- capture: 200 000 samples of 8 KB from 8 processes, as proxies that record a model server's tokens put them.

Ray and the peer live in an environment of their own, the one of ``benchmarks.versus_upstream`` (``--venv``). Redis
needs ``apt-get install redis-server`` and ``pip install redis``. What isn't installed is left out, and named.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report, rounded
from benchmarks.loads.capture import LEASED
from benchmarks.loads.common import OURS, PEER, RAY_STORE, REDIS
from benchmarks.versus import environment
from benchmarks.versus.fresh import figures_of

WORKLOADS = {
    "lists": (OURS, RAY_STORE),
    "maths": (OURS, PEER, RAY_STORE),
    "images": (OURS, PEER, RAY_STORE),
    "agents": (OURS, PEER, RAY_STORE),
    "sources": (OURS,),
    "capture": (OURS, LEASED, REDIS, PEER, RAY_STORE),
}
NEED_RAY = (PEER, RAY_STORE)
ROUNDS, DEADLINE_S = 3, 1800.0
QUICK_SCALE = 0.004
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "TQ_CONTROLLER_GET_METADATA_TIMEOUT": "600"}


def measured(workload: str, system: str, scale: float, python: str | None) -> dict[str, Any]:
    """The figures of one run, or why there are none.

    Args:
        python: Interpreter of the environment with Ray and the peer; None: this one.
    """
    order = {"workload": workload, "system": system, "scale": scale}
    try:
        found, done = figures_of("benchmarks.loads.worker", order, python, DEADLINE_S, SETTINGS)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {DEADLINE_S:.0f} s"}
    if found is None:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        print(f"{workload}, {system}: {done.stderr[-3000:]}", file=sys.stderr, flush=True)
        return {"failed": " ".join(last) or f"exit code {done.returncode}"}
    return found


def alternating(workload: str, systems: Sequence[str], scale: float, rounds: int, python: str | None) -> dict[str, Any]:
    """Medians over the rounds of each system; those that failed say how."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):  # who goes first changes from round to round
            found = measured(workload, system, scale, python if system in NEED_RAY else None)
            print(json.dumps({"workload": workload, "system": system, **rounded(found)}), file=sys.stderr, flush=True)
            runs[system].append(found)
    return {system: medians(own) for system, own in runs.items()}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    whole = [run for run in runs if all(isinstance(value, (int, float)) for value in run.values())]
    return {name: statistics.median(run[name] for run in whole) for name in whole[0]} if whole else runs[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1: as described above")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--systems", nargs="+", choices=WORKLOADS["capture"], metavar="SYSTEM", help="all by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--venv", type=Path, help="with Ray and TransferQueue; made there if need be")
    args = parser.parse_args(argv)
    venv = args.venv or environment.default_folder()
    is_there = args.venv is not None or (venv / "bin" / "python").exists()
    python = environment.interpreter(venv) if is_there and not args.quick else None
    scale, rounds = (QUICK_SCALE, 1) if args.quick else (args.scale, args.rounds)
    missing = f"not measured: no environment at {venv}; --venv makes one" if python is None else None
    found: dict[str, Any] = {}
    for workload in args.only:
        wanted = [system for system in WORKLOADS[workload] if args.systems is None or system in args.systems]
        there = [system for system in wanted if python is not None or system not in NEED_RAY]
        found[workload] = alternating(workload, there, scale, rounds, python)
        found[workload] |= dict.fromkeys((system for system in wanted if system not in there), missing)
    report("real workloads", scale=scale, rounds=rounds, cores=os.cpu_count(), load=os.getloadavg()[0], **found)


if __name__ == "__main__":
    main()
