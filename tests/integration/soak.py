# SPDX-License-Identifier: Apache-2.0
"""The soak: random work of several processes, one of them killed again and again; in the end nothing may be left.

    python -m tests.integration.soak --seconds 600 --seed 7 --arena off

prints one line of JSON. Counts, the last operations of every process and failures lie in ``--directory``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import Any

import numpy as np

import transfer_queue as tq
from tests.integration.soak_left import is_empty, is_idle, traces, units, unsettled
from tests.integration.soak_state import OPERATIONS, OTHERS, OUTCOMES, read_counts
from tests.own_processes import SLOW

NUM_PROCESSES = 4
SETTLE_S = 15.0 * SLOW
END_S = 60.0 * SLOW
_MIB = 1 << 20
_TIGHT_NBYTES = 8 * _MIB
"""Of each of the two units."""

_FORKED_FROM = ("torch", "tensordict", "transfer_queue", "tests.integration.soak_worker")
get_temp_dir()  # else the fork server's socket would lie in a directory that a test removes
_context = multiprocessing.get_context("forkserver")  # a killed process is replaced in milliseconds
_context.set_forkserver_preload(list(_FORKED_FROM))


@dataclass(frozen=True)
class Options:
    """``tight``: little memory, so that puts wait for room, some in vain. ``arena``: None is the default's.

    ``processes``: the servers' ("one" for all of them or "each"); None is the default's.
    """

    seconds: float
    seed: int
    kill_every_s: float = 1.0
    tight: bool = False
    arena: bool | None = None
    without: tuple[str, ...] = ()
    forgive_leaks: bool = False
    processes: str | None = None

    def conf(self) -> dict[str, Any]:
        storage: dict[str, Any] = {"put_timeout_s": 0.5 if self.tight else 10.0}
        if self.tight:
            storage["capacity_bytes"] = _TIGHT_NBYTES
        if self.arena is not None:
            storage["arena"] = self.arena
        return {
            "backend": {"SimpleStorage": storage},
            "client": {"timeout_s": 20.0},
            "controller": {"producer_grace_s": 2.0},
            **({} if self.processes is None else {"server_processes": self.processes}),
        }

    def limits(self) -> dict[str, Any]:
        return {
            "capacity_bytes": _TIGHT_NBYTES if self.tight else None,
            "largest_put": (4 if self.tight else 32) * _MIB,
            "largest_kept": (_MIB // 8 if self.tight else 4 * _MIB),
            "most_nbytes": (15 if self.tight else 192) * _MIB,
            "most_samples": 6000,
        }


class SoakError(AssertionError):
    """The soak found something; the text names the files that tell more."""


class Soak:
    """One run against the queue that this process has started."""

    def __init__(self, options: Options, directory: Path, address: str) -> None:
        self._options = options
        self._directory = directory
        self._address = address
        self._rng = random.Random(options.seed)
        self._serial = 0
        self._clock = threading.Event()
        self._running: dict[int, tuple[Any, Any]] = {}
        self.kills = 0

    def run(self) -> None:
        """Start, kill and replace until the time is over, then let all finish."""
        try:
            for slot in range(NUM_PROCESSES):
                self._start(slot)
            for slot in range(NUM_PROCESSES):
                self._await_ready(slot)
            end = time.monotonic() + self._options.seconds
            while time.monotonic() < end:
                self._attend(min(end, time.monotonic() + self._options.kill_every_s * self._rng.uniform(0.5, 1.5)))
                if time.monotonic() < end:
                    self._kill(self._rng.randrange(NUM_PROCESSES))
            self._finish()
        finally:
            for process, mouth in self._running.values():
                process.kill()
                process.join()
                mouth.close()

    def _start(self, slot: int) -> None:
        self._serial += 1
        orders = {
            "seed": self._options.seed, "serial": self._serial, "slot": slot, "limits": self._options.limits(),
            "without": self._options.without,
        }  # fmt: skip
        ear, mouth = _context.Pipe()
        target = "tests.integration.soak_worker"
        process = _context.Process(target=_worker, args=(target, self._address, str(self._directory), orders, ear))
        process.start()
        ear.close()
        self._running[slot] = (process, mouth)

    def _await_ready(self, slot: int) -> None:
        process, mouth = self._running[slot]
        if process.sentinel in wait_for_any([process.sentinel, mouth], END_S) or not mouth.poll():
            raise SoakError(self._failure())

    def _attend(self, until: float) -> None:
        """Wait, and fail as soon as a process ends that nobody killed."""
        sentinels = [process.sentinel for process, _ in self._running.values()]
        if wait_for_any(sentinels, max(0.0, until - time.monotonic())):
            raise SoakError(self._failure())

    def _kill(self, slot: int) -> None:
        """SIGKILL, at once, or by its own hand a moment after its next operation has begun."""
        process, mouth = self._running.pop(slot)
        if self._rng.random() < 0.6:
            mouth.send("die")
            process.join(1.0)
        process.kill()
        process.join()
        mouth.close()
        self._check_killed(process)
        self.kills += 1
        self._start(slot)

    def _check_killed(self, process: Any) -> None:
        if process.exitcode != -9:
            raise SoakError(self._failure())
        process.close()

    def _finish(self) -> None:
        for _, mouth in self._running.values():
            mouth.send("stop")
        deadline = time.monotonic() + END_S
        for slot in list(self._running):
            process, mouth = self._running[slot]
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                raise SoakError(self._failure())
            del self._running[slot]
            process.close()
            mouth.close()

    def _failure(self) -> str:
        ends = {slot: process.exitcode for slot, (process, _) in self._running.items()}
        told = [path.read_text() for path in sorted(self._directory.glob("failure-*.txt"))]
        text = "\n".join(told) or "nobody said why"
        return f"seed {self._options.seed}: a process failed ({ends}); see {self._directory}\n{text}"

    # ---- what is left ----

    def check_handed_out_once(self) -> None:
        """No sample was given twice by the task that all processes share."""
        given = [np.fromfile(path, np.int64) for path in self._directory.glob("given-*.bin")]
        indexes, times = np.unique(np.concatenate([*given, np.empty(0, np.int64)]), return_counts=True)
        if (times > 1).any():
            raise SoakError(f"seed {self._options.seed}: given twice to task 'shared': {indexes[times > 1][:20]}")

    def check_nothing_left(self) -> dict[str, int]:
        """With all processes gone: reservations are given back at once; after clearing everything nothing is held."""
        client = tq.get_client()
        self._until("nothing reserved or waiting", lambda: unsettled(client.get_stats()))
        for partition in client.get_partition_list():
            client.clear_partition(partition)
        self._until("no partition", lambda: client.get_stats()["partitions"])
        self._until("idle storage units", lambda: [unit for unit in units(client) if not is_idle(unit)])
        if not self._options.forgive_leaks:
            self._until("empty storage units", lambda: [unit for unit in units(client) if not is_empty(unit)])
        left = units(client)
        return {name: sum(getattr(unit, name) for unit in left) for name in ("held_nbytes", "live_nbytes")}

    def _until(self, wanted: str, left: Callable[[], Any]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while rest := left():
            if time.monotonic() > deadline:
                raise SoakError(
                    f"seed {self._options.seed}: wanted {wanted} within {SETTLE_S} s, there is {rest}; "
                    f"see {self._directory}"
                )
            self._clock.wait(0.05)


def _worker(module: str, *args: Any) -> None:
    import importlib

    importlib.import_module(module).main(*args)


# ---- around the run ----


def soak(options: Options, directory: Path) -> dict[str, Any]:
    """Start a queue, soak it, end it. Returns the summary; raises SoakError."""
    before = traces()
    conf = tq.init(options.conf())
    try:
        run = Soak(options, directory, str(conf.address))
        began = time.monotonic()
        run.run()
        seconds = time.monotonic() - began
        run.check_handed_out_once()
        left = run.check_nothing_left()
    finally:
        tq.close()
    after = traces()
    new = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
    if new:
        raise SoakError(f"seed {options.seed}: left behind: {new}")
    return {**_summary(options, directory, seconds), "kills": run.kills, **left}


def _summary(options: Options, directory: Path, seconds: float) -> dict[str, Any]:
    counts = read_counts(directory)
    return {
        "seed": options.seed, "arena": options.arena, "tight": options.tight, "processes": options.processes,
        "seconds": round(seconds, 1),
        "operations": sum(counts[name] for name in OPERATIONS),
        "by_operation": {name: counts[name] for name in OPERATIONS},
        "errors": {name: counts[name] for name in OUTCOMES if name != "ok" and counts[name]},
        **{name: counts[name] for name in OTHERS},
    }  # fmt: skip


def _use_own_temporary_directory() -> None:
    """Queues of others on this machine must not look like leaks of ours."""
    tempfile.tempdir = made = tempfile.mkdtemp(prefix="soak-")
    Finalize(None, shutil.rmtree, args=(made, True), exitpriority=-200)  # after multiprocessing's own directory in it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kill-every", type=float, default=1.0, help="seconds between kills, on average; 0: none")
    parser.add_argument("--arena", choices=("on", "off", "default"), default="default")
    parser.add_argument(
        "--tight", action="store_true", help="little capacity: puts wait, and fail with StorageFullError"
    )
    parser.add_argument("--processes", choices=("one", "each"), help="of the servers")
    parser.add_argument("--without", default="", help="operations to leave out, by comma")
    parser.add_argument("--forgive-leaks", action="store_true", help="only report what the units hold at the end")
    parser.add_argument("--directory", help="where logs go; default: a new temporary directory")
    given = parser.parse_args(arguments)
    arena = None if given.arena == "default" else given.arena == "on"
    every = given.kill_every or float("inf")
    without = tuple(name for name in given.without.split(",") if name)
    options = Options(
        given.seconds, given.seed, every, given.tight, arena, without, given.forgive_leaks, given.processes
    )
    directory = Path(given.directory or tempfile.mkdtemp(prefix="soak-logs-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):  # samples given out in an earlier run would look as if they were given twice
        parser.error(f"--directory {directory} is not empty; name a new one.")
    _use_own_temporary_directory()
    try:
        summary = soak(options, directory)
    except SoakError as error:
        print(error, file=sys.stderr)
        print(json.dumps({**_summary(options, directory, 0.0), "failed": str(error).split("\n")[0]}))
        return 1
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    resource_tracker.ensure_running()
    sys.exit(main())
