# SPDX-License-Identifier: Apache-2.0
"""Programs in forks of one Python process that has imported what most of them need, which takes each many seconds.

As a program of its own, ``python -m tests.warm_python`` is that process. A fork has the arguments, environment, folder
and files of ``python WORDS...``, and ends as that would. What differs: modules are there that it has not imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
_IMPORTED = ("lightning.pytorch.cli", "lightning_tq.cli", "lightning_tq.datamodule", "transfer_queue.client")
_READ_BEFORE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""What the imports read of the environment: tiny models need one thread, and no test needs the network."""


class Program:
    """One of them. It prints to these files."""

    def __init__(
        self, words: tuple[str | Path, ...], cwd: Path, env: Mapping[str, str] | None, out: IO[str], err: IO[str]
    ) -> None:
        self.command = [str(word) for word in words]
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading)
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in (out.fileno(), err.fileno(), writing)]
        order = {"command": self.command, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
        orders = _warm().stdin
        assert orders is not None
        orders.write(json.dumps({**order, "files": files}) + "\n")
        orders.flush()
        self.pid = int(self._answers.readline())
        os.close(writing)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that killed it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it if it runs."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()


def run_python(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """What ``python WORDS...`` does, where the words are a file or ``-m`` and a module, and then arguments.

    Raises:
        subprocess.TimeoutExpired: after so many seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Program(words, cwd, env, out, err)
        try:
            code = program.wait(timeout)
        finally:
            program.end()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(program.command, code, out.read(), err.read())


@contextmanager
def started(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, out: IO[str] | None = None
) -> Iterator[tuple[Program, IO[str], IO[str]]]:
    """The program, a pipe with what it prints, and a file with its errors. It is killed when the block ends.

    Args:
        out: Where it prints instead.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading) as said, tempfile.TemporaryFile("w+") as err:
        with os.fdopen(writing, "w") as pipe:
            program = Program(words, cwd, env, out or pipe, err)
        try:
            yield program, said, err
        finally:
            program.end()


@cache
def _warm() -> subprocess.Popen[str]:
    """The process that forks, which ends with this one."""
    command = [sys.executable, "-m", "tests.warm_python"]
    warm = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True, env={**os.environ, **_READ_BEFORE})
    atexit.register(warm.communicate)
    return warm


def _next_program() -> tuple[list[str], str, dict[str, str]]:
    """Fork for each order. Returns in the program's own process, which has its files: command, folder, environment."""
    for line in sys.stdin:
        _reap(os.WNOHANG)
        if os.fork() > 0:
            continue
        order = json.loads(line)
        out, err, answers = order["files"]
        with open(answers, "w") as answering:
            program = os.fork()
            if program == 0:
                os.setsid()  # a signal to its group reaches all that it starts, and no test
                _print_to(out, err)
                # From now on, these files may be closed where they are read.
                print(os.getpid(), file=answering)
                break
            print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), file=answering, flush=True)
            os._exit(0)
    else:
        _reap(0)
        sys.exit()
    return order["command"], order["cwd"], order["env"]


def _reap(options: int) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, options)[0]:
            pass


def _print_to(out: str, err: str) -> None:
    for number, path in enumerate((os.devnull, out, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)


def _become(command: list[str], cwd: str, env: Mapping[str, str]) -> None:
    """Be ``python COMMAND`` from here on."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    beside = cwd if is_module else str(Path(command[0]).resolve().parent)
    sys.path[:1] = [beside, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for module in _IMPORTED:
        with contextlib.suppress(ImportError):
            import_module(module)
    gc.freeze()  # a fork that looked through all of this for garbage would copy it: at its end, for two seconds
    _become(*_next_program())
