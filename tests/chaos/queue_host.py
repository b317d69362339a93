# SPDX-License-Identifier: Apache-2.0
"""The queue of a world: an owner with its servers on this host, or servers on two hosts; and how it is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from typing import Any

import psutil

import transfer_queue as tq
from benchmarks.hosts import Host, Server
from tests.own_processes import SLOW

START_S = 100.0 * SLOW
LOST_THE_QUEUE = 2
"""The exit code of a server that had joined."""


class Queue(ABC):
    """``address``: for this process, and for the processes of this host. ``environment``: for all others."""

    @abstractmethod
    def place_of(self, number: int) -> tuple[str | None, dict[str, str]]:
        """The network namespace of an actor, and its environment."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Of the servers, the controller's first."""

    @abstractmethod
    def lose(self, which: str) -> None:
        """Kill the server with the controller, or its owner."""

    @abstractmethod
    def lose_unit(self) -> bool:
        """Kill a server with a storage unit alone. False: there is none."""

    @abstractmethod
    def bury(self) -> None:
        """Wait until all of its processes have ended by themselves."""

    @abstractmethod
    def close(self) -> None:
        """End it as a program does."""


def owner_main(conf: dict[str, Any], mouth: Any) -> None:
    """The program of the owner: it starts the queue, and ends it when it is told to, or when nobody listens."""
    running = tq.init(conf)
    units = running.backend.SimpleStorage.zmq_info
    pids = list(dict.fromkeys([running.controller.zmq_info.pid, *(units[name].pid for name in units)]))
    mouth.send((str(running.address), [int(pid) for pid in pids]))
    with contextlib.suppress(EOFError):
        mouth.recv()
    tq.close()


class OwnQueue(Queue):
    """Of this host: a process owns it, whose children are the servers."""

    def __init__(self, context: Any, conf: dict[str, Any]) -> None:
        self._ear, mouth = context.Pipe()
        self._owner = context.Process(target=owner_main, args=(conf, mouth))
        self._owner.start()
        mouth.close()
        assert self._ear.poll(START_S), "the queue did not start"
        address, self._pids = self._ear.recv()
        self._environment = {"TQ_ADDRESS": address}
        self._units = self._pids[1:]

    def place_of(self, number: int) -> tuple[str | None, dict[str, str]]:
        return None, self._environment

    def pids(self) -> list[int]:
        return [pid for pid in self._pids if _lives(pid)]

    def lose(self, which: str) -> None:
        if which == "owner":
            self._owner.kill()
        else:
            os.kill(self._pids[0], signal.SIGKILL)

    def lose_unit(self) -> bool:
        if len(self._units) < 2:
            return False
        os.kill(self._units.pop(), signal.SIGKILL)
        return True

    def bury(self) -> None:
        if self._owner.is_alive() and not _lives(self._pids[0]):
            self.close()
        self._owner.join(START_S)
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in self._pids if psutil.pid_exists(pid)], START_S)
        assert not alive, f"servers outlive their queue: {alive}"
        self._ear.close()
        self._owner.close()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._ear.send("close")
        self._owner.join(START_S)
        assert not self._owner.is_alive(), "the owner of the queue does not end"


class HostsQueue(Queue):
    """Of two hosts, with a server each; every second actor is on the second host."""

    def __init__(self, hosts: tuple[Host, Host], conf: dict[str, Any]) -> None:
        self.hosts = hosts
        a, b = hosts
        self._memory = str(conf["backend"]["SimpleStorage"]["capacity_bytes"])
        self._first = self._serve(a, None)
        self._second: Server | None = self._serve(b, self._first.remote)

    def _serve(self, host: Host, join: str | None) -> Server:
        return host.serve(join, self._memory)

    def place_of(self, number: int) -> tuple[str | None, dict[str, str]]:
        host = self.hosts[number % 2]
        server = self._second if number % 2 and self._second else self._first
        address = server.local if server is not self._first or not number % 2 else server.remote
        keys = host.directory.parent / "keys"
        return host.name, {"TQ_ADDRESS": address, "TQ_KEY_FILE": str(keys)}

    def pids(self) -> list[int]:
        servers = [self._first] + ([self._second] if self._second else [])
        return [each.process.pid for each in servers if each.process.poll() is None]

    def lose(self, which: str) -> None:
        self._first.process.kill()

    def lose_unit(self) -> bool:
        if self._second is None:
            return False
        self._second.process.kill()
        self._second.process.wait()
        self._second = self._serve(self.hosts[1], self._first.remote)
        return True

    def bury(self) -> None:
        self._first.process.wait(START_S)
        if self._second is not None:
            self._second.process.wait(START_S)

    def close(self) -> None:
        if self._second is not None:
            by_itself = self._second.process.poll()
            code = self._second.stop()
            # Two cuts in a row may last longer than its session. It is lost then, and says so.
            assert (code, by_itself) in ((0, None), (LOST_THE_QUEUE, LOST_THE_QUEUE)), f"exit code {code}"
        assert self._first.stop() == 0, "the first host's server failed"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
