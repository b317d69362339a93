# SPDX-License-Identifier: Apache-2.0
"""How does lightning-tq compare with the released TransferQueue, doing the same work alternately in one run?

Installs the peer into an environment of its own (``--venv``; needs a package index at the first run), keeps one worker
process per package alive, and tells them in turn what to do. Prints the table as markdown and then one JSON line;
a full run writes them and a picture to ``benchmarks/results``, as ``versus_upstream.md``, ``.json`` and ``.png``.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import transfer_queue as tq
from benchmarks.common import arguments, report
from benchmarks.versus import environment
from benchmarks.versus.figures import OURS, PEER, compared
from benchmarks.versus.package import Package, WorkerError
from benchmarks.versus.plot import draw
from benchmarks.versus.rows import ROWS
from benchmarks.versus.table import markdown

RESULTS = Path(__file__).parent / "results"
STARTUP = "startup"
STARTS = 4


def measured(packages: Sequence[Package], names: Sequence[str], quick: bool) -> dict[str, dict[str, list[Any]]]:
    """Package -> row -> the figures of each round; a row that a worker gave no answer to has fewer rounds, or none."""
    found: dict[str, dict[str, list[Any]]] = {package.name: defaultdict(list) for package in packages}
    for name in names:
        for number in range(_rounds(name, quick)):
            for package in packages if number % 2 else reversed(packages):  # who goes first changes from round to round
                try:
                    found[package.name][name].append(_ask(package, name, quick))
                except WorkerError as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
        print(f"{name} done", file=sys.stderr, flush=True)
    return found


def _rounds(name: str, quick: bool) -> int:
    if name == STARTUP:
        return 2 if quick else STARTS
    return 1 if quick else ROWS[name].rounds


def _ask(package: Package, name: str, quick: bool) -> dict[str, Any]:
    return package.startup() if name == STARTUP else package.ask(name, quick, ROWS[name].deadline_s)


def facts(quick: bool) -> dict[str, Any]:
    """What decides the figures besides the code. ``load``: what else ran while the comparison began."""
    return {
        "peer": environment.VERSION, "ours": tq.__distribution_version__, "python": platform.python_version(),
        "torch": torch.__version__, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "quick": quick,
    }  # fmt: skip


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "versus_upstream.md").write_text(markdown(result) + "\n")
    (folder / "versus_upstream.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, folder / "versus_upstream.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--venv", type=Path, default=environment.default_folder(), help="the peer's environment")
    parser.add_argument(
        "--only", nargs="+", choices=[STARTUP, *ROWS], metavar="ROW", help=f"of {STARTUP} {' '.join(ROWS)}"
    )
    parser.add_argument("--out", type=Path, help="folder for table, JSON and picture (a full run: benchmarks/results)")
    args = parser.parse_args(argv)
    names = [name for name in (STARTUP, *ROWS) if args.only is None or name in args.only]
    peer = Package(PEER, environment.interpreter(args.venv), environment.VERSION, needs_ray=True)
    ours = Package(OURS, sys.executable, tq.__distribution_version__, needs_ray=False)
    known = facts(args.quick)
    with closing(peer), closing(ours):
        result = compared(measured([ours, peer], names, args.quick), known)
    folder = args.out or (RESULTS if args.only is None and not args.quick else None)
    if folder is not None:
        write(result, folder)
    print(markdown(result))
    lines = {line["label"]: {key: line[key] for key in ("peer", "ours", "ratio", "met")} for line in result["lines"]}
    report("versus upstream", **result["facts"], lines=lines)


if __name__ == "__main__":
    main()
