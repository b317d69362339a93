# SPDX-License-Identifier: Apache-2.0
"""ProducerGroup: processes that fill the queue during a run. They start, are watched and end with it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from multiprocessing.util import Finalize
from typing import IO, Any

import transfer_queue as tq
from lightning_tq.checks import check_choice, check_int, counted
from lightning_tq.producers.process import NOT_FOUND, StartOrder, refuse_to_train
from lightning_tq.producers.target_checks import check_call, loaded_function
from transfer_queue.errors import InvalidRequestError, TransferQueueError

logger = logging.getLogger(__name__)

_KEPT_LINES = 80
_STOP_TIMEOUT_S = 5.0
_LONGEST_PAUSE_S = 30
_OF_A_RANK = re.compile(r"((LOCAL|GROUP|ROLE|NODE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Environment variables of a trainer's rank. A producer that had them could join the process group of the ranks."""
_STAGES = ("fit", "validate", "test", "predict")


class ProducerError(TransferQueueError, RuntimeError):
    """A producer process failed. The text contains the last lines of its stderr, including a traceback."""


@dataclass(frozen=True, kw_only=True)
class Producer:
    """A function or command that puts samples into the queue, in its own processes during a run.

    ``transfer_queue.get_client()`` finds the queue there by TQ_ADDRESS. A process that fails or is killed ends the run,
    unless it has ``restarts``; one that returns is done. All of them end with the run, even if the run is killed.

    Args:
        target: "module:function", a function at the top level of a module, or a command as a list of words. A function
            with parameters "worker" (0 ... count - 1) and "num_workers" gets them. All processes get them as the
            environment variables TQ_WORKER and TQ_NUM_WORKERS.
        count: Number of processes.
        args: Keyword arguments of the function.
        env: Additional environment variables of the processes. They inherit the trainer's, but not those of its rank:
            RANK, WORLD_SIZE, MASTER_ADDR and the like.
        stages: Entry points during which it runs: fit, validate, test, predict.
        name: Its name in messages. Default: the function or command.
        restarts: How often each of its processes is started again if it fails or is killed. The pause before grows: 1,
            2, 4, up to 30 s. The next failure ends the run. A process begins anew, so it must not put twice what is
            to come once.
    Raises:
        InvalidRequestError: a target that another process can't import, arguments that its function doesn't take, or
            another impossible value.
    """

    target: str | list[str] | Callable[..., Any]
    count: int = 1
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    stages: list[str] = field(default_factory=lambda: ["fit"])
    name: str | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        check_int("producer count", self.count, 1)
        check_int("producer restarts", self.restarts, 0)
        for stage in self.stages:
            check_choice(f"each of a producer's stages={self.stages!r}", stage, _STAGES)
        if not isinstance(self.args, Mapping):
            raise InvalidRequestError(f"a producer's args are a mapping of keyword arguments, got args={self.args!r}.")
        if isinstance(self.target, list):
            if not self.target or self.args:
                raise InvalidRequestError(
                    f"a command is a list of words and takes no args, got {self.target!r} and {self.args!r}."
                )
            return
        if isinstance(self.target, str) and not all(self.target.partition(":")):
            raise InvalidRequestError(f"producer target {self.target!r} must be 'module:function' or a list of words.")
        path = self.function_path()
        function = self.target if callable(self.target) else loaded_function(path)
        if function is not None:
            check_call(path, function, self.args)

    def function_path(self) -> str:
        """The function as "module:name". Raises InvalidRequestError if another process can't import it."""
        if isinstance(self.target, str):
            return self.target
        module, name = getattr(self.target, "__module__", None), getattr(self.target, "__qualname__", "<")
        if module is None or "<" in name:
            raise InvalidRequestError(
                f"producer target {self.target!r} can't be imported by another process. Use a function at the top "
                "level of a module."
            )
        return f"{'__main__' if module == '__mp_main__' else module}:{name}"  # a spawned rank has the latter

    def words(self) -> list[str]:
        """Those of the command, or the function as the only one."""
        return self.target if isinstance(self.target, list) else [self.function_path()]

    def label(self) -> str:
        return self.name or " ".join(self.words())

    def client_name(self, worker: int) -> str:
        """What the names of this process' clients begin with: the function's name, or the first word of the command."""
        own = self.name or os.path.basename(self.words()[0]).rpartition(":")[2]
        name = self.env.get("TQ_CLIENT_NAME") or f"{own}-{worker}"
        return re.sub(r"[^\w.-]+", "-", name)[:64]  # as in the names of clients

    def start_order(self, worker: int) -> StartOrder:
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        program = {"init_main_from_path": getattr(main, "__file__", None)}
        if spec is not None:  # it runs with ``python -m``
            program = {"init_main_from_name": spec.name}
        return StartOrder(
            target=self.target if isinstance(self.target, list) else self.function_path(),
            args=pickle.dumps(dict(self.args)),
            worker=worker,
            num_workers=self.count,
            main={"sys_path": list(sys.path), "sys_argv": list(sys.argv), **program},
            parent=os.getpid(),
        )


def check_producers(producers: object) -> list[Producer]:
    """The producers as a list. Raises InvalidRequestError for anything but a list of them."""
    if not isinstance(producers, Sequence) or not all(isinstance(each, Producer) for each in producers):
        raise InvalidRequestError(f"producers must be a list of Producer(target=...), got {producers!r}.")
    return list(producers)


class ProducerProcess:
    """A running producer and the last lines of its stderr. Its thread starts it, and again if it fails."""

    popen: subprocess.Popen[bytes]
    """The process that was started last."""

    def __init__(self, producer: Producer, worker: int, address: str, key_file: str | None) -> None:
        self.label = f"{producer.label()!r} (process {worker + 1} of {producer.count})"
        self.client_name = producer.client_name(worker)
        """What the names of its clients begin with."""
        self._environment = _environment(producer, worker, address, key_file)
        # As a dict: the module that reads it runs as __main__, and would be imported twice for its own class.
        self._order = pickle.dumps(asdict(producer.start_order(worker)))
        self._restarts = producer.restarts
        self.restarted = 0
        """How often it has been started again."""
        self._ending, self._starting = threading.Event(), threading.Lock()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="lightning-tq-producer", daemon=True)
        self._thread.start()
        started.result()

    def _run(self, started: Future[None]) -> None:
        """Start the process, in a thread that outlives it: it is killed when its thread ends."""
        try:
            self._start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while self._may_restart(self.popen.wait()):
            self._pause()
            self._start()
            self.restarted += 1

    def _may_restart(self, code: int) -> bool:
        """Not a process that returned, nor one whose function can't be found: the next one could not find it either."""
        return code not in (0, NOT_FOUND) and self.restarted < self._restarts and not self._ending.is_set()

    def _start(self) -> None:
        with self._starting:
            if self._ending.is_set():
                return
            self._started_at, self._has_joined = time.monotonic(), False
            self._lines.clear()
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "lightning_tq.producers.process"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which ends its producers
            )
            self._output = threading.Thread(
                target=self._forward, args=(self.popen.stderr,), name="lightning-tq-producer-output", daemon=True
            )
            self._output.start()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.popen.stdin as stdin:  # if it has ended, failure() reports how
            stdin.write(self._order)

    def _forward(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                text = line.decode(errors="replace")
                self._lines.append(text)
                sys.stderr.write(text)

    def _pause(self) -> None:
        """Before it is started again. The queue counts no field as lost meanwhile."""
        self.signal(signal.SIGKILL)  # its children may still hold memory of a device
        (how, last), pause_s = self.exit_text(), min(2**self.restarted, _LONGEST_PAUSE_S)
        left = counted(self._restarts - self.restarted - 1, "restart")
        output = f" Its last line on stderr: {last}" if last else ""
        logger.warning(f"{how}. It is started again in {pause_s} s, with {left} left after that.{output}")
        for _ in range(pause_s):
            if self._ending.wait(1.0):
                return
            with contextlib.suppress(TransferQueueError):  # the queue may have ended; and it may learn of a death late
                tq.get_client().expect_producers()

    def has_ended(self) -> bool:
        """Whether it is over, and not started again."""
        return not self._thread.is_alive()

    def is_starting(self, clients: Iterable[str]) -> bool:
        """Whether it runs and has not joined the queue, whose clients these are, at this look or one before."""
        self._has_joined |= any(name.rpartition("_")[0] == self.client_name for name in clients)
        return not self._has_joined and self.popen.poll() is None

    def start_text(self) -> str:
        """Which process has not joined the queue yet, and since when it starts."""
        age_s = time.monotonic() - self._started_at
        return f"producer {self.label}, pid {self.popen.pid}, started {age_s:.0f} s ago"

    def failure(self) -> ProducerError:
        """The error that it has ended with."""
        how, _ = self.exit_text()
        again = f", after it had been started again {counted(self.restarted, 'time')}" if self.restarted else ""
        output = "".join(self._lines).rstrip() or "(nothing)"
        return ProducerError(f"{how}{again}. Its last output on stderr:\n{output}")

    def exit_text(self) -> tuple[str, str]:
        """How it has ended, and the last line of its stderr."""
        code = self.popen.wait()
        self._output.join(_STOP_TIMEOUT_S)
        cause = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        last = next((line.strip() for line in reversed(self._lines) if line.strip()), "")
        return f"producer {self.label}, pid {self.popen.pid}, {cause}", last

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)  # including its own children

    def terminate(self) -> None:
        """SIGTERM. From now on it isn't started again."""
        with self._starting:
            self._ending.set()
        self.signal(signal.SIGTERM)

    def reap(self) -> None:
        try:
            self.popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.popen.wait()
        self._thread.join(_STOP_TIMEOUT_S)
        self._output.join(_STOP_TIMEOUT_S)


class ProducerGroup:
    """All producers of a run. They start and end together.

    Examples:
        >>> group = ProducerGroup([Producer(target=["echo", "hello"])])
        >>> group.start(tq.init().address)
        >>> group.end()
    """

    def __init__(self, producers: Sequence[Producer]) -> None:
        self._producers = check_producers(producers)
        self._processes: list[ProducerProcess] = []
        self._finalizer: Finalize | None = None

    def start(self, address: str, stage: str = "fit", key_file: str | None = None) -> None:
        """Start the producers of this entry point, with the queue's address and keys. Call ``end`` before another.

        Raises:
            InvalidRequestError: they are running already.
            SystemExit: this is a producer process that imports the main program, which must not train there.
        """
        refuse_to_train()
        if self._processes:
            raise InvalidRequestError("these producers are already running. Call end() before start().")
        self._finalizer = Finalize(None, _end, args=(self._processes,), exitpriority=30)
        for producer in self._producers:
            if stage in producer.stages:
                for worker in range(producer.count):
                    self._processes.append(ProducerProcess(producer, worker, address, key_file))

    def runs_in(self, stage: str) -> bool:
        """Whether one of the producers starts in this entry point."""
        return any(stage in producer.stages for producer in self._producers)

    def failure(self) -> ProducerError | None:
        """That of the first process that failed or was killed, and isn't started again. The queue knows of it, too."""
        process = next((each for each in list(self._processes) if each.has_ended() and each.popen.poll()), None)
        if process is None:
            return None
        with contextlib.suppress(TransferQueueError):  # the queue may have ended before it
            tq.get_client().note_exit(process.client_name, *process.exit_text())
        return process.failure()

    def restarted(self) -> int:
        """How often all its processes together have been started again."""
        return sum(process.restarted for process in list(self._processes))

    def running(self) -> list[ProducerProcess] | None:
        """The processes that have not ended, or are started again; None if none was started."""
        processes = list(self._processes)
        return [process for process in processes if not process.has_ended()] if processes else None

    def end(self) -> None:
        """End the running processes: SIGTERM, then SIGKILL. Idempotent; does nothing in a fork.

        The queue hears of it before, so that their end is no finding.
        """
        with contextlib.suppress(TransferQueueError):  # the queue may have ended
            for process in self.running() or ():
                tq.get_client().note_exit(process.client_name, "ended with its run", planned=True)
        if self._finalizer is not None:
            self._finalizer()


def _end(processes: list[ProducerProcess]) -> None:
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.reap()
    except BaseException:  # an impatient Ctrl-C
        for process in processes:
            process.signal(signal.SIGKILL)
        raise
    finally:
        processes.clear()


def _environment(producer: Producer, worker: int, address: str, key_file: str | None) -> Mapping[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)},
        "TQ_ADDRESS": address,
        **({} if key_file is None else {"TQ_KEY_FILE": key_file}),
        "TQ_CLIENT_NAME": producer.client_name(worker),
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
