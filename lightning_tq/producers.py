# SPDX-License-Identifier: Apache-2.0
"""Producers: processes that fill the queue beside a run; started with it, watched, and ended with it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

from lightning_tq.checks import check_int
from transfer_queue.errors import InvalidRequestError, TransferQueueError

_KEPT_LINES = 80
_STOP_TIMEOUT_S = 5.0
_STAGES = ("fit", "validate", "test", "predict")


class ProducerError(TransferQueueError, RuntimeError):
    """A producer process failed; the text holds the last lines that it wrote to stderr, traceback included."""


@dataclass(frozen=True, kw_only=True)
class Producer:
    """A function or a command that runs in processes of its own beside a run, and puts samples into its queue.

    Each process finds the queue by TQ_ADDRESS, which ``transfer_queue.get_client()`` reads. One that ends with an error
    ends the run; one that returns is done. All are ended with the run, also when it is killed.
    """

    target: str | list[str] | Callable[..., Any]
    """"module:function", a function at the top level of a module, or a command as a list of words. A function gets
    "worker" (0 ... count - 1) and "num_workers" if it names them, a command TQ_WORKER and TQ_NUM_WORKERS as environment
    variables."""
    count: int = 1
    """Processes of this kind."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for the processes."""
    stages: list[str] = field(default_factory=lambda: ["fit"])
    """Entry points beside which it runs: fit, validate, test, predict."""
    name: str | None = None
    """What messages call it. Default: the function or command."""

    def __post_init__(self) -> None:
        check_int("producer count", self.count, 1)
        unknown = [stage for stage in self.stages if stage not in _STAGES]
        if unknown:
            raise InvalidRequestError(f"a producer runs beside {', '.join(_STAGES)}, got stages={self.stages!r}.")
        if isinstance(self.target, list):
            if not self.target or self.args:
                raise InvalidRequestError(
                    f"a command is a list of words without args, got {self.target!r}, {self.args!r}."
                )
            return
        if isinstance(self.target, str) and ":" not in self.target:
            raise InvalidRequestError(f"producer target {self.target!r} must be 'module:function' or a list of words.")
        self.where()

    def where(self) -> str:
        """The function as "module:name". Raises InvalidRequestError for one that another process can't import."""
        if isinstance(self.target, str):
            return self.target
        module, name = getattr(self.target, "__module__", None), getattr(self.target, "__qualname__", "<")
        if module is None or "<" in name:
            raise InvalidRequestError(
                f"producer target {self.target!r} can't be imported by another process. Use a function at the top "
                "level of a module."
            )
        return f"{module}:{name}"

    def label(self) -> str:
        """What messages call it."""
        if self.name:
            return self.name
        return " ".join(self.target) if isinstance(self.target, list) else self.where()

    def orders(self, worker: int) -> dict[str, Any]:
        """What the process is told at its start."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        return {
            "command": self.target if isinstance(self.target, list) else None,
            "where": None if isinstance(self.target, list) else self.where(),
            "main_path": getattr(main, "__file__", None), "main_name": None if spec is None else spec.name,
            "args": pickle.dumps(dict(self.args)), "worker": worker, "num_workers": self.count,
            "sys_path": list(sys.path), "parent": os.getpid(),
        }  # fmt: skip


class _Process:
    """One started producer, and the last lines of its stderr."""

    def __init__(self, producer: Producer, worker: int, address: str) -> None:
        self.label = f"{producer.label()!r} (process {worker + 1} of {producer.count})"
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "lightning_tq.producer_process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(producer, worker, address),
            start_new_session=True,  # Ctrl-C reaches the trainer only, which ends its producers itself
        )
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._forward, name="lightning-tq-producer-stderr", daemon=True)
        self._reader.start()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; ``failure`` tells how
            self.popen.stdin.write(pickle.dumps(producer.orders(worker)))
            self.popen.stdin.close()

    def _forward(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            text = line.decode(errors="replace")
            self._lines.append(text)
            sys.stderr.write(text)

    def failure(self) -> ProducerError | None:
        """How it failed; None while it runs or when it ended well."""
        code = self.popen.poll()
        if code is None or code == 0:
            return None
        self._reader.join(_STOP_TIMEOUT_S)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        said = "".join(self._lines).rstrip() or "(nothing)"
        return ProducerError(
            f"producer {self.label}, pid {self.popen.pid}, {how}. The last it wrote to stderr:\n{said}"
        )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)  # its own children, too

    def reap(self) -> None:
        try:
            self.popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.popen.wait()
        self._reader.join(_STOP_TIMEOUT_S)
        assert self.popen.stderr is not None
        if not self._reader.is_alive():
            self.popen.stderr.close()


class ProducerGroup:
    """All producers of a run: a list of processes that start and end together."""

    def __init__(self, producers: Sequence[Producer]) -> None:
        self._producers = list(producers)
        self._processes: list[_Process] = []
        self._finalizer: Finalize | None = None

    def start(self, address: str, stage: str = "fit") -> None:
        """Start those that run beside this stage. Call ``end`` before another start."""
        if self._processes:
            raise InvalidRequestError("these producers are running; end() them before they start again.")
        self._finalizer = Finalize(None, _end, args=(os.getpid(), self._processes), exitpriority=30)
        for producer in self._producers:
            if stage in producer.stages:
                for worker in range(producer.count):
                    self._processes.append(_Process(producer, worker, address))

    def failure(self) -> ProducerError | None:
        """The first process that ended with an error or by a signal."""
        return next((failure for process in list(self._processes) if (failure := process.failure())), None)

    def all_done(self) -> bool:
        """Were there any, and have all ended?"""
        return bool(self._processes) and all(process.popen.poll() is not None for process in self._processes)

    def end(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL. Idempotent; does nothing in a fork."""
        if self._finalizer is not None:
            self._finalizer()


def _end(pid: int, processes: list[_Process]) -> None:
    if os.getpid() != pid:
        return
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        process.reap()
    processes.clear()


def _environment(producer: Producer, worker: int, address: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "TQ_ADDRESS": address,
        "TQ_WORKER": str(worker),
        "TQ_NUM_WORKERS": str(producer.count),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys.path if path)),
        **producer.env,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
