# SPDX-License-Identifier: Apache-2.0
"""Chaos: processes, servers, hosts and disks fail in the middle of the work, and a checker of its own looks for damage.

    python -m tests.chaos --seeds 100 --minutes 30
    python -m tests.chaos --world groups --seed 17

The first runs seeds one after the other, in all worlds, until the time is over. The second replays one run. Each run
prints a line of JSON. A run that finds something prints what, its faults in order, and the command that replays it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from tests.chaos.plan import WORLDS
from tests.chaos.run import privilege, run_seed
from tests.chaos.stage import ChaosError, preload


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parsed(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks and networks are taken away
    get_temp_dir()  # multiprocessing keeps what it makes first until the process ends
    resource_tracker.ensure_running()
    tempfile.tempdir = os.environ["TMPDIR"] = made = tempfile.mkdtemp(prefix="ch-")  # traces of others are elsewhere
    if given.directory:
        Path(given.directory).mkdir(parents=True, exist_ok=True)
    preload([given.world] if given.world else WORLDS)
    total, failed = Counter[str](), 0
    end = time.monotonic() + given.minutes * 60
    for world, hosts, seed in _runs(given):
        if time.monotonic() > end:
            break
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=given.directory or made))
        try:
            summary = run_seed(world, seed, folder, given.length, hosts)
        except ChaosError as error:
            failed += 1
            print(f"FAILED {error}", file=sys.stderr, flush=True)
        else:
            print(json.dumps(summary), flush=True)
            if not given.keep:
                shutil.rmtree(folder)
            _add(total, summary)
    print(json.dumps({"failed": failed, **total}))
    if given.directory or not (failed or given.keep):
        shutil.rmtree(made)
    return 1 if failed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, help="default: all of them, in turn")
    parser.add_argument("--hosts", action="store_true", help="only runs over two network namespaces (root)")
    parser.add_argument("--seed", type=int, help="the first seed, and the only one without --seeds")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--length", type=float, default=1.0, help="1: a run of seconds with about eight faults")
    parser.add_argument("--directory", help="where ledgers go; those of failed runs stay")
    parser.add_argument("--keep", action="store_true", help="keep all ledgers")
    return parser.parse_args(arguments)


def _runs(given: argparse.Namespace) -> Iterator[tuple[str, bool, int]]:
    """(world, over two hosts, seed)"""
    worlds = [given.world] if given.world else list(WORLDS)
    count = given.seeds or (1 if given.seed is not None else 1_000_000)
    first = given.seed if given.seed is not None else random.randrange(1_000_000)
    may_hosts = privilege() is None
    for seed in range(first, first + count):
        for world in worlds:
            if not given.hosts:
                yield world, False, seed
            if given.hosts or (may_hosts and given.seeds and world == "streams"):
                yield world, True, seed


def _add(total: Counter[str], summary: dict[str, Any]) -> None:
    total.update({"runs": 1, "samples": summary["samples"], "processes": summary["processes"]})
    total.update({"queues": summary["queues"], "seconds": round(summary["seconds"])})
    total.update(summary["faults"])


if __name__ == "__main__":
    sys.exit(main())
