# SPDX-License-Identifier: Apache-2.0
"""Through how many files and functions of ours do one small put, one fetch and one get go? Prints one JSON line.

Run ``python -m scripts.count_files`` from the root. A profiler runs in this process, the client, and in every process
that it starts, the servers: a ``sitecustomize`` module in a temporary folder on PYTHONPATH installs it there. One byte
of a shared file says which verb runs. A function counts for a verb when most of its rounds call it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (str(ROOT / "transfer_queue") + os.sep, str(ROOT / "lightning_tq") + os.sep)
FOLDER = "COUNT_FILES_FOLDER"
WARMUP, ROUNDS = 50, 5
AFTERWARDS_S = 0.05
"""What a server does after its answer, and what needs no answer, belongs to the verb."""
PARTITION, TASK = "count", "count"
GOALS = {"put": 45, "fetch_and_get": 50}
"""Files of both processes together, at most."""
Function = tuple[str, str, int]
"""(file below the root, function, its first line)."""
HOOK = """
import sys
sys.path.insert(0, {root!r})
from scripts.count_files import install
install()
sys.path.remove({root!r})
"""


class Profiler:
    """Writes a line to a file of this process for each function that is called for the first time in a phase."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "phase"), "r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        self._out = os.open(os.path.join(folder, f"{os.getpid()}.calls"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._seen: set[tuple[int, Any]] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        phase = self._phase[0]
        if not phase or event != "call" or (phase, frame.f_code) in self._seen:
            return
        code = frame.f_code
        self._seen.add((phase, code))
        if code.co_filename.startswith(PACKAGES):
            file = os.path.relpath(code.co_filename, ROOT)
            # No exit hook: a process may be killed, and a short write to a file opened for appending is whole.
            os.write(self._out, f"{json.dumps([phase, file, code.co_name, code.co_firstlineno])}\n".encode())


def install() -> None:
    """Profile all threads of this process that begin from now on, and this one."""
    import threading

    profiler = Profiler(os.environ[FOLDER])
    threading.setprofile(profiler)
    sys.setprofile(profiler)


def measured(folder: str) -> list[str]:
    """Runs the verbs, each in phases of its own; the verb of every phase. A phase's number is its place, from 1."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    with open(os.path.join(folder, "phase"), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    verbs: list[str] = []

    def during(verb: str, call: Callable[[], Any]) -> Any:
        verbs.append(verb)
        phase[0] = len(verbs)
        try:
            result = call()
            time.sleep(AFTERWARDS_S)
        finally:
            phase[0] = 0
        return result

    tq.init()
    client = tq.get_client()
    data = TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])  # 1 KiB

    def put() -> Any:
        return client.put(data, partition_id=PARTITION)

    def fetch() -> Any:
        return client.get_meta(["x"], 1, PARTITION, "fetch", TASK)

    for _ in range(WARMUP):
        put()
        client.get_data(fetch())
    for _ in range(ROUNDS):
        during("put", put)
        meta = during("fetch", fetch)
        during("get", lambda meta=meta: client.get_data(meta))
    tq.close()
    return verbs


def calls_of(folder: str, verbs: list[str]) -> dict[str, dict[str, set[Function]]]:
    """Verb -> process ("client", "server") -> what most rounds of the verb called there."""
    counts: dict[tuple[str, str], Counter[Function]] = defaultdict(Counter)
    for path in Path(folder).glob("*.calls"):
        process = "client" if path.stem == str(os.getpid()) else "server"
        for line in path.read_text().splitlines():
            phase, *function = json.loads(line)
            counts[verbs[phase - 1], process][tuple(function)] += 1
    return {
        verb: {
            process: {function for function, rounds in counts[verb, process].items() if rounds > ROUNDS // 2}
            for process in ("client", "server")
        }
        for verb in dict.fromkeys(verbs)
    }


def files(functions: Iterable[Function]) -> set[str]:
    return {file for file, _, _ in functions}


def summary(by_process: dict[str, set[Function]]) -> dict[str, int]:
    """Both processes together; a file or function that runs in both counts once."""
    together = by_process["client"] | by_process["server"]
    return {
        "files": len(files(together)),
        "functions": len(together),
        "client_files": len(files(by_process["client"])),
        "server_files": len(files(by_process["server"])),
    }


def print_list(verb: str, by_process: dict[str, set[Function]]) -> None:
    print(f"{verb}:", file=sys.stderr)
    for file in sorted(files(by_process["client"] | by_process["server"])):
        counts = [sum(function[0] == file for function in by_process[process]) for process in ("client", "server")]
        print(f"  {file}  client {counts[0]}, server {counts[1]}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files on stderr, with functions called in each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "phase").write_bytes(b"\0")
        Path(folder, "sitecustomize.py").write_text(HOOK.format(root=str(ROOT)))
        os.environ[FOLDER] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        install()
        found = calls_of(folder, measured(folder))
    fetch, get = found.pop("fetch"), found.pop("get")
    found["fetch_and_get"] = {process: fetch[process] | get[process] for process in fetch}
    figures = {verb: summary(by_process) for verb, by_process in [*found.items(), ("fetch", fetch), ("get", get)]}
    if args.list:
        for verb, by_process in found.items():
            print_list(verb, by_process)
    print(json.dumps({"question": "files and functions of one 1 KiB put, fetch and get", "goals": GOALS, **figures}))


if __name__ == "__main__":
    main()
