# SPDX-License-Identifier: Apache-2.0
"""RankWatchdog: a thread that ends a run when a process it depends on has ended, so that no rank waits forever."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

_CHECK_EVERY_S = 0.2
_STUCK_AFTER_S = 60.0

Check = Callable[[], BaseException | None]
"""Returns the reason to end the run, or None."""


class RankGoneError(TransferQueueError, RuntimeError):
    """The process of another rank ended in the middle of a run, so collectives can't continue."""


class RankWatchdog:
    """Runs ``checks`` five times a second; the first exception that one returns stops the streams.

    The main thread raises that exception at its next ``check()``. ``hints`` run as often and only log.
    """

    def __init__(
        self, checks: Sequence[Check], hints: Sequence[Callable[[], None]] = (), stuck_after_s: float = _STUCK_AFTER_S
    ) -> None:
        self.stopped = threading.Event()
        """Streams end once this is set."""
        self._checks = checks
        self._hints = hints
        self._stuck_after_s = stuck_after_s
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lightning-tq-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_CHECK_EVERY_S):
            for check in self._checks:
                error = check()
                if error is not None:
                    self._error = error
                    self.stopped.set()
                    self._exit_if_stuck(error)
                    return
            for hint in self._hints:
                hint()

    def _exit_if_stuck(self, error: BaseException) -> None:
        """A main thread inside a collective with a dead rank may never call ``check()``. Then end the process."""
        if isinstance(error, RankGoneError) and not self._end.wait(self._stuck_after_s):
            sys.stderr.write(
                f"error: {error} The main thread did not react within {self._stuck_after_s:g} s, so this process ends "
                f"now.\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def check(self) -> None:
        """Raise the error that ended the run, if there is one."""
        if self._error is not None:
            raise self._error from self._error.__cause__  # not the end of a stream, where this is often called

    def stop(self) -> None:
        """End the thread and every stream. Idempotent."""
        self.stopped.set()
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank, identified well enough to notice its end."""

    rank: int
    namespace: str
    """Kernel and PID namespace that ``pid`` belongs to."""
    pid: int
    started: str
    """Start time, which distinguishes it from a later process with the same pid."""

    @classmethod
    def of(cls, rank: int, pid: int | None = None) -> RankProcess:
        """A living process of this host. Default: this one."""
        own = os.getpid() if pid is None else pid
        return cls(rank, _pid_namespace(), own, _state_and_start(own)[1])

    def has_ended(self) -> bool:
        """True also for a zombie, which has ended but was not waited for."""
        state, started = _state_and_start(self.pid)
        return state in "ZX" or started != self.started


def rank_checks(owner: Trainer | Fabric) -> list[Check]:
    """Checks of the other ranks on this host, and of the process that started this rank.

    This is a collective: all ranks must call it. ``run_members`` checks the ranks of other hosts.
    """
    return [_other_ranks_check(owner.global_rank, _gather_processes(owner)), _parent_check(owner.global_rank)]


def _gather_processes(owner: Trainer | Fabric) -> list[RankProcess]:
    """The processes of the other ranks on this host."""
    import torch.distributed as dist

    own = RankProcess.of(owner.global_rank)
    if owner.world_size == 1 or not own.started or not (dist.is_available() and dist.is_initialized()):
        return []
    gathered: list[RankProcess] = [own] * owner.world_size
    dist.all_gather_object(gathered, own)
    return [each for each in gathered if each.rank != own.rank and each.namespace == own.namespace]


def _other_ranks_check(rank: int, others: list[RankProcess]) -> Check:
    def check() -> BaseException | None:
        gone = next((other for other in others if other.has_ended()), None)
        if gone is None:
            return None
        return RankGoneError(
            f"rank {gone.rank} (pid {gone.pid}) ended in the middle of the run, so rank {rank} ends too. "
            f"See that rank's own output for the reason."
        )

    return check


def _parent_check(rank: int) -> Check:
    """Spawned and forked ranks would outlive the process that started them."""
    parent = os.getppid()
    is_child = multiprocessing.parent_process() is not None

    def check() -> BaseException | None:
        if not is_child or os.getppid() == parent:
            return None
        return RankGoneError(f"the process that started rank {rank} (pid {parent}) ended, so this rank ends too.")

    return check


def _pid_namespace() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """A process's state and start time from /proc; ("X", "") for a process that is gone, or without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", ""
    after_name = status.rpartition(")")[2].split()  # the name may contain spaces and brackets
    return after_name[0], after_name[19]
