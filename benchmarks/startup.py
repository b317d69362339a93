# SPDX-License-Identifier: Apache-2.0
"""How long from import to the first put, and how large are the servers without data? Prints one JSON line."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120.0
FIRST_PUT = """
import time; started = time.perf_counter()
import transfer_queue as tq
imported = time.perf_counter() - started
import torch; from tensordict import TensorDict
ready = time.perf_counter()
{before_init}
tq.init()
up = time.perf_counter()
tq.get_client().put(TensorDict({{"x": torch.zeros(1, 4)}}, batch_size=[1]), partition_id="p")
put = time.perf_counter()
import json, psutil
children = [
    {{"name": child.name(), "rss": child.memory_info().rss / 2**20, "pss": child.memory_full_info().pss / 2**20}}
    for child in psutil.Process().children(recursive=True)
]
figures = {{"import_s": imported, "init_s": up - ready, "import_to_first_put_s": put - started}}
version = getattr(tq, "__distribution_version__", tq.__version__)
print("FIGURES", json.dumps({{**figures, "version": version, "children": children}}), flush=True)
tq.close()
"""


class StartError(RuntimeError):
    """A queue that did not take its first put."""


def first_put(python: str, environment: Mapping[str, str], before_init: str = "") -> dict[str, Any]:
    """Seconds in a fresh interpreter, and the processes that it had started by then with their MiB.

    Raises StartError when there was none in time.
    """
    code = FIRST_PUT.format(before_init=before_init)
    with tempfile.TemporaryDirectory() as folder:  # Python looks for modules where it is started
        try:
            done = subprocess.run(
                [python, "-c", code],
                env=dict(environment),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"{python} made no first put within {DEADLINE_S:.0f} s.") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
    if not lines:
        raise StartError(f"{python} made no first put but exit code {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FIGURES"))
    return found


def environment_of(root: Path | None) -> dict[str, str]:
    """For an interpreter that shall find the package in that folder; None: where it is installed.

    Without what keeps Python from caching compiled modules: an installed package has its cache.
    """
    dropped = ("TQ_ADDRESS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept if root is None else {**kept, "PYTHONPATH": str(root)}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    environment = environment_of(ROOT)
    runs = [first_put(sys.executable, environment) for _ in range(1 if args.quick else 6)]
    runs = runs[1:] or runs  # the first one may have had to compile modules
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, tensordict"], env=environment, check=True, timeout=DEADLINE_S)
    interpreter = time.perf_counter() - started
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name.endswith("_s")}
    memory = {
        f"{name}_{kind}_mib": statistics.median(total([child[kind] for child in run["children"]]) for run in runs)
        for kind in ("pss", "rss")
        for name, total in (("servers", sum), ("largest_server", max))
    }
    report("startup", **figures, interpreter_with_torch_s=interpreter, **memory)


if __name__ == "__main__":
    main()
