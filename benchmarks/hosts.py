# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with a link between them, and programs that run there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


def missing_privilege() -> str | None:
    """Why no network namespace can be made here; None if one can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    name = f"tq-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    run("ip", "netns", "delete", name)
    return None


def run(*command: str) -> str:
    """Returns what it printed. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace with an address of its own, and the programs that run in it."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.name = name
        self.address = address
        self.directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program of this host, in a session of its own."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        )
        self._processes.append(process)
        return process

    def serve(self, join: str | None = None, memory: str = "64MiB", *options: str) -> Server:
        """Start a server of the queue, and wait until it answers."""
        keys = self.directory.parent / "keys"
        command = [sys.executable, "-m", "lightning_tq", "serve", "--listen", f"tcp://{self.address}:0"]
        command += ["--key-file", str(keys), "--memory", memory, "--directory", str(self.directory)]
        command += ["--join", join] if join else []
        process = self.start(*command, *options)
        line = said(process)
        assert line.startswith("ready "), line
        return Server(process, *line.split()[1:3])

    def join(self, address: str, *program: str) -> subprocess.Popen[str]:
        """Start a Python program that finds the queue in its environment."""
        keys = self.directory.parent / "keys"
        known = {"TQ_KEY_FILE": str(keys)} if keys.exists() else {}
        return self.start(sys.executable, *program, TQ_ADDRESS=address, **known)

    def received_nbytes(self) -> int:
        """What has come over the link so far."""
        path = f"/sys/class/net/link-{self.name[-1]}/statistics/rx_bytes"
        return int(run("ip", "netns", "exec", self.name, "cat", path))

    def vanish(self) -> None:
        """Kill all its programs at once; nobody hears of it, as the link is cut first."""
        self.cut()
        self.kill()

    def cut(self) -> None:
        """Take the link down at this end."""
        run("ip", "-n", self.name, "link", "set", f"link-{self.name[-1]}", "down")

    def heal(self) -> None:
        """Bring the link up again."""
        run("ip", "-n", self.name, "link", "set", f"link-{self.name[-1]}", "up")

    def kill(self) -> None:
        """Kill all its programs."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()


class Server:
    """A running server: its addresses for programs of its host, and for those of others."""

    def __init__(self, process: subprocess.Popen[str], local: str, remote: str) -> None:
        self.process = process
        self.local = local
        self.remote = remote

    def stop(self) -> int:
        """SIGTERM. Returns the exit code."""
        self.process.terminate()
        return self.process.wait()


def said(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    stdout: IO[str] | None = process.stdout
    assert stdout is not None
    line = stdout.readline()
    assert line, f"the program ended with exit code {process.wait()}"
    return line.strip()


@contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Hosts "a" and "b" with a link between them."""
    number = os.getpid() % 250 + 1
    hosts = []
    with ExitStack() as stack:
        for at, letter in enumerate("ab", 1):
            name = f"tq-{os.getpid()}-{letter}"
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
            (directory / letter).mkdir(mode=0o700)
            hosts.append(Host(name, f"10.213.{number}.{at}", directory / letter))
            stack.callback(hosts[-1].kill)
        a, b = hosts
        run("ip", "-n", a.name, "link", "add", "link-a", "type", "veth", "peer", "name", "link-b", "netns", b.name)
        for host in hosts:
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", f"link-{host.name[-1]}")
            run("ip", "-n", host.name, "link", "set", f"link-{host.name[-1]}", "up")
            run("ip", "-n", host.name, "link", "set", "lo", "up")
        yield a, b
