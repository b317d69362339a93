# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: starts the queue and the processes, makes the faults, starts again what has ended, and notices hangs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hosts import Host
from tests.chaos.actor import AGAIN, main
from tests.chaos.ledger import Ledger, Reader, Record
from tests.chaos.plan import Event, Plan
from tests.chaos.queue_host import START_S, HostsQueue, OwnQueue, Queue
from tests.own_processes import SLOW

HANG_S = 240.0 * SLOW
"""No step forward for so long is a hang. Calls end after 20 s, leases after 15, and a machine may be busy."""
DIE_S = 2.0
FORWARD = ("put", "scored", "trained", "read", "closed", "done", "restored", "mended", "added")
_PRELOADED = (
    "torch", "tensordict", "transfer_queue.interface", "transfer_queue.dataloader", "transfer_queue.checkpoint",
    "tests.chaos.helpers",
)  # fmt: skip
context = multiprocessing.get_context("forkserver")  # a process that was killed is replaced in milliseconds


def preload(worlds: Sequence[str]) -> None:
    """Before the first run: what the processes of these worlds import is imported once."""
    context.set_forkserver_preload([*_PRELOADED, *(f"tests.chaos.{world}" for world in worlds)])


class ChaosError(AssertionError):
    """The run found something."""


@dataclass
class Actor:
    process: Any
    name: str
    role: str
    number: int
    is_killed: bool = False
    is_starved: bool = False

    def may_end_by(self, number: int) -> bool:
        """Whether this signal is no surprise. Libraries in C++ may abort where there is no memory."""
        return (self.is_killed and number == signal.SIGKILL) or (self.is_starved and number == signal.SIGABRT)


class Stage:
    """``hosts``: two network namespaces, or None. ``directory``: of ledgers, and the disk with checkpoints."""

    def __init__(self, plan: Plan, directory: Path, hosts: tuple[Host, Host] | None) -> None:
        get_temp_dir()
        self._plan, self._directory, self._hosts = plan, directory, hosts
        self._world = import_module(f"tests.chaos.{plan.world}")
        self._roles = {**self._world.ROLES, **import_module("tests.chaos.helpers").ROLES}
        self._ledger = Ledger(directory, "stage", 0, 0)
        self._reader = Reader(directory)
        self._actors: dict[str, Actor] = {}
        self._queue: Queue | None = None
        self._serial = self._life = 0
        self._pids: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._trained: set[int] = set()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._last_step = time.monotonic()
        self.done: list[Event] = []

    # ---- the run ----

    def run(self) -> None:
        """Until every process that the world waits for has ended by itself, and an audit after it."""
        try:
            self._open()
            events = list(self._plan.events)
            total = self._world.size(self._plan.actors, self._plan.shape)
            while not self._is_over():
                self._attend()
                while events and len(self._trained) >= events[0].at * total:
                    self._make(events.pop(0))
            self._end_faults()
            (self._directory / "enough").touch()
            self._wait_for_all("the end of the menders")
            self._once("auditor")
            assert self._queue is not None
            self._queue.close()
        finally:
            self._kill_everything()

    def _open(self) -> None:
        """A new queue, from the last checkpoint if there is one."""
        if self._hosts is None:
            self._queue = OwnQueue(context, self._conf())
        else:
            self._queue = HostsQueue(self._hosts, self._conf())
        self._ledger.note("opened", life=self._life, pids=self._queue.pids())
        self._ended.clear()
        self._pids.clear()
        self._last_step = time.monotonic()
        self._once("restorer")
        for name in self._plan.names():
            self._start(name)
        if self._plan.hosts or self._plan.conf["server_processes"] == "each":
            self._start("mender-0")
        self._last_step = time.monotonic()

    def _conf(self) -> dict[str, Any]:
        storage = dict(self._plan.conf["backend"]["SimpleStorage"])
        if "ssd_offload" in storage:
            storage["ssd_offload"] = {**storage["ssd_offload"], "path": str(self._directory / "disk")}
        return {**self._plan.conf, "backend": {"SimpleStorage": storage}}

    def _is_over(self) -> bool:
        return all(name in self._ended for name in self._plan.names())

    # ---- processes ----

    def _start(self, name: str) -> None:
        role, number = name.rsplit("-", 1)
        self._serial += 1
        assert self._queue is not None
        network, environment = self._queue.place_of(int(number) if role in self._plan.actors else 0)
        orders = {
            "role": role, "number": int(number), "serial": self._serial, "life": self._life, "seed": self._plan.seed,
            "shape": {**self._plan.shape, "world": self._plan.world}, "counts": {**self._plan.actors, role: max(
                1, self._plan.actors.get(role, 1))},
            "directory": str(self._directory), "network": network, "environment": environment,
            "before": list(self._pids.get(name, [])),
        }  # fmt: skip
        process = context.Process(target=main, args=(self._roles[role], orders))
        process.start()
        self._pids.setdefault(name, []).append(process.pid)
        self._actors[name] = Actor(process, name, role, int(number))

    def _once(self, role: str) -> None:
        """A process that the run waits for. It goes on after faults."""
        self._start(f"{role}-0")
        self._wait_for_all(f"the end of the {role}")

    def _wait_for_all(self, wanted: str) -> None:
        deadline = time.monotonic() + HANG_S
        while self._actors:
            self._attend(wanted)
            if time.monotonic() > deadline:
                raise self._hang(f"waited for {wanted}")

    def _attend(self, alone: str = "") -> None:
        """Wait a moment, note what happened, and start again what has ended, unless it has done its work."""
        sentinels = {actor.process.sentinel: actor for actor in self._actors.values()}
        for sentinel in wait_for_any(list(sentinels), 0.02):
            self._ended_one(sentinels[sentinel], bool(alone))
        for record in self._reader.new():
            self._notice(record)
        self._run_due()
        if time.monotonic() - self._last_step > HANG_S:
            raise self._hang("no step forward")

    def _run_due(self) -> None:
        for entry in [entry for entry in self._due if entry[0] <= time.monotonic()]:
            self._due.remove(entry)
            entry[1]()

    def _ended_one(self, actor: Actor, is_end: bool) -> None:
        actor.process.join()
        code = actor.process.exitcode
        actor.process.close()
        del self._actors[actor.name]
        if code == 0:
            self._ended.add(actor.name)
        elif code != AGAIN and not actor.may_end_by(-code):
            raise ChaosError(f"{actor.name} ended with exit code {code}\n{self._failure()}")
        elif self._queue is not None and not (is_end and actor.role == "mender"):
            self._start(actor.name)

    def _notice(self, record: Record) -> None:
        is_again = record.event == "trained" and self._trained.issuperset(record.what["numbers"])
        if record.event in FORWARD and not is_again:
            self._last_step = time.monotonic()
        if record.event == "trained":
            self._trained.update(record.what["numbers"])
        if record.event in ("failure", "problem"):
            raise ChaosError(f"{record.actor}: {record.what['text']}")

    def _failure(self) -> str:
        texts = [record.what["text"] for record in self._reader.new() if record.event == "failure"]
        return "\n".join(texts) or "it did not say why"

    def _hang(self, what: str) -> ChaosError:
        for actor in self._actors.values():
            with suppress(ProcessLookupError):
                os.kill(actor.process.pid, signal.SIGUSR1)  # it writes where each of its threads is
        time.sleep(1.0)
        stacks = [path.read_text() for path in sorted(self._directory.glob("*.stacks")) if path.stat().st_size]
        found = "\n".join(stacks)
        return ChaosError(f"{what} for {HANG_S:.0f} s, alive: {sorted(self._actors)}\n{found}")

    # ---- faults ----

    def _make(self, event: Event) -> None:
        self._ledger.note("fault", life=self._life, fault=event.fault, target=event.target)
        self.done.append(event)
        verb = {"kill queue": self._lose_queue, "kill unit": self._lose_unit, "kill all": self._kill_role,
                "kill host": self._lose_host, "kill": self._kill, "die": self._doom, "stop": self._stop,
                "fill": self._fill, "full memory": self._starve, "cut": self._cut}[event.fault]  # fmt: skip
        verb(event)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, then))

    def _end_faults(self) -> None:
        for _, then in self._due:
            then()
        self._due.clear()

    def _kill(self, event: Event) -> None:
        actor = self._actors.get(event.target)
        if actor is not None:
            actor.is_killed = True
            actor.process.kill()

    def _kill_role(self, event: Event) -> None:
        for actor in self._actors.values():
            if actor.role == event.target:
                actor.is_killed = True
                actor.process.kill()

    def _doom(self, event: Event) -> None:
        """It dies in the middle of a step, by its own hand; else it is killed a little later."""
        actor = self._actors.get(event.target)
        if actor is None:
            return
        if not self._has_begun(actor):
            self._kill(event)
            return
        actor.is_killed = True
        os.kill(actor.process.pid, signal.SIGUSR2)
        process = actor.process
        self._later(DIE_S, lambda: self._actors.get(event.target) is actor and process.kill())

    def _has_begun(self, actor: Actor) -> bool:
        """Its handler of the signal is there; without one the signal ends a process."""
        status = Path(f"/proc/{actor.process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)

    def _stop(self, event: Event) -> None:
        pid = self._pid_of(event.target)
        if pid is not None:
            _signal(pid, signal.SIGSTOP)
            self._later(event.hold_s, lambda: _signal(pid, signal.SIGCONT))

    def _pid_of(self, target: str) -> int | None:
        """Of a server or an actor that lives."""
        assert self._queue is not None
        servers = self._queue.pids()
        if target in ("server", "unit"):
            return servers[0] if target == "server" or len(servers) < 2 else servers[-1]
        return self._actors[target].process.pid if target in self._actors else None

    def _starve(self, event: Event) -> None:
        """It gets no more memory for a while."""
        pid = self._pid_of(event.target)
        if pid is None:
            return
        if event.target in self._actors:
            self._actors[event.target].is_starved = True
        limit_memory(pid, psutil.Process(pid).memory_info().vms)
        self._later(event.hold_s, lambda: limit_memory(pid, None))

    def _lose_queue(self, event: Event) -> None:
        """Every process must notice by itself. Then all begins again, from the last checkpoint."""
        self._end_faults()
        queue, self._queue = self._queue, None
        assert queue is not None
        queue.lose(event.target)
        self._wait_for_all("all processes to notice that the queue is gone")
        queue.bury()
        self._life += 1
        self._ledger.note("lost", life=self._life)
        self._open()

    def _lose_unit(self, event: Event) -> None:
        assert self._queue is not None
        self._queue.lose_unit()

    def _lose_host(self, event: Event) -> None:
        """Its server and its programs, at once. The server that comes back needs one that answers."""
        self._end_faults()
        for actor in self._actors.values():
            if actor.number % 2:
                actor.is_killed = True
                actor.process.kill()
        self._lose_unit(event)

    def _cut(self, event: Event) -> None:
        assert self._hosts is not None
        host = self._hosts[1]
        host.cut()
        self._later(event.hold_s, host.heal)

    def _fill(self, event: Event) -> None:
        filler = self._directory / "disk" / f"filler-{len(self.done)}"
        with suppress(OSError), filler.open("wb", 0) as file:
            while True:
                file.write(bytes(4096))
        self._later(event.hold_s, lambda: filler.unlink(missing_ok=True))

    def _kill_everything(self) -> None:
        self._end_faults()
        for actor in self._actors.values():
            actor.process.kill()
            actor.process.join(START_S)
        self._actors.clear()
        queue, self._queue = self._queue, None
        if queue is not None:
            with suppress(Exception):
                queue.close()


def limit_memory(pid: int, nbytes: int | None) -> None:
    """Of its address space. None: as much as it likes."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (nbytes or resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def small_disk(directory: Path, nbytes: int | None) -> Iterator[None]:
    """The folder "disk" in it: of so many bytes, or as large as the one that it lies on."""
    disk = directory / "disk"
    disk.mkdir()
    if nbytes is None:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "chaos", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
