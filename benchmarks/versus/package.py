# SPDX-License-Identifier: Apache-2.0
"""One of the two packages, seen from outside: its interpreter, its worker process, and the surely reached end of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.startup import StartError, environment_of, first_put
from benchmarks.versus.worker import RAY

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
END_S = 30.0
TIDY_S = 5.0  # servers see at once that their worker has ended, and then remove what they have made
# This repository goes first in ours, last in the peer's, where "transfer_queue" must be the installed one.
BOOT = """
import sys
sys.path.{how}
from benchmarks.versus.worker import main
main(sys.argv[1:])
"""


class Package:
    """``ask`` does one row in a worker that stays alive between rows, and stands still meanwhile with all it started.

    Else the peer's servers, which look for work a hundred times per second each, would take time from ours.
    """

    def __init__(self, name: str, python: str, version: str, needs_ray: bool) -> None:
        self.name, self._python, self._version, self._needs_ray = name, python, version, needs_ray
        self._folder = tempfile.mkdtemp(prefix="vs-")  # short: Ray makes sockets below it
        self._worker: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def ask(self, row: str, quick: bool, deadline_s: float) -> dict[str, Any]:
        """The row's figures. Raises WorkerError when there are none in time; the next ask starts anew."""
        if self._worker is None:
            self._start()
        else:
            each(self._processes(), psutil.Process.resume)
        try:
            return self._told(row, quick, deadline_s)
        finally:
            each(self._processes(), psutil.Process.suspend)

    def _told(self, row: str, quick: bool, deadline_s: float) -> dict[str, Any]:
        assert self._line is not None
        try:
            self._line.send_bytes(json.dumps({"row": row, "quick": quick}).encode())
        except BrokenPipeError:
            raise self._failed("ended", END_S) from None
        return self._answer(deadline_s)

    def startup(self) -> dict[str, Any]:
        """Import, start, first put and the servers' memory, in a fresh interpreter. Raises WorkerError like ``ask``."""
        settings = {**RAY, "_temp_dir": self._folder}
        before = f"import ray; ray.init(**{settings!r})" if self._needs_ray else ""
        try:
            found = first_put(self._python, self._environment(), before)
        except StartError as error:
            raise WorkerError(str(error)) from error
        finally:
            each(naming(self._folder), psutil.Process.kill)
        self._check(found.pop("version"))
        children = found.pop("children")
        servers = [child for child in children if not self._needs_ray or _is_server(child["name"])]
        found["servers_mib"] = sum(child["pss"] for child in servers)
        found["all_mib"] = sum(child["pss"] for child in children)
        return found

    def close(self) -> None:
        """End the worker and whatever it started."""
        if self._worker is not None:
            each(self._processes(), psutil.Process.resume)
            with contextlib.suppress(BrokenPipeError):
                self._line.send_bytes(json.dumps(None).encode())  # type: ignore[union-attr]
            self._end(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        here, there = socket.socketpair()
        how = f"append({str(ROOT)!r})" if self._needs_ray else f"insert(0, {str(ROOT)!r})"
        arguments = [str(there.fileno()), *([self._folder] if self._needs_ray else [])]
        with open(self._log, "wb") as log:
            self._worker = subprocess.Popen(
                [self._python, "-c", BOOT.format(how=how), *arguments],
                pass_fds=[there.fileno()],
                cwd=self._folder,
                env=self._environment(),
                stdout=log,
                stderr=log,
            )
        there.close()
        self._line = Connection(here.detach())
        answer = self._answer(START_S)
        self._check(answer["version"])
        print(f"{self.name}: {answer['version']} of {answer['package']}", file=sys.stderr, flush=True)

    def _check(self, version: str) -> None:
        if version != self._version:
            raise RuntimeError(f"{self._python} imported version {version} as {self.name}, not {self._version}.")

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        assert self._line is not None
        if not self._line.poll(deadline_s):
            raise self._failed(f"said nothing for {deadline_s:.0f} s", 0.0)
        try:
            answer: dict[str, Any] = json.loads(self._line.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._failed("ended", END_S) from None
        return answer

    def _failed(self, what: str, wait_s: float) -> WorkerError:
        self._end(wait_s)
        said = self._log.read_text(errors="replace")[-3000:]
        return WorkerError(f"{self.name}'s worker {what}; it printed: {said}")

    def _processes(self) -> list[psutil.Process]:
        """The worker and what it started, which is known by being its child, or by naming its folder."""
        if self._worker is None:
            return []
        return [*_tree(self._worker.pid), *naming(self._folder)]

    def _end(self, wait_s: float) -> None:
        assert self._worker is not None
        assert self._line is not None
        started = _tree(self._worker.pid)[1:]
        try:
            self._worker.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait()
        self._line.close()
        self._worker = None
        _, alive = psutil.wait_procs(started, timeout=TIDY_S)
        each([*alive, *naming(self._folder)], psutil.Process.kill)

    @property
    def _log(self) -> Path:
        return Path(self._folder) / "worker.log"

    def _environment(self) -> dict[str, str]:
        threads = {"TQ_NUM_THREADS": str(os.cpu_count())}  # more of them than cores, and the peer logs at every call
        return {**environment_of(None if self._needs_ray else ROOT), **threads, "RAY_USAGE_STATS_ENABLED": "0"}


class WorkerError(RuntimeError):
    """A worker that gave no answer."""


def _is_server(name: str) -> bool:
    return name.startswith(("ray::TransferQueue", "ray::SimpleStorage"))


def _tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; nothing where it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    """Do it to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


def naming(folder: str) -> list[psutil.Process]:
    return [
        process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or ())
    ]
